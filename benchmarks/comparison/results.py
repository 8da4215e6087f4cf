"""Results as lines of JSON: appended one by one, so that an interrupted run goes on where it was."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.works import score


@dataclass(frozen=True)
class Result:
    """One measurement of one work, or why there is none."""

    model: str
    contestant: str
    setting: str
    work: str
    repeat: int
    values: dict[str, float]
    generator_cpu_share: float
    detail: dict[str, Any]
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.model, self.contestant, self.setting, self.work, self.repeat


class ResultFile:
    """The file and what it holds. A later line of the same key replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[tuple[str, str, str, str, int], Result] = {}
        self.machines: list[dict[str, Any]] = []  # one per run: versions, limits, command
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            row = json.loads(line)
            if "machine" in row:
                self.machines.append(row["machine"])
            else:
                result = Result(**row)
                self._results[result.key] = result

    def add(self, result: Result) -> None:
        self._results[result.key] = result
        self._append(asdict(result))

    def add_machine(self, machine: dict[str, Any]) -> None:
        self.machines.append(machine)
        self._append({"machine": machine})

    def _append(self, row: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, key: tuple[str, str, str, str, int]) -> bool:
        """Whether it was measured; a failure counts as not yet."""
        found = self._results.get(key)
        return found is not None and not found.error

    def all(self) -> list[Result]:
        return list(self._results.values())

    def good(self, model: str, contestant: str, work: str) -> dict[str, list[Result]]:
        """Results by setting, without failures."""
        found: dict[str, list[Result]] = {}
        for result in self._results.values():
            if (result.model, result.contestant, result.work) == (model, contestant, work) and not result.error:
                found.setdefault(result.setting, []).append(result)
        return found

    def best_setting(self, model: str, contestant: str, work: str, repeats: Iterable[int] = ()) -> str | None:
        """The setting with the best median among those with most results, of `repeats` when given; None: no result."""
        chosen = set(repeats)
        found = {
            setting: [r for r in results if not chosen or r.repeat in chosen]
            for setting, results in self.good(model, contestant, work).items()
        }
        most = max(map(len, found.values()), default=0)
        full = {setting: results for setting, results in found.items() if results and len(results) == most}
        return max(full, key=lambda setting: _median_score(work, full[setting]), default=None)


def _median_score(work: str, results: Sequence[Result]) -> float:
    return statistics.median(score(work, result.values) for result in results)
