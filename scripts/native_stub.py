"""Write headrace/_C.pyi, the types of the native module, from the built module itself.

    python scripts/native_stub.py [--check]

nanobind's generator does the work; array annotations are cut down to their dtype, which is what a type checker reads.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "headrace" / "_C.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "_C.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "headrace._C", "-o", str(raw)]
        subprocess.run(command, check=True)
        text = re.sub(r"Annotated\[(NDArray\[numpy\.\w+\]), dict\([^()]*\)\]", r"\1", raw.read_text())
        text = text.replace("from typing import Annotated\n", "from typing import Any\n")
        text = text.replace(") -> tuple:", ") -> tuple[Any, ...]:")  # what strict type checking asks for
        raw.write_text("# ruff: noqa: N999\n" + text)
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "--line-length", "120", str(raw)], check=True)
        subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--fix", "--select", "I", str(raw)], check=True)
        return raw.read_text()


def main() -> int:
    text = generate()
    if "--check" in sys.argv[1:]:
        if STUB.read_text() != text:
            print(f"{STUB} is not what the built module says: run scripts/native_stub.py", file=sys.stderr)
            return 1
        return 0
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
