"""The thread pool under the thread sanitizer: every chunk once, phases in order, workers late and too many."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    assert compiler is not None
    binary = tmp_path_factory.mktemp("pool") / "pool_stress"
    sources = [str(Path(__file__).with_name("pool_stress.cpp")), str(ROOT / "csrc" / "pool.cpp")]
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(binary)], check=True)
    return binary


@pytest.mark.parametrize(
    ("threads", "spin"),
    [
        pytest.param(1, True, id="one"),
        pytest.param(2, True, id="two that spin"),
        pytest.param(2, False, id="two that sleep"),
        pytest.param(7, False, id="more than processors"),
    ],
)
def test_random_programs(stress: Path, threads: int, spin: bool) -> None:
    result = subprocess.run(
        [str(stress), str(threads), "300", str(int(spin))], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout == "ok\n", result.stderr
    assert result.returncode == 0
