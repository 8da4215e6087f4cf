"""From outcomes to numbers: percentiles, throughput, goodput; as a table and as JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError
from headrace.bench.load import Outcome, Run

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between chunks",
    "e2el": "whole request",
}


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:500 tpot:50` (milliseconds) as {metric: seconds}. Raises ConfigError."""
    targets: dict[str, float] = {}
    for item in text.split():
        name, _, value = item.partition(":")
        try:
            seconds = float(value) / 1e3
        except ValueError:
            seconds = math.nan
        if name not in ("ttft", "tpot", "e2el") or not seconds > 0:
            raise ConfigError(f"--goodput: {item!r} is not like ttft:500, tpot:50 or e2el:3000 (milliseconds)")
        targets[name] = seconds
    return targets


def parse_percentiles(text: str) -> list[float]:
    """`50,90,99` as numbers. Raises ConfigError."""
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles: {text!r} is not like 50,90,99")
    return values


def summarize(run: Run, percentiles: Sequence[float], goodput: Mapping[str, float]) -> dict[str, Any]:
    """Everything measured, in seconds and tokens per second."""
    good = [outcome for outcome in run.outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in good)
    prompt = sum(outcome.prompt_tokens for outcome in good)
    gaps = [b - a for outcome in good for a, b in zip(outcome.chunk_times, outcome.chunk_times[1:], strict=False)]
    series = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if not math.isnan(outcome.tpot)],
        "itl": gaps,
        "e2el": [outcome.latency for outcome in good],
    }
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "seconds": run.seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output,
        "requests_per_s": len(good) / run.seconds,
        "output_tokens_per_s": output / run.seconds,
        "total_tokens_per_s": (prompt + output) / run.seconds,
        "generator_cpu_share": run.cpu_seconds / run.seconds,
        "late_start_max": max((outcome.started - outcome.planned for outcome in run.outcomes), default=0.0),
        "errors": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error).most_common(5)),
    }
    for name, values in series.items():
        result[name] = _statistics(values, percentiles)
    if goodput:
        within = [outcome for outcome in good if _meets(outcome, goodput)]
        result["goodput_requests_per_s"] = len(within) / run.seconds
        result["goodput_share"] = len(within) / max(1, len(run.outcomes))
    return result


def _statistics(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    numbers = np.asarray(values)
    named = {f"p{value:g}": float(np.percentile(numbers, value)) for value in percentiles}
    return {"mean": float(numbers.mean()), **named, "max": float(numbers.max())}


def _meets(outcome: Outcome, targets: Mapping[str, float]) -> bool:
    seen = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(math.isnan(seen[name]) or seen[name] <= limit for name, limit in targets.items())


def table(result: Mapping[str, Any]) -> str:
    """The result for a person to read; times in milliseconds."""
    lines = [
        f"requests      {result['completed']} completed, {result['failed']} failed in {result['seconds']:.2f} s",
        f"tokens        {result['prompt_tokens']} prompt ({result['cached_tokens']} cached), "
        f"{result['output_tokens']} output",
        f"throughput    {result['output_tokens_per_s']:.1f} output tok/s, "
        f"{result['total_tokens_per_s']:.1f} total tok/s, {result['requests_per_s']:.2f} requests/s",
    ]
    if "goodput_share" in result:
        lines.append(
            f"goodput       {result['goodput_requests_per_s']:.2f} requests/s ({100 * result['goodput_share']:.1f} %)"
        )
    lines.append(f"generator     {100 * result['generator_cpu_share']:.1f} % of one core")
    columns = next((list(result[name]) for name in METRICS if result[name]), [])
    if columns:
        lines.append("")
        lines.append(f"{'milliseconds':<24}" + "".join(f"{column:>10}" for column in columns))
        for name, label in METRICS.items():
            if result[name]:
                lines.append(f"{label:<24}" + "".join(f"{1e3 * result[name][column]:>10.1f}" for column in columns))
    for error, count in result["errors"].items():
        lines.append(f"\nerror x {count}: {error}")
    return "\n".join(lines)
