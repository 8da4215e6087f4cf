"""`headrace bench`: load on any OpenAI-compatible URL, open loop or closed loop; `bench kernels` is another command."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.config import option
from headrace.base.errors import HeadraceError
from headrace.cli.options import Command, read
from headrace.cli.progress import ProgressLine

if TYPE_CHECKING:
    from headrace.bench.load import Run


@dataclass(frozen=True)
class BenchOptions:
    base_url: str = option("http://127.0.0.1:8000", "Server to load; a trailing /v1 is accepted.")
    model: str = option("", "Model name to send; the server's first when empty.")
    num_prompts: int = option(64, "Requests in all.", count=True, minimum=1)
    request_rate: float = option(0.0, "Open loop: requests per second, Poisson; 0: all at once.", minimum=0)
    max_concurrency: int = option(0, "Closed loop: requests in flight; 0: unbounded.", minimum=0)
    random_input_len: int = option(128, "Prompt length in words, about a token each.", count=True, minimum=1)
    random_output_len: int = option(128, "Output tokens.", count=True, minimum=1)
    random_range_ratio: float = option(
        0.0, "Spread of both lengths: 0.5 draws from 0.5 to 1.5 times.", minimum=0, maximum=1
    )
    random_prefix_len: int = option(0, "Words at the start that all prompts share.", count=True, minimum=0)
    chat: bool = option(False, "Use /v1/chat/completions instead of /v1/completions.")
    ignore_eos: bool = option(True, "Ask for exactly the output length (servers that know ignore_eos).")
    seed: int = option(0, "Seed of prompts and arrivals.", minimum=0)
    warmup: int = option(1, "Requests sent before the measured ones.", minimum=0)
    goodput: str = option("", "Targets in milliseconds, such as 'ttft:500 tpot:50', that a good request meets.")
    metric_percentiles: str = option("50,90,95,99", "Percentiles to report.")
    output: str = option("", "Write options and result to this JSON file; - writes JSON to standard output.")


COMMAND = Command(
    "bench",
    "Put load on any OpenAI-compatible server and measure TTFT, inter-token latency, throughput and goodput.",
    BenchOptions,
    config_fields=("api_key",),
)


def main(arguments: Sequence[str]) -> int:
    if list(arguments[:1]) == ["kernels"]:
        from headrace.cli import bench_kernels

        return bench_kernels.main(arguments[1:])
    given = read(COMMAND, arguments)
    from headrace.bench.client import LoadError
    from headrace.bench.report import parse_goodput, parse_percentiles, summarize, table

    own = given.own
    percentiles, goodput = parse_percentiles(own.metric_percentiles), parse_goodput(own.goodput)
    try:
        measured = asyncio.run(_measure(own, given.config.api_key))
    except LoadError as error:
        raise HeadraceError(str(error)) from error
    result = summarize(measured, percentiles, goodput)
    document = {"options": asdict(own), "result": result}
    if own.output == "-":
        print(json.dumps(document, indent=1))
    else:
        print(table(result))
        if own.output:
            _write(Path(own.output), document)
    return 0 if result["failed"] == 0 else 1


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise HeadraceError(f"--output {path}: {error.strerror or error}; the result is above") from error


async def _measure(own: BenchOptions, api_key: str) -> "Run":
    from headrace.bench.client import Target
    from headrace.bench.load import Arrival, Workload, run, served_model

    target = Target.parse(own.base_url, api_key)
    model = own.model or await served_model(target)
    shape: dict[str, Any] = {
        "input_len": own.random_input_len,
        "output_len": own.random_output_len,
        "range_ratio": own.random_range_ratio,
        "prefix_len": own.random_prefix_len,
        "chat": own.chat,
        "ignore_eos": own.ignore_eos,
        "model": model,
    }
    arrival = Arrival(own.request_rate or float("inf"), own.max_concurrency)
    if own.warmup:
        # Another seed, so that what is measured finds no prompt of the warm-up in a prefix cache.
        await run(target, Workload(num_prompts=own.warmup, seed=own.seed + 1_000_003, **shape), arrival, _silent)
    with ProgressLine() as line:

        def report(done: int, total: int) -> None:
            if sys.stderr.isatty():
                line.report("requests", done, total)

        return await run(target, Workload(num_prompts=own.num_prompts, seed=own.seed, **shape), arrival, report)


def _silent(done: int, total: int) -> None:
    pass
