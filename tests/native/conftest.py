"""Every kernel table that this machine can run; builds for tests add the AVX-512 kernels, emulated."""

import pytest

from headrace._C import Kernels, instruction_sets


@pytest.fixture(params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)
