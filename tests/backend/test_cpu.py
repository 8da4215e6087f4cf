"""CpuBackend as a Backend: the protocol, masks, logprobs, copies, isolation, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, TOP, Driver, random_prompt, tiny_backend
from tiny_model import CONFIG, GEMMA, TinyCheckpoint, random_rows

from headrace import _C
from headrace.backend.cpu import CpuBackend, CpuBackendError
from headrace.backend.fusion import LoweringError
from headrace.backend.lower import kernel_plan, packed_bytes
from headrace.base.errors import ConfigError, ModelFileError
from headrace.core.batch import Batch, BatchError, OutputFlag, RowStatus
from headrace.core.kv_group import KVDtype
from headrace.core.request import SamplingParams
from headrace.model.decoder import build_graph
from headrace.model.formats import FORMATS
from headrace.model.graph import Graph, Op

VOCAB = CONFIG.vocab_size
Change = Callable[[Batch], dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint() -> TinyCheckpoint:
    return TinyCheckpoint(CONFIG, "Q8_0")


@pytest.fixture
def driver(checkpoint: TinyCheckpoint) -> Driver:
    return Driver(tiny_backend(checkpoint, threads=2, num_blocks=32))


def one_step(driver: Driver, length: int = 20, params: SamplingParams = GREEDY) -> Batch:
    sequence = driver.sequence(random_prompt(length, VOCAB), length + 8, params)
    return driver.batch([sequence.scheduled(length, 32)])


def test_steps_come_back_in_the_order_of_submission(driver: Driver) -> None:
    first, second = one_step(driver, 20), one_step(driver, 30)
    driver.backend.submit(first)
    driver.backend.submit(second)
    with pytest.raises(CpuBackendError, match="in flight"):
        driver.backend.submit(first)
    assert driver.backend.collect().step_id == first.step_id
    assert driver.backend.collect().step_id == second.step_id
    with pytest.raises(CpuBackendError, match="no step"):
        driver.backend.collect()
    driver.backend.close()
    with pytest.raises(CpuBackendError, match="closed"):
        driver.backend.submit(first)


def test_a_token_may_come_from_the_step_before(driver: Driver) -> None:
    expected = driver.sequence(random_prompt(20, VOCAB), 28, GREEDY)
    driver.finish([expected], 2)
    sequence = driver.sequence(random_prompt(20, VOCAB), 28, GREEDY)
    driver.backend.submit(driver.batch([sequence.scheduled(20, 32)]))
    sequence.computed = 20
    sequence.request.output_token_ids.append(0)  # not known yet
    batch = driver.batch([sequence.scheduled(1, 32)])
    driver.backend.submit(replace(batch, token_source=np.array([0], np.int32)))
    assert driver.backend.collect().token_ids.tolist() == expected.tokens[:1]
    assert driver.backend.collect().token_ids.tolist() == expected.tokens[1:]


def test_masks_in_the_batch_and_given_later(driver: Driver) -> None:
    batch = one_step(driver)
    driver.backend.submit(batch)
    free = int(driver.backend.collect().token_ids[0])
    allowed = np.arange(-(-VOCAB // 32) * 32) != free
    bits = np.packbits(allowed, bitorder="little").view(np.int32)[np.newaxis].copy()
    masked = replace(batch, mask_row=np.zeros(1, np.int32), mask_bits=bits)
    driver.backend.submit(masked)
    chosen = int(driver.backend.collect().token_ids[0])
    assert chosen != free
    nothing = replace(masked, step_id=99, mask_bits=np.full_like(bits, -1))
    driver.backend.submit(nothing)
    driver.backend.set_masks(99, bits)
    assert int(driver.backend.collect().token_ids[0]) == chosen
    driver.backend.submit(nothing)
    assert int(driver.backend.collect().token_ids[0]) == free


def test_prompt_logprobs_are_those_of_decoding(driver: Driver) -> None:
    """A forced continuation scores as it did when it was sampled."""
    params = replace(GREEDY, logprobs=3)
    sequence = driver.sequence(random_prompt(20, VOCAB), 30, params)
    driver.finish([sequence], 5)
    ids = [*sequence.request.prompt_token_ids, *sequence.tokens]
    forced = driver.sequence(ids, 30, SamplingParams(prompt_logprobs=3))
    result = driver.compute([replace(forced.scheduled(len(ids), 32), first_row=19, samples=False)])
    assert len(result.token_ids) == 0
    decoded = [np.frombuffer(row, np.float32)[:4] for row in sequence.rows]
    assert result.logprobs.tobytes() == np.array(decoded).tobytes()
    assert result.top_ids.shape == (5, 3)
    assert (result.top_ids[:, 0] == sequence.tokens).all()


def test_rows_of_a_mixed_step(driver: Driver) -> None:
    """One decodes with logprobs, one prefills without output, one finishes its prompt without logprobs."""
    decoding = driver.sequence(random_prompt(10, VOCAB), 20, GREEDY)
    driver.finish([decoding], 1)
    middle = driver.sequence(random_prompt(90, VOCAB), 100, GREEDY)
    plain = driver.sequence(random_prompt(40, VOCAB), 50, replace(GREEDY, logprobs=None))
    result = driver.step([(decoding, 1), (middle, 50), (plain, 40)])
    assert result.cu_tokens.tolist() == [0, 1, 1, 2]
    assert result.num_accepted.tolist() == [0, 0, 0]
    assert result.logprobs.shape == (2, 1 + TOP)
    assert np.isfinite(result.logprobs[0]).all()
    assert np.isnan(result.logprobs[1]).all()
    assert (result.top_ids[1] == -1).all()
    assert np.isfinite(result.signals).all()
    assert result.ended_ns >= result.started_ns
    assert len(result.phase_ns) == len(driver.backend.phase_names)
    assert (result.phase_ns > 0).any()


def test_a_copied_block_continues_alike(driver: Driver) -> None:
    """Copy on write: a fork gets its own last block in the step in which it goes its own way."""
    first = driver.sequence(random_prompt(40, VOCAB), 60, GREEDY)
    driver.finish([first], 1)
    fork = driver.sequence(first.request.prompt_token_ids, 60, GREEDY, prefix=first)
    fork.request.output_token_ids.extend(first.tokens)
    fork.rows.extend(first.rows)
    fork.computed = first.computed
    driver.finish([first], 4)
    copies = [(0, int(first.tables[0][1]), int(fork.tables[0][1]))]
    driver.step([(fork, 1)], copies)
    driver.finish([fork], 4)
    assert fork.tokens == first.tokens
    assert fork.rows == first.rows


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_blocks_can_be_read_and_written_elsewhere(checkpoint: TinyCheckpoint, kv_dtype: KVDtype) -> None:
    driver = Driver(tiny_backend(checkpoint, num_blocks=32, kv_dtype=kv_dtype))
    first = driver.sequence(random_prompt(40, VOCAB), 60, GREEDY)
    driver.finish([first], 1)
    data = driver.backend.read_blocks(0, first.tables[0])
    assert len(data) == len(first.tables[0]) * 32 * driver.backend.spec.kv_groups[0].bytes_per_token(kv_dtype)
    other = Driver(tiny_backend(checkpoint, num_blocks=32, kv_dtype=kv_dtype), seed=5)
    moved = other.sequence(first.request.prompt_token_ids, 60, GREEDY)
    other.backend.write_blocks(0, moved.tables[0], data)
    moved.computed = first.computed
    moved.request.output_token_ids.extend(first.tokens)
    driver.finish([first], 4)
    other.finish([moved], 4)
    assert moved.tokens == first.tokens
    assert moved.rows == first.rows[1:]
    with pytest.raises(ValueError, match="block outside"):
        driver.backend.read_blocks(0, np.array([32], np.int32))
    with pytest.raises(ValueError, match="not one block"):
        driver.backend.write_blocks(0, moved.tables[0], data[:-1])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("num_tokens", [40, 20])
def test_numbers_that_are_not_finite_fail_their_own_sequence_only(num_tokens: int, kv_dtype: KVDtype) -> None:
    """An embedding of infinity: seen even in the middle of a prompt, where no row would show it."""
    checkpoint = TinyCheckpoint(CONFIG, "F32")
    build_graph(CONFIG, checkpoint)
    rows = checkpoint.weight(checkpoint.ref("token_embd.weight", (VOCAB, CONFIG.hidden_size)))
    rows.data.view(np.float32)[5] = np.inf
    driver = Driver(tiny_backend(checkpoint, threads=2, num_blocks=32, kv_dtype=kv_dtype))
    alone = driver.sequence([7, 8, 9] * 8, 30, GREEDY)
    driver.finish([alone], 3)
    healthy = driver.sequence([7, 8, 9] * 8, 30, GREEDY)
    broken = driver.sequence([7, 5, 9] * 13 + [7], 48, GREEDY)
    result = driver.step([(broken, num_tokens), (healthy, 24)])
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.cu_tokens.tolist() == [0, 0, 1]
    driver.finish([healthy], 3)
    assert healthy.tokens == alone.tokens
    assert healthy.rows == alone.rows


REFUSED: dict[str, tuple[str, Change]] = {
    "a token outside the vocabulary": ("input_ids", lambda b: {"input_ids": np.full_like(b.input_ids, VOCAB)}),
    "a negative token": ("input_ids", lambda b: {"input_ids": np.full_like(b.input_ids, -1)}),
    "a block outside the pool": ("block_tables", lambda b: {"block_tables": (b.block_tables[0] + 1000,)}),
    "no block": ("block_tables", lambda b: {"block_tables": (np.full_like(b.block_tables[0], -1),)}),
    "a table too narrow": ("block_tables", lambda b: {"block_tables": (b.block_tables[0][:, :0].copy(),)}),
    "a slot of another block": ("slot_mapping", lambda b: {"slot_mapping": (b.slot_mapping[0] + 1,)}),
    "positions of another place": ("positions", lambda b: {"positions": b.positions + 1}),
    "three position components": ("positions", lambda b: {"positions": np.repeat(b.positions, 3, axis=0)}),
    "a length below its tokens": ("seq_lens", lambda b: {"seq_lens": b.seq_lens - 10}),
    "bounds that end early": ("cu_seqlens_q", lambda b: {"cu_seqlens_q": b.cu_seqlens_q - np.int32([0, 1])}),
    "output rows that descend": (
        "not one entry an output row|output_rows",
        lambda b: {"output_rows": np.array([5, 5], np.int32)},
    ),
    "an output row beyond": ("output_rows", lambda b: {"output_rows": b.output_rows + 100}),
    "an adapter": ("adapter_ids", lambda b: {"adapter_ids": b.adapter_ids + 1}),
    "drafts": ("num_draft_tokens", lambda b: {"num_draft_tokens": b.num_draft_tokens + 1}),
    "hidden states": (
        "output_flags",
        lambda b: {"output_flags": b.output_flags | np.uint8(OutputFlag.HIDDEN)},
    ),
    "more of a context than there are blocks": ("positions|seq_lens", lambda b: {"seq_lens": b.seq_lens + 5000}),
    "a mask that is not there": ("mask_row", lambda b: {"mask_row": np.ones_like(b.mask_row)}),
    "a wrong dtype": ("seq_lens", lambda b: {"seq_lens": b.seq_lens.astype(np.int64)}),
    "a bias outside the vocabulary": (
        "bias_ids",
        lambda b: {
            "sampling": replace(
                b.sampling,
                bias_cu=np.array([0, 1], np.int32),
                bias_ids=np.array([VOCAB], np.int32),
                bias_values=np.ones(1, np.float32),
            )
        },
    ),
    "a temperature missing": (
        "temperature",
        lambda b: {"sampling": replace(b.sampling, temperature=np.empty(0, np.float32))},
    ),
    "a token of a row that was not": ("token_source", lambda b: {"token_source": np.full_like(b.token_source, 3)}),
    "embeddings of another width": (
        "embeds",
        lambda b: {"embed_rows": np.zeros(1, np.int32), "embeds": np.zeros((1, 3), np.float32)},
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_batch_that_contradicts_itself_is_refused_by_name(driver: Driver, what: str) -> None:
    name, change = REFUSED[what]
    batch = one_step(driver)
    driver.backend.submit(replace(batch, **change(batch)))
    with pytest.raises(BatchError, match=name):
        driver.backend.collect()
    driver.backend.submit(batch)
    assert driver.backend.collect().status.tolist() == [0]


def test_a_step_larger_than_the_spec_is_refused_at_submit(driver: Driver) -> None:
    sequences = [driver.sequence([1], 8, GREEDY) for _ in range(20)]
    batch = driver.batch([s.scheduled(1, 32) for s in sequences])
    small = Driver(tiny_backend(TinyCheckpoint(CONFIG, "Q8_0"), num_blocks=32, max_tokens=8))
    with pytest.raises(BatchError, match="larger"):
        small.backend.submit(batch)


def test_given_embeddings_replace_those_of_the_table(checkpoint: TinyCheckpoint, driver: Driver) -> None:
    """The embedding of token 3, given as numbers, is token 3."""
    sequence = driver.sequence([9, 3, 4], 8, GREEDY)
    driver.finish([sequence], 1)
    table = checkpoint.weight(checkpoint.ref("token_embd.weight", (VOCAB, CONFIG.hidden_size)))
    row = _C.Kernels("auto").embed(table.data, 8, CONFIG.hidden_size, np.array([3], np.int32), 1.0)
    batch = driver.batch([driver.sequence([9, 0, 4], 8, GREEDY).scheduled(3, 32)])
    driver.backend.submit(replace(batch, embed_rows=np.array([1], np.int32), embeds=np.asarray(row, np.float32)))
    assert driver.backend.collect().token_ids.tolist() == sequence.tokens


def test_an_instruction_set_that_is_not_here(checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"cannot run sse9; it can run .*reference"):
        tiny_backend(checkpoint, isa="sse9")


def test_a_graph_that_cannot_be_lowered(checkpoint: TinyCheckpoint, driver: Driver) -> None:
    graph = build_graph(CONFIG, checkpoint)
    strange = Graph((Op("moe", ("logits",), "logits"),), graph.tensors, graph.axes, graph.kv_groups)
    with pytest.raises(LoweringError, match="moe"):
        CpuBackend(strange, checkpoint, driver.backend.spec)


def test_a_head_that_the_kernels_cannot_hold() -> None:
    with pytest.raises(LoweringError, match="head_dim 40"):
        tiny_backend(TinyCheckpoint(replace(CONFIG, num_heads=8, head_dim=40), "F32"))


def test_a_width_that_a_format_cannot_have() -> None:
    with pytest.raises(ModelFileError, match=r"ffn_down.*no packed layout"):
        tiny_backend(TinyCheckpoint(replace(CONFIG, intermediate_size=72), lambda n: "Q8_0" if "down" in n else "F32"))


def test_progress_ends_at_one(checkpoint: TinyCheckpoint) -> None:
    seen: list[float] = []
    graph = build_graph(CONFIG, checkpoint)
    CpuBackend(graph, checkpoint, tiny_backend(checkpoint).spec, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 4


@pytest.mark.parametrize("fmt", FORMATS)
def test_memory_is_planned_with_the_bytes_that_packing_takes(fmt: str) -> None:
    spec, rows = FORMATS[fmt], random_rows(np.random.default_rng(0), fmt, 100, 256)
    packed = _C.Kernels("auto").pack(rows, spec.type_number, 256)
    assert _C.packed_bytes(spec.type_number, 100, 256) == packed.nbytes
    config = replace(CONFIG, num_layers=1, tie_word_embeddings=True)
    one = packed_bytes(build_graph(config, TinyCheckpoint(config, fmt)))
    config = replace(CONFIG, num_layers=2, tie_word_embeddings=True)
    two = packed_bytes(build_graph(config, TinyCheckpoint(config, fmt)))
    rows_of_a_layer = 5 * 256 + 2 * 128  # q, output, gate, up, down; k, v: each 256 wide
    per_row = max(packed.nbytes // 128, spec.row_bytes(256))  # 100 rows fill four panels
    assert two - one == rows_of_a_layer * per_row + 2 * 4 * 256  # and two norms


def test_the_plan_names_a_kernel_for_every_operation() -> None:
    graph = build_graph(GEMMA, TinyCheckpoint(GEMMA, lambda name: "Q4_0" if "attn" in name else "BF16"))
    plan = dict(zip((op.output for op in graph.ops), kernel_plan(graph, "reference"), strict=True))
    assert plan["blk.0.attn_q"] == "reference gemm w4 x int8"
    assert plan["blk.0.attn_k"] == "in the GEMM of attn_q"
    assert plan["blk.0.ffn_gated"] == "reference gemm bf16 x f32, gelu_tanh"
    assert plan["blk.0.post_ffw_norm"] == "reference norm_rows += residual"
    assert plan["blk.0.ffn_residual"] == "in the norm before"
    assert all("not supported" not in kernel for kernel in plan.values())
