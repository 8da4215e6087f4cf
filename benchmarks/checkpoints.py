"""Makes the files that the servers of the comparison read: one set of weights per model, in what each server wants.

    .venv/bin/python benchmarks/checkpoints.py [--models smollm2-135m,random-1b] [--folder .peers/checkpoints]

Needs benchmarks/build_llama_cpp.sh and benchmarks/install_peers.sh to have run, and about 11 GB of disk for all of it.
What exists is left alone; a file appears under its name only when it is whole. Every random number is seeded.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comparison.folder import write_folder
from comparison.random_llama import write_random_llama

from headrace.model.fetch import resolve_model

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".peers"
MODELS = ("smollm2-135m", "random-1b", "gemma3-270m")
OPENVINO_WEIGHTS = {
    "openvino-int8": ("--weight-format", "int8"),
    "openvino-int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
}


@dataclass(frozen=True)
class Product:
    """A file or folder, roughly how many bytes it takes, and what writes it to a path."""

    name: str
    size: int
    make: Callable[[Path], None]


def products(model: str, folder: Path) -> Iterator[Product]:
    """In an order in which each finds what it is made from."""
    if model == "gemma3-270m":
        yield Product("Q4_K_M.gguf", 0, lambda path: path.symlink_to(resolve_model(model)))
        return
    if model == "smollm2-135m":
        first, scale = folder / "Q4_1.gguf", 1
        yield Product(first.name, 0, lambda path: path.symlink_to(resolve_model(model)))
    else:
        first, scale = folder / "BF16.gguf", 9
        yield Product(first.name, 270_000_000 * scale, partial(write_random_llama, vocabulary=resolve_model(MODELS[0])))
    for kind, size in (("Q4_0", 95_000_000), ("Q8_0", 150_000_000)):
        yield Product(f"{kind}.gguf", size * scale, partial(_requantize, first, kind))
    yield Product("bf16", 270_000_000 * scale, partial(write_folder, first))
    for name, options in OPENVINO_WEIGHTS.items():
        yield Product(name, 150_000_000 * scale, partial(_export, folder / "bf16", options))


def _requantize(source: Path, kind: str, path: Path) -> None:
    tool = PEERS / "llama.cpp" / "build" / "bin" / "llama-quantize"
    _call([str(tool), "--allow-requantize", str(source), str(path), kind])


def _export(source: Path, options: tuple[str, ...], path: Path) -> None:
    tool = PEERS / "openvino" / "bin" / "optimum-cli"
    command = [str(tool), "export", "openvino", "-m", str(source), "--task", "text-generation-with-past"]
    _call([*command, *options, str(path)])


def _call(command: list[str]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # nothing is to be looked up: every file is here
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {found.returncode}:\n{found.stdout[-3000:]}")


def make(product: Product, folder: Path) -> None:
    path = folder / product.name
    if path.exists():
        print(f"  {product.name} exists", flush=True)
        return
    free = shutil.disk_usage(folder).free
    if free < product.size + (1 << 30):
        raise SystemExit(f"{path} needs {product.size / 1e9:.1f} GB and {free / 1e9:.1f} GB of disk are free")
    started = time.monotonic()
    unfinished = folder / f"unfinished-{product.name}"
    if unfinished.is_dir() and not unfinished.is_symlink():
        shutil.rmtree(unfinished)
    else:
        unfinished.unlink(missing_ok=True)
    product.make(unfinished)
    unfinished.rename(path)
    print(f"  {product.name} made in {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="which of %(default)s")
    parser.add_argument("--folder", type=Path, default=PEERS / "checkpoints", help="where they go")
    parser.add_argument("--without", default="", help="products to leave out, such as openvino-int8,openvino-int4")
    arguments = parser.parse_args()
    for model in arguments.models.split(","):
        if model not in MODELS:
            sys.exit(f"unknown model {model!r}; known: {', '.join(MODELS)}")
        print(model, flush=True)
        folder = (arguments.folder / model).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for product in products(model, folder):
            if product.name not in arguments.without.split(","):
                make(product, folder)


if __name__ == "__main__":
    main()
