"""Gemma 3 270M, real weights: five block formats, local and global layers, a prompt longer than the window.

Collected in `make parity` only (conftest.py). The graph runs on the NumPy executor (measured: worst 8e-5) and on the
CPU backend (measured: rms at most 0.06, worst 0.36, margins of other tokens 0.062, in units of the logits' spread).
"""

from collections.abc import Iterator
from pathlib import Path

import backend_runner
import numpy as np
import pytest
from agreement import Rule, agree
from golden_files import real_goldens

from headrace.backend.cpu import CpuBackend
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.numpy_executor import NumpyExecutor

GRAPH_RULE = Rule(tolerance=5e-4, rms=1e-4)
BACKEND_RULE = Rule(tolerance=0.5, rms=0.08, margin=0.1, max_flips=6)


@pytest.fixture(scope="module")
def executor(gemma3_gguf: Path) -> NumpyExecutor:
    checkpoint = open_checkpoint(gemma3_gguf)
    return NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint, np.float32)


@pytest.mark.parametrize("prompt", ["prose", "facts", "code", "multilingual", "emoji", "long"])
def test_graph(executor: NumpyExecutor, prompt: str) -> None:
    golden = real_goldens("gemma3-270m")[prompt]
    logits = executor.logits(golden.forced_ids, golden.rows)
    assert agree(golden, logits).problems(GRAPH_RULE) == []


@pytest.fixture(scope="module")
def backend(gemma3_gguf: Path) -> Iterator[CpuBackend]:
    backend = backend_runner.open_backend(gemma3_gguf, max_model_len=1024)
    yield backend
    backend.close()


@pytest.mark.parametrize("prompt", real_goldens("gemma3-270m"))
def test_backend(backend: CpuBackend, prompt: str) -> None:
    golden = real_goldens("gemma3-270m")[prompt]
    rows = backend_runner.forced_rows(backend, golden, chunk=64)
    assert backend_runner.agree(golden, rows).problems(BACKEND_RULE.times(golden.spread)) == []
