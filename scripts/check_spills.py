"""Fail when a GEMM core stores vector registers to the stack inside a loop.

gcc 12 spills the accumulators of some unrolled kernels, at up to half their speed, and any edit may bring that back
unnoticed, because the results stay right. This reads the disassembly of the compiled instruction-set objects, finds the
loops of every core (backward jumps) and counts vector stores relative to the stack pointer in them. It needs objdump
and the object files of a build; it knows nothing of how they are built.

    python scripts/check_spills.py BUILD_DIRECTORY_OR_OBJECT...
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^([0-9a-f]+) <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_CORE = re.compile(r"\b(core|float_core|bf16_core)<")
_ALLOWED = 1  # a core that needs all sixteen registers may set one sum aside per group of inputs: below one per cent
_VECTOR_STORE = re.compile(r"^%[xyz]mm\d+,\s*-?(0x[0-9a-f]+)?\(%(rsp|rbp)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of disassembly: address, mnemonic, operands in AT&T order."""

    address: int
    mnemonic: str
    operands: str

    def is_vector_spill(self) -> bool:
        return self.mnemonic.startswith("vmov") and _VECTOR_STORE.match(self.operands) is not None

    def jump_target(self) -> int | None:
        if not self.mnemonic.startswith("j"):
            return None
        return int(self.operands.split()[0], 16)


def parse(disassembly: str) -> dict[str, list[Instruction]]:
    """Functions of `objdump -d -C --no-show-raw-insn`, by demangled name."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in disassembly.splitlines():
        if header := _FUNCTION.match(line):
            current = functions.setdefault(header[2], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(Instruction(int(instruction[1], 16), instruction[2], instruction[3]))
    return functions


def spills_in_loops(function: list[Instruction]) -> int:
    """Vector stores to the stack between the target of a backward jump and the jump."""
    loops = [
        (target, each.address)
        for each in function
        if (target := each.jump_target()) is not None and function[0].address <= target <= each.address
    ]
    return sum(
        each.is_vector_spill() and any(begin <= each.address <= end for begin, end in loops) for each in function
    )


def object_files(paths: list[Path]) -> list[Path]:
    """The given objects, and those of the vector instruction sets in the given directories (not the emulated ones)."""
    found = [path for path in paths if path.is_file()]
    for path in paths:
        for isa in ("avx2", "avx512"):
            found += sorted(path.glob(f"**/isa_{isa}.dir/**/*.o"))
    return found


def main(arguments: list[str]) -> int:
    objects = object_files([Path(argument) for argument in arguments])
    if not objects:
        print("check_spills: no object files; give the build directory", file=sys.stderr)
        return 2
    cores = 0
    bad = 0
    for path in objects:
        command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
        functions = parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for name, instructions in functions.items():
            if not _CORE.search(name):
                continue
            cores += 1
            if (spills := spills_in_loops(instructions)) > _ALLOWED:
                bad += 1
                print(f"{path.name}: {spills} vector stores to the stack in the loops of {name}")
    print(f"check_spills: {cores} GEMM cores in {len(objects)} objects, {bad} with spills")
    return 1 if bad or not cores else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
