"""Headrace beside other servers: the same weights and threads, everyone through HTTP, interleaved.

    .venv/bin/python benchmarks/side_by_side.py run --results FILE [--models M,..] [--servers S,..] [--works W,..]
    .venv/bin/python benchmarks/side_by_side.py report --results FILE

`run` appends every result to FILE at once; the same command goes on where an earlier one was ended. Each repeat starts
every server afresh, in turn, so that the machine's moods fall on all. In the first repeats a peer is measured at every
setting listed in comparison/contestants.py; after that, for each work, at the best of them. `report` prints the tables.
"""

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from comparison.contestants import LLAMA_CPP, contestants
from comparison.machine import describe
from comparison.perplexity import fixed_text, served_perplexity, tool_perplexity, windows
from comparison.report import report
from comparison.results import Result, ResultFile
from comparison.server import Contestant, Running, ServerError, Setting, running, summed_pss
from comparison.works import LARGE, QUICK, SMALL, WORKS, Measured, Size, WorkError, measure

HERE = Path(__file__).resolve().parent
MODELS = ("smollm2-135m", "random-1b", "gemma3-270m")
SERVERS = ("headrace", "llama.cpp", "openvino", "vllm")
CORPUS = HERE.parent / "headrace" / "bench" / "corpus"


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    models: list[str]
    servers: list[str]
    files: list[str]
    works: list[str]
    repeats: int
    sweep_repeats: int
    threads: int
    quick: bool
    checkpoints: Path

    def size(self, model: str) -> Size:
        if self.quick:
            return QUICK
        return LARGE if model == "random-1b" else SMALL

    def contestants(self, model: str) -> list[Contestant]:
        found = contestants(model, (self.checkpoints / model).resolve(), self.threads)
        wanted = [one for one in found if one.server in self.servers and (not self.files or one.file in self.files)]
        for one in wanted:
            if not one.path.exists():
                print(f"{model}: {one.name} is left out: {one.path} does not exist", flush=True)
        return [one for one in wanted if one.path.exists()]


class Comparison:
    """Goes through the plan and fills the file."""

    def __init__(self, plan: Plan, results: ResultFile, log: Path) -> None:
        self._plan = plan
        self._results = results
        self._log = log

    def run(self) -> None:
        for model in self._plan.models:
            entrants = self._plan.contestants(model)
            for repeat in range(self._plan.repeats):
                for contestant in entrants:
                    for setting in contestant.settings:
                        works = self._open_works(model, contestant, setting, repeat)
                        if works:
                            self._session(model, contestant, setting, repeat, works)
                if repeat == 0 and "perplexity" in self._plan.works and model != "random-1b":
                    self._tool_perplexity(model, entrants)

    def _open_works(self, model: str, contestant: Contestant, setting: Setting, repeat: int) -> list[str]:
        """The works of this setting that are wanted in this repeat and not measured yet."""
        found = []
        for work in setting.works:
            once = work == "perplexity" and (repeat > 0 or model == "random-1b")
            if work not in self._plan.works or once:
                continue
            if repeat >= self._plan.sweep_repeats:
                best = self._results.best_setting(model, contestant.name, work, range(self._plan.sweep_repeats))
                if best is not None and best != setting.name:
                    continue
            if not self._results.has((model, contestant.name, setting.name, work, repeat)):
                found.append(work)
        return found

    def _session(self, model: str, contestant: Contestant, setting: Setting, repeat: int, works: list[str]) -> None:
        try:
            with running(contestant, setting, self._log) as server:
                for work in works:
                    try:
                        found = self._measure(model, work, server, repeat)
                    except WorkError as error:
                        self._fail(Result(model, contestant.name, setting.name, work, repeat, {}, 0.0, {}, str(error)))
                        continue
                    self._keep(
                        Result(
                            model,
                            contestant.name,
                            setting.name,
                            work,
                            repeat,
                            found.values,
                            found.generator_cpu_share,
                            found.detail | {"options": list(setting.options)},
                        )
                    )
        except (ServerError, WorkError) as error:
            for work in works:
                self._fail(Result(model, contestant.name, setting.name, work, repeat, {}, 0.0, {}, str(error)))

    def _measure(self, model: str, work: str, server: Running, repeat: int) -> Measured:
        if work == "cold":
            return Measured({"s": server.cold_start}, 0.0, {})
        if work == "memory":
            return Measured({"mib": summed_pss(server.process_id)}, 0.0, {})
        if work == "perplexity":
            parts = windows(self._vocabulary(model), fixed_text(CORPUS))
            value = served_perplexity(server.target, parts)
            return Measured({"perplexity": value}, 0.0, {"windows": len(parts)})
        return measure(work, server.target, self._plan.size(model), repeat)

    def _vocabulary(self, model: str) -> Path:
        return next((self._plan.checkpoints / model).glob("*.gguf"))

    def _tool_perplexity(self, model: str, entrants: list[Contestant]) -> None:
        text = self._log.with_suffix(".text")
        text.write_text(fixed_text(CORPUS), encoding="utf-8")
        for one in entrants:
            if one.server != "llama.cpp" or self._results.has((model, one.name, "llama-perplexity", "perplexity", 0)):
                continue
            try:
                value = tool_perplexity(LLAMA_CPP / "llama-perplexity", one.path, text, self._plan.threads)
            except WorkError as error:
                self._fail(Result(model, one.name, "llama-perplexity", "perplexity", 0, {}, 0.0, {}, str(error)))
            else:
                values = {"perplexity": value}
                self._keep(Result(model, one.name, "llama-perplexity", "perplexity", 0, values, 0.0, {}))

    def _keep(self, result: Result) -> None:
        self._results.add(result)
        values = "  ".join(f"{key} {value:.4g}" for key, value in result.values.items())
        share = 100 * result.generator_cpu_share
        print(f"{_label(result)} {values}  (generator {share:.1f} % of a core)", flush=True)

    def _fail(self, result: Result) -> None:
        self._results.add(result)
        print(f"{_label(result)} FAILED: {result.error}", flush=True)


def _label(result: Result) -> str:
    who = f"{result.contestant} [{result.setting}]"
    return f"{result.model:<13} repeat {result.repeat + 1}  {who:<42} {result.work:<10}"


def _names(known: tuple[str, ...], given: str) -> list[str]:
    wanted = given.split(",") if given else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; servers' own output goes beside it")
    parser.add_argument("--models", default="", help=", ".join(MODELS))
    parser.add_argument("--servers", default="", help=", ".join(SERVERS))
    parser.add_argument("--files", default="", help="only these files, such as Q4_1,int8,bf16")
    parser.add_argument("--works", default="", help=", ".join(WORKS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep-repeats", type=int, default=2, help="repeats in which all settings are tried")
    parser.add_argument("--quick", action="store_true", help="one repeat of as little as works: to try everything out")
    parser.add_argument("--checkpoints", type=Path, default=HERE.parent / ".peers" / "checkpoints")
    given = parser.parse_args()
    results = ResultFile(given.results)
    models = _names(MODELS, given.models)
    if given.action == "report":
        print(report(results, models, given.checkpoints))
        return
    plan = Plan(
        models,
        _names(SERVERS, given.servers),
        given.files.split(",") if given.files else [],
        _names(WORKS, given.works),
        1 if given.quick else given.repeats,
        given.sweep_repeats,
        given.threads,
        given.quick,
        given.checkpoints,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # servers are stopped
    results.add_machine(describe(given.threads, set(plan.servers)))
    Comparison(plan, results, given.results.with_suffix(".log")).run()


if __name__ == "__main__":
    main()
