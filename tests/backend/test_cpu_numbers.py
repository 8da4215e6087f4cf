"""The CPU backend against a float64 executor of the same graph: every weight format, every family's switches."""

from dataclasses import replace

import numpy as np
import pytest
from driver import Driver, random_prompt, tiny_backend
from tiny_model import CONFIG, GEMMA, TinyCheckpoint

from headrace import _C
from headrace.core.kv_group import KVDtype
from headrace.core.request import SamplingParams
from headrace.model.config import ModelConfig
from headrace.model.decoder import build_graph
from headrace.model.formats import FORMATS
from headrace.model.numpy_executor import NumpyExecutor

FLOATS = ("F32", "F16", "BF16")
# Root mean square of the logprobs' error. Float weights: the KV cache is bf16, of 8 bits. Others: activations are int8
# with a scale per 32, which costs about 0.4 % a matrix.
TOLERANCE = {True: 0.01, False: 0.06}


def logprobs_of(
    checkpoint: TinyCheckpoint, ids: list[int], *, isa: str = "auto", chunk: int = 17, kv_dtype: KVDtype = "bf16"
) -> np.ndarray:
    """[len(ids) - 1, vocab] of a prompt, through prompt logprobs."""
    vocab = checkpoint.config.vocab_size
    backend = tiny_backend(checkpoint, isa=isa, threads=2, max_tokens=64, kv_dtype=kv_dtype)
    params = SamplingParams(prompt_logprobs=vocab)
    driver = Driver(backend)
    sequence = driver.sequence(ids, len(ids) + 1, params)
    out = np.empty((len(ids) - 1, vocab), np.float32)
    while sequence.computed < len(ids) - 1:
        start, count = sequence.computed, min(chunk, len(ids) - 1 - sequence.computed)
        item = replace(sequence.scheduled(count, 32), first_row=0)
        result = driver.compute([item])
        assert not result.status.any()
        np.put_along_axis(out[start : start + count], result.top_ids, result.logprobs[:, 1:], axis=1)
        sequence.computed += count
    return out


def expected(checkpoint: TinyCheckpoint, ids: list[int]) -> np.ndarray:
    logits = NumpyExecutor(build_graph(checkpoint.config, checkpoint), checkpoint).logits(ids)[:-1]
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def check(
    checkpoint: TinyCheckpoint,
    tolerance: float,
    *,
    isa: str = "auto",
    length: int = 50,
    kv_dtype: KVDtype = "bf16",
) -> None:
    ids = random_prompt(length, checkpoint.config.vocab_size)
    reference, ours = expected(checkpoint, ids), logprobs_of(checkpoint, ids, isa=isa, kv_dtype=kv_dtype)
    error = np.sqrt(((ours - reference) ** 2).mean())
    spread = np.sqrt(((reference - reference.mean(axis=1, keepdims=True)) ** 2).mean())
    assert spread > 0.5  # or the comparison would show nothing
    assert error < tolerance * spread


@pytest.mark.parametrize("isa", _C.instruction_sets())
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_on_every_instruction_set(fmt: str, isa: str) -> None:
    check(TinyCheckpoint(CONFIG, fmt), TOLERANCE[fmt in FLOATS], isa=isa)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(replace(CONFIG, qkv_bias=True), id="qkv bias"),
        pytest.param(replace(CONFIG, qk_norm=True), id="head norms"),
        pytest.param(replace(CONFIG, tie_word_embeddings=True), id="tied head"),
        pytest.param(replace(CONFIG, num_kv_heads=4), id="no grouping"),
        pytest.param(replace(CONFIG, num_kv_heads=1), id="one KV head"),
        pytest.param(replace(CONFIG, num_heads=6, head_dim=48), id="heads wider than hidden"),
        pytest.param(GEMMA, id="gemma"),
    ],
)
@pytest.mark.parametrize("fmt", ["F32", "Q8_0"])
def test_every_switch_of_the_families(config: ModelConfig, fmt: str) -> None:
    check(TinyCheckpoint(config, fmt), TOLERANCE[fmt in FLOATS])


def test_an_output_bias() -> None:
    check(TinyCheckpoint(CONFIG, "F32", q_bias=True), TOLERANCE[True])


@pytest.mark.parametrize(
    "apart", [("attn_k",), ("attn_v",), ("attn_q", "attn_v"), ("ffn_up",), ("ffn_down", "attn_output")]
)
def test_formats_that_cannot_share_a_matrix(apart: tuple[str, ...]) -> None:
    """What is fused when formats agree runs apart when they differ, float beside int8 too."""

    def rule(name: str) -> str:
        return "Q8_0" if any(part in name for part in apart) else "F16"

    check(TinyCheckpoint(replace(CONFIG, qkv_bias=True), rule), TOLERANCE[False])
    check(TinyCheckpoint(GEMMA, rule), TOLERANCE[False])


def test_a_prompt_of_many_partitions() -> None:
    check(TinyCheckpoint(CONFIG, "F32"), TOLERANCE[True], length=700)


@pytest.mark.parametrize("isa", _C.instruction_sets())
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="llama"),
        pytest.param(GEMMA, id="gemma"),
        pytest.param(replace(CONFIG, num_heads=6, head_dim=48), id="heads of 48"),
    ],
)
def test_an_int8_cache(config: ModelConfig, isa: str) -> None:
    """Weights as F32, so that the cache is what differs from float64."""
    check(TinyCheckpoint(config, "F32"), 2 * TOLERANCE[True], isa=isa, length=300, kv_dtype="int8")
