"""The same request gives the same bits, whatever is computed beside it, in which chunks, from which blocks, on how many
threads. Compared are tokens, logprobs and signals as bytes. Pools are filled with NaN first.
"""

from dataclasses import replace

import numpy as np
import pytest
from driver import GREEDY, SEEDED, Driver, Sequence, random_prompt, tiny_backend
from tiny_model import CONFIG, GEMMA, TinyCheckpoint

from headrace import _C
from headrace.core.kv_group import KVDtype
from headrace.core.request import SamplingParams
from headrace.model.config import ModelConfig
from headrace.model.formats import FORMATS

NAN = 0x7FC0
ISAS = _C.instruction_sets()
OUTPUTS = 6


def run(checkpoint: TinyCheckpoint, length: int, *, chunk: int = 512, threads: int = 1, **how: object) -> Sequence:
    """A prompt of `length` tokens and a few outputs, alone on a fresh backend."""
    params = how.pop("params", GREEDY)
    assert isinstance(params, SamplingParams)
    driver = Driver(tiny_backend(checkpoint, threads=threads, fill=NAN, **how))  # type: ignore[arg-type]
    sequence = driver.sequence(random_prompt(length, checkpoint.config.vocab_size), length + OUTPUTS, params)
    driver.finish([sequence], OUTPUTS, chunk)
    return sequence


def assert_same(one: Sequence, other: Sequence) -> None:
    assert one.status == other.status == 0
    assert one.tokens == other.tokens
    assert one.rows == other.rows
    assert len(one.rows) == OUTPUTS


