"""Memory as the kernel reports it, and what an engine makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, ModelTooLargeError
from headrace.core.kv_group import KVGroup
from headrace.engine import memory
from headrace.engine.memory import Memory, available_memory, show_bytes
from headrace.engine.sizing import Demand, size_kv

GIB = 1 << 30
FULL = (KVGroup("full", tuple(range(30)), 3, 64),)
MIXED = (KVGroup("full", tuple(range(3)), 1, 256), KVGroup("window", tuple(range(15)), 1, 256, 512))
DEMAND = Demand(max_model_len=0, max_num_seqs=64, max_num_batched_tokens=512, kv_cache_memory_bytes=0, block_size=32)


def machine(root: Path, available: int, files: dict[str, str], cgroup: str) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def test_version_2_counts_reclaimable_cache_as_free(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": str(GIB),
        "sys/fs/cgroup/a/memory.max": str(4 * GIB),
        "sys/fs/cgroup/a/memory.current": str(3 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    root = machine(tmp_path, 16 * GIB, files, "0::/a/b\n")
    assert available_memory(root) == Memory(2 * GIB, "cgroup")


def test_version_1_and_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
    }
    root = machine(tmp_path, 16 * GIB, files, "4:memory:/docker/0123\n3:cpu:/\n0::/\n")
    assert available_memory(root) == Memory(2 * GIB - GIB // 2, "cgroup")


@pytest.mark.parametrize("limit", ["9223372036854771712", str(64 * GIB)])
def test_a_limit_above_the_machine_does_not_bind(tmp_path: Path, limit: str) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
    }
    root = machine(tmp_path, 16 * GIB, files, "4:memory:/\n")
    assert available_memory(root) == Memory(16 * GIB, "machine")


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, 16 * GIB, {}, "")
    (root / "proc/self/statm").write_text("100 50 10 1 0 20 0\n")
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (GIB, GIB))
    found = available_memory(root)
    assert found.available == GIB - 100 * memory.resource.getpagesize()
    assert found.limited_by == "address space limit"


def test_this_machine_has_memory() -> None:
    assert available_memory().available > 0


def test_bytes_are_shown_with_three_digits() -> None:
    shown = [show_bytes(count) for count in (0, 999, 1536 << 10, 98_362_432, 3 * GIB, 5000 * GIB)]
    assert shown == ["0 bytes", "999 bytes", "1.5 MiB", "93.8 MiB", "3 GiB", "5000 GiB"]


def bytes_of(groups: tuple[KVGroup, ...], num_blocks: tuple[int, ...]) -> int:
    return sum(group.bytes_per_token() * 32 * count for group, count in zip(groups, num_blocks, strict=True))


@pytest.mark.parametrize("groups", [FULL, MIXED])
@pytest.mark.parametrize("free", [GIB // 4, GIB, 8 * GIB, 200 * GIB])
def test_blocks_fill_the_budget_and_never_pass_it(groups: tuple[KVGroup, ...], free: int) -> None:
    sizes = size_kv(groups, 8192, 100 << 20, Memory(free, "machine"), DEMAND)
    assert sizes.kv_bytes == bytes_of(groups, sizes.num_blocks) <= free // 2
    assert sizes.num_kv_tokens == max(sizes.num_blocks) * 32
    assert 0 < sizes.max_model_len <= min(8192, sizes.num_kv_tokens)
    if sizes.max_model_len < 8192:
        assert "8192" in sizes.context_reason


def test_more_than_every_seat_can_use_is_not_taken() -> None:
    sizes = size_kv(FULL, 2048, 0, Memory(500 * GIB, "machine"), DEMAND)
    assert sizes.num_blocks == (64 * 2048 // 32,)
    assert sizes.kv_reason == "64 sequences of 2048 tokens"


def test_windowed_groups_get_what_they_can_use() -> None:
    sizes = size_kv(MIXED, 32768, 0, Memory(16 * GIB, "machine"), DEMAND)
    full, window = sizes.num_blocks
    assert window == 64 * (512 // 32 + 2) + 512 // 32 < full
    assert sizes.max_model_len == 32768


def test_what_does_not_fit_says_what_would() -> None:
    def size(fixed: int, **changes: int) -> None:
        fields = {name: getattr(DEMAND, name) for name in Demand.__slots__}
        size_kv(FULL, 8192, fixed, Memory(GIB, "cgroup"), Demand(**{**fields, **changes}))

    with pytest.raises(ModelTooLargeError, match=r"needs 2 GiB .*cgroup has 1 GiB free.*at most 954 MiB would fit"):
        size(2 * GIB)
    with pytest.raises(ModelTooLargeError, match=r"at most .* would fit"):
        size(0, kv_cache_memory_bytes=2 * GIB)
    with pytest.raises(ModelTooLargeError, match=r"least that is useful"):
        size(0, kv_cache_memory_bytes=1000)
    with pytest.raises(ModelTooLargeError, match=r"--max-model-len 4544 would fit"):
        size(0, max_model_len=8192, kv_cache_memory_bytes=100 << 20)
    with pytest.raises(ConfigError, match=r"--max-model-len 9000 .* 8192"):
        size(0, max_model_len=9000)


def test_an_int8_cache_holds_nearly_twice_the_tokens() -> None:
    """A head of 64 takes 68 bytes instead of 128."""
    tokens = {}
    for dtype in ("bf16", "int8"):
        demand = replace(DEMAND, kv_cache_memory_bytes=64 << 20, kv_dtype=dtype)
        sizes = size_kv(FULL, 8192, 0, Memory(GIB, "machine"), demand)
        tokens[dtype] = sizes.num_kv_tokens
        assert sizes.kv_bytes == sizes.num_blocks[0] * 32 * FULL[0].bytes_per_token(dtype)  # type: ignore[arg-type]
    assert tokens["int8"] / tokens["bf16"] == pytest.approx(128 / 68, abs=0.02)
