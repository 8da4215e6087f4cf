"""What pack() writes, pinned to PACK_VERSION: packed weights on disk outlive the build that made them."""

import hashlib

import numpy as np
import pytest
from raw_blocks import FLOATS, QUANTS, random_rows, type_number

from headrace import _C

# A failure here means that the layouts changed: raise kPackVersion in csrc/kernels.h, then note the version and the new
# digests. Files of packed weights that the old version left are then passed over.
VERSION = 1
DIGESTS = {
    "F32": "9e19ab17f304d72e",
    "F16": "0ef100266b7a9493",
    "BF16": "f4feb1e2bdced469",
    "Q4_0": "0e42c7b7611e6bc9",
    "Q4_1": "40639802015bc443",
    "Q5_0": "70a1a8667a121037",
    "Q5_1": "d6c22c92a752e408",
    "Q8_0": "986f6d0a1eaaa37d",
    "Q4_K": "97159ac04edff778",
    "Q5_K": "7a83f26e4b93dfd0",
    "Q6_K": "d1a22f3ece1f1df6",
}


def digest(name: str, isa: str) -> str:
    kernels, k = _C.Kernels(isa), 256
    rows, up = random_rows(name, 40, k, 1), random_rows(name, 40, k, 2)
    plain = kernels.pack(rows, type_number(name), k)
    gated = kernels.pack(rows, type_number(name), k, up)
    whole = np.asarray(plain.data).tobytes() + np.asarray(gated.data).tobytes()
    return hashlib.sha256(whole).hexdigest()[:16]


@pytest.mark.parametrize("isa", _C.instruction_sets())
@pytest.mark.parametrize("name", [*FLOATS, *QUANTS])
def test_layouts_are_those_of_the_version(name: str, isa: str) -> None:
    assert _C.PACK_VERSION == VERSION
    assert digest(name, isa) == DIGESTS[name]
