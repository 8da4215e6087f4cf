"""Who takes part with which files, and the settings that each is tried at.

Headrace runs at its defaults. A peer runs at each setting listed here in the first repeats, and then, for every work,
at the one that did best.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from comparison.server import Contestant, Setting

HERE = Path(__file__).resolve().parents[1]
PEERS = HERE.parent / ".peers"
LLAMA_CPP = PEERS / "llama.cpp" / "build" / "bin"

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K_M": 5, "Q8_0": 8, "BF16": 16, "int4": 4, "int8": 8, "bf16": 16}
_GGUF = {
    "smollm2-135m": ("Q4_1", "Q4_0", "Q8_0"),
    "random-1b": ("Q4_0", "Q8_0", "BF16"),
    "gemma3-270m": ("Q4_K_M",),
}

_ALL = ("cold", "memory", "single", "ttft", "streams16", "streams32", "mixed", "prefix")

_HEADRACE = (Setting("defaults", (), (*_ALL, "perplexity")),)

# Without -kvu every slot has a cache of its own, -c divided by -np, and attends to nobody else's.
_LLAMA_CPP = (
    Setting("-np 1", ("-np", "1", "-c", "4096"), ("cold", "memory", "single", "ttft", "prefix")),
    Setting("-np 1 -fa off", ("-np", "1", "-c", "4096", "-fa", "off"), ("single", "ttft")),
    Setting("-np 1 -ub 2048", ("-np", "1", "-c", "4096", "-ub", "2048"), ("ttft",)),
    Setting("-np 16", ("-np", "16", "-c", "8192"), ("streams16",)),
    Setting("-np 16 -fa off", ("-np", "16", "-c", "8192", "-fa", "off"), ("streams16",)),
    Setting("-np 32", ("-np", "32", "-c", "16384"), ("streams32",)),
    Setting("-np 32 -kvu", ("-np", "32", "-kvu", "-c", "16384"), ("streams16", "streams32", "mixed", "prefix")),
    Setting("-np 12", ("-np", "12", "-c", "28672"), ("mixed",)),
    Setting("-np 12 -b 256", ("-np", "12", "-c", "28672", "-b", "256", "-ub", "256"), ("mixed",)),
)

_OPENVINO = (
    Setting("256 tokens a step", ("--max-num-batched-tokens", "256"), (*_ALL, "perplexity")),
    Setting("512 tokens a step", ("--max-num-batched-tokens", "512"), ("ttft", "streams16", "streams32", "mixed")),
    Setting("2048 tokens a step", ("--max-num-batched-tokens", "2048"), ("ttft", "streams16", "streams32")),
)

_VLLM = (
    Setting("compiled", (), (*_ALL, "perplexity")),
    Setting("eager", ("--enforce-eager",), ("cold", "memory", "single", "ttft", "streams16")),
    Setting("eager, 256 tokens a step", ("--enforce-eager", "--max-num-batched-tokens", "256"), ("mixed", "streams32")),
)


def contestants(model: str, folder: Path, threads: int) -> Iterator[Contestant]:
    """In the order in which a repeat goes through them. `folder` is where checkpoints.py put the model's files."""
    for number, kind in enumerate(_GGUF[model]):
        path = folder / f"{kind}.gguf"
        yield Contestant("headrace", kind, path, _BITS[kind], _headrace(path, threads), _HEADRACE)
        yield Contestant("llama.cpp", kind, path, _BITS[kind], _llama_cpp(path, threads), _LLAMA_CPP)
        if number == 0 and model != "gemma3-270m":
            yield from _others(folder, threads)


def _headrace(path: Path, threads: int) -> tuple[str, ...]:
    options = ("--port", "{port}", "--threads", str(threads), "--no-self-test")
    return (sys.executable, "-m", "headrace", "serve", str(path), *options)


def _llama_cpp(path: Path, threads: int) -> tuple[str, ...]:
    options = ("--port", "{port}", "-t", str(threads), "-tb", str(threads), "--no-ui", "--offline")
    return (str(LLAMA_CPP / "llama-server"), "-m", str(path), *options)


def _others(folder: Path, threads: int) -> Iterator[Contestant]:
    for kind in ("int8", "int4"):
        path = folder / f"openvino-{kind}"
        python, program = PEERS / "openvino" / "bin" / "python", HERE / "peers" / "openvino_server.py"
        command = (str(python), str(program), str(path), "--port", "{port}", "--threads", str(threads))
        yield Contestant("openvino", kind, path, _BITS[kind], command, _OPENVINO)
    path = folder / "bf16"
    options = ("--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "32")
    # The module, because the `vllm` command looks for a package of another name than the CPU build has.
    program = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(path))
    command = (str(PEERS / "vllm" / "bin" / "python"), *program, *options)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    yield Contestant("vllm", "bf16", path, _BITS["bf16"], command, _VLLM, environment)
