"""Tables from results: what everyone did, and how far Headrace is from the best of the others."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison.contestants import contestants
from comparison.floors import counted, floors
from comparison.results import Result, ResultFile
from comparison.server import Contestant
from comparison.works import MEASURES, PERPLEXITY, Measure

_UNITS = {"memory_gb_s": "{:.1f} GB/s of memory", "int8_gop_s": "{:.0f} Gop/s of int8"}
_UNITS |= {"bf16_gflop_s": "{:.0f} GFLOP/s of bf16", "fp32_gflop_s": "{:.0f} GFLOP/s of fp32"}
_SLACK = 1.01  # a peer's file is of equal quality when its perplexity is at most this much of Headrace's


def report(results: ResultFile, models: list[str], checkpoints: Path) -> str:
    """Markdown. Only models with results appear."""
    parts = list(_machine(results.machines))
    for model in models:
        table = ModelTable(results, model, list(contestants(model, checkpoints / model, 1)))
        if table.entrants:
            parts += ["", f"## {model}", "", *table.results(), "", *table.ratios(), "", *table.notes()]
    return "\n".join(parts)


def _machine(machines: list[dict[str, Any]]) -> Iterator[str]:
    """The last run's machine, and the versions of all runs."""
    if not machines:
        return
    last = machines[-1]
    versions: dict[str, str] = {}
    for one in machines:
        versions |= one["versions"]
    size = f"{last['cores']} cores, {last['memory_gib']:.0f} GiB; {last['threads']} threads"
    yield f"- Machine: {last['processor']}, {size}."
    shown = ", ".join(_UNITS[name].format(value) for name, value in _limits(machines).items())
    yield f"- Its limits, measured by the same command with all threads: {shown}."
    yield f"- Versions: {'; '.join(f'{name}: {text}' for name, text in versions.items())}."
    yield f"- Last run: {last['date']}, load before it {last['load_before']:.1f}."


def _limits(machines: list[dict[str, Any]]) -> dict[str, float]:
    """The best of all runs: what takes from a limit is other work."""
    found: dict[str, float] = {}
    for one in machines:
        for name, value in one["limits"].items():
            found[name] = max(value, found.get(name, 0.0))
    return found


class ModelTable:
    """The tables of one model. `entrants` are those with any result, in the order of a repeat."""

    def __init__(self, results: ResultFile, model: str, known: list[Contestant]) -> None:
        self._results = results
        self._model = model
        present = {result.contestant for result in results.all() if result.model == model and not result.error}
        self.entrants = [one for one in known if one.name in present]

    def _best(self, one: Contestant, work: str) -> list[Result]:
        """The results at the best setting; empty when there are none."""
        setting = self._results.best_setting(self._model, one.name, work)
        return self._results.good(self._model, one.name, work)[setting] if setting is not None else []

    def _median(self, one: Contestant, measure: Measure) -> float | None:
        found = self._best(one, measure.work)
        return statistics.median(result.values[measure.key] for result in found) if found else None

    def results(self) -> Iterator[str]:
        measures = [m for m in (PERPLEXITY, *MEASURES) if any(self._best(one, m.work) for one in self.entrants)]
        yield "| server, file | " + " | ".join(measure.title for measure in measures) + " |"
        yield "|---|" + "---|" * len(measures)
        for one in self.entrants:
            cells = [_cell([r.values[m.key] for r in self._best(one, m.work)]) for m in measures]
            yield f"| {one.name} | " + " | ".join(cells) + " |"

    def ratios(self) -> Iterator[str]:
        """Above 1 Headrace is ahead, whichever way the number counts."""
        yield "| work | Headrace | of the limit | best peer of this quality | ratio | best peer of all | ratio |"
        yield "|---|---|---|---|---|---|---|"
        limits = self._floors()
        own = [one for one in self.entrants if one.server == "headrace"]
        peers = [one for one in self.entrants if one.server != "headrace"]
        for measure in MEASURES:
            for one in own:
                median = self._median(one, measure)
                if median is None:
                    continue
                equal = [peer for peer in peers if self._equal(one, peer)]
                limit = limits.get(one.file, {}).get((measure.work, measure.key))
                near = "-" if limit is None else f"{_ratio(median, limit, measure):.0%} of {_number(limit)}"
                cells = [near, *self._against(median, measure, equal), *self._against(median, measure, peers)]
                yield f"| {measure.title} | {one.file}: {_number(median)} | " + " | ".join(cells) + " |"

    def _equal(self, own: Contestant, peer: Contestant) -> bool:
        """By perplexity; where it was not measured, by the bits of a weight."""
        here, there = self._median(own, PERPLEXITY), self._median(peer, PERPLEXITY)
        if here is not None and there is not None:
            return there <= _SLACK * here
        return peer.bits >= own.bits

    def _against(self, own: float, measure: Measure, peers: list[Contestant]) -> tuple[str, str]:
        found = [(value, peer) for peer in peers if (value := self._median(peer, measure)) is not None]
        if not found:
            return "-", "-"
        value, best = (max if measure.higher_is_better else min)(found, key=lambda pair: pair[0])
        setting = self._results.best_setting(self._model, best.name, measure.work)
        return f"{best.name}: {_number(value)} (`{setting}`)", f"{_ratio(own, value, measure):.2f}x"

    def notes(self) -> Iterator[str]:
        results = [result for result in self._results.all() if result.model == self._model]
        good = [result for result in results if not result.error]
        share = max((result.generator_cpu_share for result in good), default=0.0)
        counts = sorted({len(self._best(one, m.work)) for one in self.entrants for m in MEASURES} - {0})
        repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
        yield f"Medians of {repeats} repeats (least to most)."
        yield f"The load generator took at most {100 * share:.0f} % of a core."
        yield "The limit counts bytes and operations one after another, at the bandwidth and peaks above."
        failed = sorted({f"{r.contestant} `{r.setting}` {r.work}: {r.error[:120]}" for r in results if r.error})
        yield from (f"Failed: {line}" for line in failed)

    def _floors(self) -> dict[str, dict[tuple[str, str], float]]:
        """By Headrace's files, of those that are here."""
        limits = _limits(self._results.machines)
        files = [one for one in self.entrants if one.server == "headrace" and one.path.exists()]
        return {one.file: floors(counted(one.path), limits) for one in files} if limits else {}


def _ratio(own: float, other: float, measure: Measure) -> float:
    """Above 1: `own` is better."""
    return own / other if measure.higher_is_better else other / own


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    middle = _number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"
