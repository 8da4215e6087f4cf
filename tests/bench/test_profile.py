"""The yardsticks, and the profile of a tiny model through the command."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace import _C
from headrace.bench.profile import Limits, Profile, Row, Scenario, table
from headrace.cli.main import main

TINY = Path(__file__).parents[1] / "data" / "tiny"
PORTABLE = ("reference", "avx512-emulated")


@pytest.mark.parametrize("isa", _C.instruction_sets())
def test_limits_are_those_of_instructions_that_exist(isa: str) -> None:
    pool = _C.Pool(2, spin=False)
    found = {kind: _C.measure_peak(pool, isa, kind) for kind in ("read", "int8", "bf16", "fp32")}
    assert found["read"] > 0 and found["fp32"] > 0
    assert (found["int8"] > 0) == (isa not in PORTABLE)
    assert (found["bf16"] > 0) == (isa == "avx512")


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="not read, int8, bf16 or fp32"):
        _C.measure_peak(_C.Pool(1, spin=False), "reference", "int4")


def test_the_slower_of_memory_and_products_is_the_limit() -> None:
    limits = Limits(read=1e9, int8=4e9, bf16=0.0, fp32=0.0)
    row = Row("qkv", "gemm", 1, ns=4000.0, moved=1000.0, operations=8000.0, peak=limits.int8)
    assert row.of_limit(limits) == pytest.approx(0.5)  # 1 us of reading, 2 us of products
    unknown = Row("qkv", "gemm", 1, ns=4000.0, moved=1000.0, operations=8000.0, peak=limits.bf16)
    assert unknown.of_limit(limits) == pytest.approx(0.25)


def test_records_waiting_and_python_add_up_to_the_step() -> None:
    row = Row("qkv", "gemm", 1, ns=40.0, moved=1.0, operations=1.0, peak=1.0)
    profile = Profile(Scenario(True, 1, 8), [row], wall_ns=100.0, kernel_ns=70.0, tokens=1)
    assert (profile.idle_ns, profile.outside_ns) == (30.0, 30.0)


def test_the_table_says_how_far_apart_the_cores_are() -> None:
    limits = Limits(read=1e9, int8=4e9, bf16=0.0, fp32=0.0)
    apart = Profile(Scenario(False, 1, 8), [], wall_ns=1e6, kernel_ns=1e6, tokens=8, line_ns=(154.6, 0.0))
    assert "  a cache line from one core to another: 155 ns before, unknown after" in list(table(apart, limits))
    single = Profile(Scenario(False, 1, 8), [], wall_ns=1e6, kernel_ns=1e6, tokens=8)
    assert not [line for line in table(single, limits) if "cache line" in line]


def test_a_cache_line_takes_time_or_the_cores_were_never_there() -> None:
    assert 0.0 <= _C.measure_line_ns() < 1e6


@pytest.mark.parametrize("model", ["llama3", "gemma3"])  # gemma3 has windowed layers
def test_the_command_prints_every_scenario_and_draws_them(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "profile.svg"
    sizes = ["--batch", "1,3", "--context", "24", "--tokens", "32", "--repeats", "2"]
    memory = ["--threads", "2", "--kv-cache-memory-bytes", "16M"]
    assert main(["profile", str(TINY / model), *sizes, *memory, "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    names = ["decode, 1 stream at context 24", "decode, 3 streams at context 24", "prefill of 32 tokens"]
    for name in names:
        assert f"\n{name}: " in out
    for part in ("gemm", "attention", "norm_quant", "waiting for work", "outside the kernels"):
        assert out.count(f"{part}") >= len(names)
    svg = ElementTree.fromstring(picture.read_text())
    titles = [title.text or "" for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    for name in names:
        assert any(title.startswith(name) for title in titles)


@pytest.mark.parametrize(("flag", "text"), [("--batch", "1,x"), ("--batch", "0"), ("--tokens", "8,65537")])
def test_a_wrong_list_names_its_flag(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(TINY / "llama3"), flag, text]) == 2
    assert f"{flag}: '{text}'" in capsys.readouterr().err


def test_a_scenario_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--threads", "1", "--kv-cache-memory-bytes", "16M", "--batch", "1", "--repeats", "1"]
    assert main(["profile", str(TINY / "llama3"), *small, "--context", "100k", "--tokens", "8"]) == 1
    assert "larger than the model's context or KV cache" in capsys.readouterr().err
