"""Headrace beside llama.cpp's llama-server: the same GGUF file, the same threads, everyone through HTTP, one run.

    .venv/bin/python benchmarks/side_by_side.py --llama-server .peers/llama.cpp/build/bin/llama-server

Each repeat starts every server afresh, one at a time and in turn, so that the machine's moods fall on all of them; the
table shows medians, the spread, and ratios of medians. llama-server is measured at each of several settings and its
best is what counts. The load generator's share of a core is printed with every result.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.client import LoadError, Target, fetch
from headrace.bench.load import Arrival, Workload, run, served_model
from headrace.bench.report import summarize
from headrace.model.fetch import resolve_model


@dataclass(frozen=True)
class Work:
    """One kind of load, the number that is compared, and whether more of it is better."""

    name: str
    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int
    range_ratio: float
    metric: str
    higher_is_better: bool


WORKS = (
    Work("single-stream decode, tok/s", 4, 32, 128, 1, 0.0, "decode", True),
    Work("TTFT of a 2,048-token prompt, s", 1, 2048, 4, 1, 0.0, "ttft", False),
    Work("16 streams, 128 in / 128 out, output tok/s", 32, 128, 128, 16, 0.25, "throughput", True),
)


@dataclass(frozen=True)
class Server:
    """A way to start a server: its name in the table and its command, with {port} to fill in."""

    name: str
    command: tuple[str, ...]
    works: tuple[int, ...]  # indices of WORKS that it is measured on


def servers(arguments: argparse.Namespace, model: Path) -> list[Server]:
    threads = str(arguments.threads)
    own = (sys.executable, "-m", "headrace", "serve", str(model), "--port", "{port}", "--threads", threads)
    found = [Server("headrace", (*own, "--no-self-test", "--max-num-seqs", "32"), (0, 1, 2))]
    if arguments.llama_server:
        base = (arguments.llama_server, "-m", str(model), "--port", "{port}", "-t", threads, "-tb", threads)
        found += [
            Server("llama-server -np 1", (*base, "-c", "8192", "-np", "1"), (0, 1)),
            Server("llama-server -np 1 -ub 2048", (*base, "-c", "8192", "-np", "1", "-b", "2048", "-ub", "2048"), (1,)),
            Server("llama-server -np 16", (*base, "-c", "8192", "-np", "16"), (2,)),
            Server("llama-server -np 16 -fa on", (*base, "-c", "8192", "-np", "16", "-fa", "on"), (2,)),
        ]
    return found


@contextmanager
def started(server: Server) -> Iterator[Target]:
    """The server, ready, on a free port; stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part.format(port=port) for part in server.command]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    target = Target("127.0.0.1", port, "", False)
    try:
        _wait_until_ready(process, target)
        yield target
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], target: Target) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        try:
            if asyncio.run(fetch(target, "GET", "/health"))[0] == 200:
                return
        except LoadError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{process.args} was not ready within 120 s")


def measure(target: Target, work: Work, repeat: int) -> dict[str, Any]:
    model = asyncio.run(served_model(target))

    def workload(num_prompts: int, seed: int) -> Workload:
        return Workload(num_prompts, work.input_len, work.output_len, work.range_ratio, 0, seed, False, True, model)

    arrival = Arrival(float("inf"), work.concurrency)
    asyncio.run(run(target, workload(1, 10_000 + repeat), arrival, lambda done, total: None))
    result = summarize(
        asyncio.run(run(target, workload(work.num_prompts, repeat), arrival, lambda done, total: None)), [50, 99], {}
    )
    if result["failed"]:
        raise SystemExit(f"{work.name}: {result['errors']}")
    value = {
        "decode": 1 / result["tpot"]["p50"] if result["tpot"] else float("nan"),
        "ttft": result["ttft"]["p50"],
        "throughput": result["output_tokens_per_s"],
    }[work.metric]
    return {"value": value, "generator_cpu_share": result["generator_cpu_share"], "result": result}


def collect(found: Sequence[Server], repeats: int) -> dict[tuple[str, int], list[dict[str, Any]]]:
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for repeat in range(repeats):
        for server in found:
            with started(server) as target:
                for index in server.works:
                    outcome = measure(target, WORKS[index], repeat)
                    measured.setdefault((server.name, index), []).append(outcome)
                    share = 100 * outcome["generator_cpu_share"]
                    print(
                        f"repeat {repeat + 1}  {WORKS[index].name:<44} {server.name:<30} "
                        f"{outcome['value']:8.2f}   generator {share:.1f} % of a core",
                        flush=True,
                    )
    return measured


def table(measured: dict[tuple[str, int], list[dict[str, Any]]]) -> str:
    lines = ["| work | headrace | best llama-server (setting) | ratio |", "|---|---|---|---|"]
    for index, work in enumerate(WORKS):
        medians = {
            name: statistics.median(item["value"] for item in items)
            for (name, at), items in measured.items()
            if at == index
        }
        own = medians.pop("headrace", float("nan"))
        spread = [item["value"] for item in measured.get(("headrace", index), [])]
        shown = f"{own:.2f} ({min(spread):.2f} to {max(spread):.2f})" if spread else "-"
        if not medians:
            lines.append(f"| {work.name} | {shown} | - | - |")
            continue
        best = (max if work.higher_is_better else min)(medians, key=lambda name: medians[name])
        peer = [item["value"] for item in measured[(best, index)]]
        ratio = own / medians[best] if work.higher_is_better else medians[best] / own
        lines.append(
            f"| {work.name} | {shown} | {medians[best]:.2f} ({min(peer):.2f} to {max(peer):.2f}) "
            f"`{best.removeprefix('llama-server ')}` | {ratio:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="catalog name or GGUF file")
    parser.add_argument("--llama-server", default="", help="path of the peer; built by benchmarks/build_llama_cpp.sh")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default="", help="JSON file for everything measured")
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    measured = collect(servers(arguments, model), arguments.repeats)
    print()
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, {arguments.repeats} repeats")
    print(table(measured))
    if arguments.output:
        rows = [
            {"server": name, "work": asdict(WORKS[index]), "runs": items} for (name, index), items in measured.items()
        ]
        Path(arguments.output).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