@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="llama"), pytest.param(GEMMA, id="gemma")])
@pytest.mark.parametrize("length", [31, 32, 33, 255, 256, 257])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_chunks_and_threads_at_the_edges_of_blocks_and_partitions(
    config: ModelConfig, length: int, kv_dtype: KVDtype
) -> None:
    checkpoint = TinyCheckpoint(config, "Q8_0")
    alone = run(checkpoint, length, kv_dtype=kv_dtype)
    for chunk in (16, 63):
        assert_same(alone, run(checkpoint, length, chunk=chunk, kv_dtype=kv_dtype))
    for threads in (2, 4):
        assert_same(alone, run(checkpoint, length, threads=threads, kv_dtype=kv_dtype))
        assert_same(alone, run(checkpoint, length, threads=threads, chunk=100, kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_long_contexts(length: int, kv_dtype: KVDtype) -> None:
    """Decoding here splits attention over partitions and threads; on one thread nothing is split."""
    checkpoint = TinyCheckpoint(CONFIG, "Q4_1")
    alone = run(checkpoint, length, kv_dtype=kv_dtype)
    assert_same(alone, run(checkpoint, length, threads=2, chunk=300, kv_dtype=kv_dtype))
    assert_same(alone, run(checkpoint, length, threads=4, chunk=512, kv_dtype=kv_dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_and_instruction_set(fmt: str, isa: str) -> None:
    checkpoint = TinyCheckpoint(replace(CONFIG, num_layers=1), fmt)
    alone = run(checkpoint, 40, isa=isa, params=SEEDED)
    assert_same(alone, run(checkpoint, 40, isa=isa, params=SEEDED, chunk=16, threads=2))


@pytest.mark.parametrize("params", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
def test_in_a_batch_of_32(params: SamplingParams) -> None:
    """Neighbours of all lengths, decoding and prefilling in the same steps, on two threads, from other blocks."""
    checkpoint = TinyCheckpoint(CONFIG, "Q4_0")
    alone = run(checkpoint, 70, params=params)
    driver = Driver(tiny_backend(checkpoint, threads=2, fill=NAN, num_blocks=400), seed=3)
    others = [
        driver.sequence(random_prompt(n, CONFIG.vocab_size, seed=n), n + 100, replace(params, seed=n))
        for n in range(9, 350, 11)
    ]
    assert len(others) == 31
    for other in others[:16]:  # these decode when the request arrives
        driver.finish([other], 1)
    request = driver.sequence(random_prompt(70, CONFIG.vocab_size), 100, params)
    batch = [*others[:20], request, *others[20:]]
    while len(request.tokens) < OUTPUTS:
        budget, work = 200, []
        for sequence in batch:
            count = min(32, budget, sequence.request.num_tokens - sequence.computed)
            budget -= count
            if count:
                work.append((sequence, count))
        driver.step(work)
        batch = batch[1:] + batch[:1]  # another order in every step
        batch.sort(key=lambda s: s is not request and len(s.tokens) > 2)
    assert_same(alone, request)


@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="llama"), pytest.param(GEMMA, id="gemma")])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_after_a_prefix_hit(config: ModelConfig, kv_dtype: KVDtype) -> None:
    checkpoint = TinyCheckpoint(config, "Q5_1")
    alone = run(checkpoint, 300, kv_dtype=kv_dtype)
    driver = Driver(tiny_backend(checkpoint, threads=2, fill=NAN, kv_dtype=kv_dtype))
    prompt = random_prompt(300, config.vocab_size)
    first = driver.sequence([*prompt[:290], 1, 2, 3], 400, GREEDY)
    driver.finish([first], 4, chunk=90)
    second = driver.sequence(prompt, 400, GREEDY, prefix=first)
    assert second.computed == 288
    driver.finish([second], OUTPUTS)
    assert_same(alone, second)


def test_after_preemption() -> None:
    """Everything is forgotten after two outputs and computed again, the outputs as part of the prefill."""
    checkpoint = TinyCheckpoint(CONFIG, "Q4_K")
    alone = run(checkpoint, 90, params=SEEDED)
    driver = Driver(tiny_backend(checkpoint, fill=NAN))
    sequence = driver.sequence(random_prompt(90, CONFIG.vocab_size), 120, SEEDED)
    driver.finish([sequence], 2)
    again = driver.sequence(sequence.request.prompt_token_ids, 120, SEEDED)
    again.request.output_token_ids.extend(sequence.tokens)
    again.rows.extend(sequence.rows)
    driver.finish([again], OUTPUTS, chunk=40)
    assert_same(alone, again)


def test_what_a_window_has_left_is_not_read() -> None:
    """Blocks that a windowed group has let go: -1, or another sequence's and full of NaN."""
    checkpoint = TinyCheckpoint(GEMMA, "Q8_0")
    alone = run(checkpoint, 200)
    driver = Driver(tiny_backend(checkpoint, threads=2, fill=NAN))
    groups = driver.backend.spec.kv_groups
    window_group = next(i for i, group in enumerate(groups) if group.kind == "window")
    window = groups[window_group].window
    sequence = driver.sequence(random_prompt(200, GEMMA.vocab_size), 240, GREEDY)
    poison = np.full(driver.backend.caches[window_group].block_bytes // 2, NAN, np.uint16).tobytes()
    while len(sequence.tokens) < OUTPUTS:
        gone = max(0, sequence.computed - window + 1) // driver.backend.spec.block_size
        for index, block in enumerate(sequence.tables[window_group][:gone]):
            if block < 0:
                continue
            driver.backend.write_blocks(window_group, np.array([block], np.int32), poison)
            if index % 2:
                sequence.tables[window_group][index] = -1
        driver.step([(sequence, min(50, sequence.request.num_tokens - sequence.computed))])
    assert (sequence.tables[window_group][:5] == -1).any()
    assert_same(alone, sequence)


def test_a_moved_partition_boundary_changes_bits() -> None:
    """Turns the tests above into ones that can fail: attention with partitions of 192 instead of 256 positions."""
    rng = np.random.default_rng(0)
    blocks, heads, dim, tokens = 20, 2, 64, 600
    k_cache, v_cache = (
        (rng.normal(size=(blocks, heads, dim * 32)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for _ in range(2)
    )
    q = rng.normal(size=(1, 4 * dim)).astype(np.float32)

    def attend(partition: int) -> bytes:
        kernels, out = _C.Kernels("auto"), np.zeros((1, 4 * dim), np.float32)
        parts = -(-tokens // partition)
        items = np.array([[0, head, 0, 1, 0, parts, -1] for head in range(heads)], np.int32)
        kernels.attention(
            q, out, k_cache.view(np.uint8), v_cache.view(np.uint8),
            np.arange(blocks, dtype=np.int32)[None], np.array([0, 1], np.int32), np.array([tokens], np.int32),
            dim, 32, "bf16", dim**-0.5, 0, 0.0, items, partition,
        )  # fmt: skip
        return out.tobytes()

    assert attend(256) == attend(256)
    assert attend(192) != attend(256)
