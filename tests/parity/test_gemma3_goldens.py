"""Gemma 3 270M, real weights: six block formats, local and global layers, a prompt longer than the window.

Collected in `make parity` only (conftest.py). The graph runs on the NumPy executor and on the CPU backend.
"""

from pathlib import Path

import numpy as np
import pytest
from agreement import agree
from golden_files import real_goldens
from numpy_executor import NumpyExecutor

from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph

RULE = {"tolerance": 5e-4, "margin": 0.0, "max_flips": 0}


@pytest.fixture(scope="module")
def executor(gemma3_gguf: Path) -> NumpyExecutor:
    checkpoint = open_checkpoint(gemma3_gguf)
    return NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint, np.float32)


@pytest.mark.parametrize("prompt", ["prose", "facts", "code", "multilingual", "emoji", "long"])
def test_graph(executor: NumpyExecutor, prompt: str) -> None:
    golden = real_goldens("gemma3-270m")[prompt]
    logits = executor.logits(golden.forced_ids, golden.rows)
    assert agree(golden, logits).problems(**RULE) == []
