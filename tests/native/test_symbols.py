"""No function compiled for one instruction set may be visible to the linker, or it could stand in for another's.

The ISA files are compiled as CMake would, but without optimisation: then every inline function stays a function.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FLAGS: dict[str, list[str]] = {"reference": []}
if platform.machine() == "x86_64":
    FLAGS["avx2"] = ["-march=x86-64-v3"]
    FLAGS["avx512"] = ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"]


@pytest.mark.parametrize("isa", FLAGS)
def test_an_isa_file_exports_its_table_and_nothing_else(isa: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    output = tmp_path / "isa.o"
    source = CSRC / "isa" / f"{isa}.cpp"
    command = [compiler, "-std=c++17", "-O0", "-w", *FLAGS[isa], f"-I{CSRC}", "-c", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    listing = subprocess.run(["nm", "-C", "--defined-only", str(output)], check=True, capture_output=True, text=True)
    visible = [line.split(maxsplit=2)[2] for line in listing.stdout.splitlines() if line.split()[1] not in "bdrt"]
    assert visible == [f"headrace::kernel_table_{isa}()"]
