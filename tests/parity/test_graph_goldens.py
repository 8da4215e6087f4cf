"""Graph and checkpoint against transformers, with no kernel in between: the NumPy executor runs the graph.

Tolerances are those of float32 arithmetic (the tiny models run in float64 on our side). Logits have a standard
deviation of 0.2 to 2 in the tiny models and 4 to 8 in the real one; measured differences are at most 1.2e-5 and 7e-5.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agreement import Golden, Rule, agree
from golden_files import TINY_MODELS, real_goldens, tiny_folder, tiny_golden, tiny_prompt_logits
from mistakes import MISTAKES

from headrace.model.checkpoint import FileCheckpoint, open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.graph import Graph
from headrace.model.numpy_executor import NumpyExecutor

TINY_RULE = Rule(tolerance=1e-4, rms=2e-5)
REAL_RULE = Rule(tolerance=5e-4, rms=1e-4)


def run(checkpoint: FileCheckpoint, graph: Graph, golden: Golden) -> np.ndarray:
    return NumpyExecutor(graph, checkpoint).logits(golden.forced_ids, golden.rows)


@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_model(model: str) -> None:
    checkpoint, golden = open_checkpoint(tiny_folder(model)), tiny_golden(model)
    executor = NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint)
    logits = executor.logits(golden.forced_ids)
    prompt_rows = tiny_prompt_logits(model)
    np.testing.assert_allclose(logits[: len(prompt_rows)], prompt_rows, rtol=0, atol=TINY_RULE.tolerance)
    assert agree(golden, logits[golden.rows]).problems(TINY_RULE) == []


@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_model_left_to_itself_says_the_same(model: str) -> None:
    checkpoint, golden = open_checkpoint(tiny_folder(model)), tiny_golden(model)
    executor = NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint)
    ids = list(golden.prompt)
    for _ in golden.tokens[:16]:
        ids.append(int(executor.logits(ids, [len(ids) - 1])[0].argmax()))
    assert ids[len(golden.prompt) :] == golden.tokens[:16]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> NumpyExecutor:
    checkpoint = open_checkpoint(smollm2_gguf)
    return NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint, np.float32)


@pytest.mark.parametrize("prompt", ["facts", "chat"])
def test_smollm2(smollm2: NumpyExecutor, prompt: str) -> None:
    golden = real_goldens("smollm2-135m")[prompt]
    logits = smollm2.logits(golden.forced_ids, golden.rows)
    assert agree(golden, logits).problems(REAL_RULE) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    model, apply = MISTAKES[mistake]
    checkpoint, golden = open_checkpoint(tiny_folder(model)), tiny_golden(model)
    graph = apply(checkpoint, build_graph(checkpoint.config, checkpoint))
    assert agree(golden, run(checkpoint, graph, golden)).problems(TINY_RULE) != []


def test_rules_of_agreement() -> None:
    golden = Golden([5], [1, 2], np.array([[1, 0], [2, 1]]), np.array([[3.0, 1.0], [2.0, 1.95]]), np.zeros(2))
    assert golden.forced_ids == [5, 1]
    assert golden.rows == [0, 1]
    rule = Rule(tolerance=0.1, rms=0.1, margin=0.1, max_flips=1)
    same = np.array([[1.0, 3.0, 0.0], [0.0, 1.95, 2.0]])
    assert agree(golden, same).problems(rule) == []
    close_flip = np.array([[1.0, 3.0, 0.0], [0.0, 2.0, 1.95]])
    assert agree(golden, close_flip).problems(rule) == []
    assert len(agree(golden, close_flip).problems(replace(rule, max_flips=0))) == 1
    assert len(agree(golden, close_flip).problems(replace(rule, margin=0.01))) == 1
    assert len(agree(golden, close_flip).problems(replace(rule, rms=0.01))) == 1
    far_flip = np.array([[3.0, 1.0, 0.0], [0.0, 1.95, 2.0]])
    assert len(agree(golden, far_flip).problems(rule)) == 3  # worst and mean of the logits, and the token
    assert agree(golden, np.full((2, 3), np.nan)).problems(rule) != []
