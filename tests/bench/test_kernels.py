"""`headrace bench kernels` through the command, and what a measurement says."""

import json
from pathlib import Path

import pytest

from headrace.bench.kernel_cases import FORMATS, LAYERS, Case, random_rows
from headrace.bench.kernels import instruction_sets, measure
from headrace.bench.profile import Limits
from headrace.cli.bench import main
from headrace.cli.bench_kernels import KERNELS

LIMITS = Limits(read=1e9, int8=4e9, bf16=0.0, fp32=2e9)
SHORT = ["--milliseconds", "0.1", "--rows", "1,9", "--contexts", "64"]


def case(peak: str, operations: float) -> Case:
    return Case("k", "s", 1, 1000.0, operations, peak, lambda: sum(range(10_000)), lambda: None, scale=2.0)


def test_fractions_are_of_the_peak_of_its_products() -> None:
    result = measure("avx2", case("int8", 8e3), LIMITS, 1e-4)
    assert result.of_read == pytest.approx(result.gb_per_s)
    assert result.gb_per_s == pytest.approx(1000.0 / (1e3 * result.us))
    assert result.gop_per_s == pytest.approx(8 * result.gb_per_s)
    assert result.of_peak == pytest.approx(result.gop_per_s / 4)


def test_without_bf16_products_the_peak_is_that_of_float32() -> None:
    result = measure("avx2", case("bf16", 8e3), LIMITS, 1e-4)
    assert result.gop_per_s is not None
    assert result.of_peak == pytest.approx(result.gop_per_s / 2)


def test_a_kernel_without_products_has_no_peak() -> None:
    result = measure("avx2", case("", 0.0), LIMITS, 1e-4)
    assert (result.gop_per_s, result.of_peak) == (None, None)


@pytest.mark.parametrize("name", FORMATS)
def test_random_rows_have_the_size_of_their_format(name: str) -> None:
    _, inputs, size, _ = FORMATS[name]
    assert random_rows(name, 3, 256).shape == (3, 256 // inputs * size)


def test_the_command_measures_every_kernel_on_every_instruction_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    assert main(["kernels", *SHORT, "--formats", "Q4_1,F16", "--layers", "o", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [part["isa"] for part in found] == instruction_sets()
    for part in found:
        assert f"limits measured here, {part['isa']}, 1 thread" in out
        assert {m["kernel"].split()[0] for m in part["measurements"]} == set(KERNELS)
        assert all(m["us"] > 0 and m["isa"] == part["isa"] for m in part["measurements"])
        gemms = [(m["kernel"], m["rows"]) for m in part["measurements"] if m["kernel"].startswith("gemm")]
        assert gemms == [("gemm Q4_1", 1), ("gemm Q4_1", 9), ("gemm F16", 1), ("gemm F16", 9)]
    assert out.count("\n") == sum(len(part["measurements"]) + 2 for part in found)


def test_json_on_standard_output_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    isa = instruction_sets()[0]
    assert main(["kernels", *SHORT, "--kernels", "norm_quant", "--isas", isa, "--json", "-"]) == 0
    (part,) = json.loads(capsys.readouterr().out)
    assert [m["rows"] for m in part["measurements"]] == [1, 9, 1, 9]


@pytest.mark.parametrize(
    ("flag", "text", "says"),
    [
        ("--kernels", "gem", "(did you mean gemm?)"),
        ("--formats", "Q4_9", "is not one of F32, F16"),
        ("--layers", "all", f"is not one of {', '.join(LAYERS)}"),
        ("--isas", "avx1024", "is not one of"),
        ("--rows", "0", "outside 1 to 4096"),
    ],
)
def test_an_unknown_word_is_refused(flag: str, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main as command

    assert command(["bench", "kernels", flag, text]) == 2
    error = capsys.readouterr().err
    assert flag in error
    assert says in error


def test_its_variables_are_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADRACE_BENCH_KERNELS_KERNELS", "norm_quant")
    assert main(["kernels", *SHORT, "--isas", instruction_sets()[0]]) == 0
    printed = capsys.readouterr()
    assert "gemm" not in printed.out
    assert printed.err == ""
