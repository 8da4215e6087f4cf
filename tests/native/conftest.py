"""Every kernel table that this machine can run."""

import pytest

from headrace._C import Kernels, instruction_sets


@pytest.fixture(params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)
