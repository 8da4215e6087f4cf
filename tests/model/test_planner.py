"""Counting a graph against counting by hand, and fitting contexts into memory."""

from pathlib import Path

from headrace.core.kv_group import KVGroup
from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.planner import kv_bytes, measure_graph

TINY = Path(__file__).parents[1] / "data" / "tiny"
FULL = KVGroup("full", (0, 1), 2, 64)
WINDOW = KVGroup("window", (2, 3, 4), 2, 64, 100)


def test_a_llama_counted_by_hand() -> None:
    checkpoint = open_checkpoint(TINY / "llama3")
    size = measure_graph(build_graph(checkpoint.config, checkpoint))
    layer = 64 * 64 + 32 * 64 * 2 + 64 * 64 + 3 * 96 * 64
    head = 160 * 64
    assert size.parameters == 2 * layer + 2 * head + 5 * 64
    assert size.weight_bytes == 2 * size.parameters  # all bf16
    assert size.bytes_by_format == {"BF16": size.weight_bytes}
    assert size.operations_per_token == 2 * 2 * layer
    assert size.operations_per_row == 2 * head
    assert size.attention_operations == (2 * 2 * 2 * 4 * 16,)
    assert size.kv_bytes_per_token == (2 * 2 * 2 * 16 * 2,)


def test_a_tied_head_counts_its_bytes_once_and_its_work_still() -> None:
    checkpoint = open_checkpoint(TINY / "gemma3")
    size = measure_graph(build_graph(checkpoint.config, checkpoint))
    stored = (TINY / "gemma3" / "model.safetensors").stat().st_size
    assert 0 < stored - size.weight_bytes < 20_000  # the header
    assert size.operations_per_row == 2 * 160 * 64
    assert size.kv_bytes_per_token == (2 * 32 * 2, 6 * 2 * 32 * 2)


def test_windowed_layers_stop_growing() -> None:
    per_block = (FULL.bytes_per_token() * 32, WINDOW.bytes_per_token() * 32)
    assert kv_bytes((FULL, WINDOW), 1, 32) == sum(per_block)
    assert kv_bytes((FULL, WINDOW), 64, 32) == 2 * sum(per_block)
    assert kv_bytes((FULL, WINDOW), 32 * 100, 32) == 100 * per_block[0] + 5 * per_block[1]
