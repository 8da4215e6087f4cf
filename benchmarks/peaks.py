"""What one core can do at most: peaks.cpp, compiled and called. Shared by kernels.py and attention.py."""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def fastest(call: Callable[[], object], samples: int) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(samples):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


class PeakLibrary:
    """The functions of peaks.cpp. Needs a C++ compiler."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "peaks.so"
            source = Path(__file__).with_name("peaks.cpp")
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
            self._code = ctypes.CDLL(str(library))
        self._code.read_memory.restype = ctypes.c_int64
        self.has_vnni = bool(self._code.has_vnni())

    def gops(self, name: str) -> float:
        """10^9 operations a second of `run_<name>`; a multiply-add is two."""
        run = self._code[f"run_{name}"]
        run.restype = ctypes.c_int64
        rounds = ctypes.c_int64(50_000)
        return float(run(rounds) / fastest(lambda: run(rounds), 100) * 1e-9)

    def read_memory(self, address: int, size: int) -> None:
        self._code.read_memory(ctypes.c_void_p(address), ctypes.c_int64(size))
