"""From exec to the first token over HTTP, and the memory of all processes then. Optionally beside llama-server.

    .venv/bin/python benchmarks/cold_start.py [MODEL] [--llama-server .peers/llama.cpp/build/bin/llama-server]

Servers start in turn, so that the machine's moods fall on all of them. Each is asked for one token again and again from
its first millisecond on; what counts is when the first answer is complete. The model file is in the page cache. "no
packed weights": an empty pack cache; "packed weights kept": as the start before left it.
"""

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.model.checkpoint import open_checkpoint
from headrace.model.decoder import build_graph
from headrace.model.fetch import resolve_model
from headrace.model.planner import kv_bytes, measure_graph

_PROMPT = "Hello"
_POLL_S = 0.01  # each look costs the server a little
_DEADLINE_S = 120
_BLOCK_SIZE = 32
_FIXED_BYTES = 200 << 20


@dataclass(frozen=True)
class Start:
    seconds: float
    pss: dict[str, int]  # bytes by process


def first_token(command: list[str], packed: Path | None = None) -> Start:
    """Starts a server, waits for one token from it, looks at its memory, ends it.

    With `packed`, not before there is a file of packed weights in that folder, which the next start can read.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--port", str(port)], **silent)
    try:
        while not _answers(port):
            if process.poll() is not None or time.perf_counter() - began > _DEADLINE_S:
                raise SystemExit(f"{command} gave no token (status {process.returncode})")
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - began
        pss = dict(_pss(pid) for pid in _tree(process.pid))
        while packed is not None and not list(packed.glob("*.pack")):
            time.sleep(_POLL_S)
        return Start(seconds, pss)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _answers(port: int) -> bool:
    body = json.dumps({"prompt": _PROMPT, "max_tokens": 1, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _tree(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(found for child in children for found in _tree(child))]


def _pss(pid: int) -> tuple[str, int]:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    name = next((word for word in arguments if "headrace." in word or word.endswith("worker.py")), arguments[0])
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return f"{Path(name).name} ({pid})", int(line.split()[1]) << 10
    return name, 0


def bound(model: Path) -> int:
    """1.2 x (weights as stored + KV of the one block in use + 200 MiB)."""
    checkpoint = open_checkpoint(model)
    graph = build_graph(checkpoint.config, checkpoint)
    weights = measure_graph(graph).weight_bytes
    return int(1.2 * (weights + kv_bytes(graph.kv_groups, _BLOCK_SIZE, _BLOCK_SIZE) + _FIXED_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--llama-server")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = resolve_model(given.model)
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "headrace", "serve", str(model), "--threads", str(given.threads)]
        own += ["--pack-cache", folder, "--no-self-test"]
        commands = {"no packed weights": own, "packed weights kept": own}
        if given.llama_server:
            threads = str(given.threads)
            commands["llama-server"] = [given.llama_server, "-m", str(model), "-t", threads, "-c", "8192", "-np", "1"]
        starts: dict[str, list[Start]] = {name: [] for name in commands}
        for _ in range(given.repeats):
            for packed in Path(folder).glob("*.pack"):
                packed.unlink()
            for name, command in commands.items():
                starts[name].append(first_token(command, Path(folder) if command is own else None))
    report(starts, bound(model))


def report(starts: dict[str, list[Start]], most: int) -> None:
    print(f"{'':20}  first token, s: median (least to most)   PSS of all processes, MiB (bound {most / 2**20:.0f})")
    for name, found in starts.items():
        seconds = sorted(start.seconds for start in found)
        pss = statistics.median(sum(start.pss.values()) for start in found) / 2**20
        spread = f"({seconds[0]:.2f} to {seconds[-1]:.2f})"
        print(f"{name:20}  {statistics.median(seconds):14.3f} {spread:24}  {pss:8.0f}")
    last = starts["packed weights kept"][-1]
    print("\n" + "\n".join(f"  {name:40} {size / 2**20:6.0f} MiB" for name, size in last.pss.items()))
    if "llama-server" in starts:
        ratios = [
            ours.seconds / theirs.seconds
            for ours, theirs in zip(starts["packed weights kept"], starts["llama-server"], strict=True)
        ]
        print(f"\nours over llama-server, pairs: median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
