"""What a matrix is given, counted while listening and not otherwise."""

from pathlib import Path

import numpy as np
import pytest

from headrace.model.calibrate import CalibratingExecutor
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.numpy_executor import NumpyExecutor

TINY = Path(__file__).parents[1] / "data" / "tiny"


@pytest.mark.parametrize("model", ["smollm2", "qwen2"])
def test_every_matrix_gets_the_mean_square_of_its_inputs(model: str) -> None:
    checkpoint = open_checkpoint(TINY / model)
    graph = build_graph(checkpoint.config, checkpoint)
    executor = CalibratingExecutor(graph, checkpoint)
    ids = np.random.default_rng(0).integers(0, 160, 50).tolist()
    expected = NumpyExecutor(graph, checkpoint, np.float32).logits(ids)
    np.testing.assert_array_equal(executor.logits(ids), expected)
    assert executor.importance() == {}
    executor.listening = True
    executor.logits(ids[:20])
    executor.logits(ids[20:])
    found = executor.importance()
    matrices = {ref.name for op in graph.ops if op.kind in ("linear", "gated_mlp") for ref in op.weights}
    assert found.keys() == matrices
    assert all(values.dtype == np.float32 and values.mean() == pytest.approx(1, rel=1e-2) for values in found.values())
    # The first layer's queries see the normalised embedding and nothing else.
    table = executor._load(graph.ops[0].weights[0])[ids]
    gain = executor._load(graph.ops[1].weights[0])
    inputs = table / np.sqrt((table**2).mean(axis=1, keepdims=True) + checkpoint.config.rms_norm_eps) * gain
    squares = (inputs**2).mean(axis=0)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], squares / squares.mean(), rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(found["blk.0.attn_q.weight"], found["blk.0.attn_v.weight"])
    np.testing.assert_array_equal(found["blk.0.ffn_gate.weight"], found["blk.0.ffn_up.weight"])
