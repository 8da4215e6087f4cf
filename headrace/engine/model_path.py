"""MODEL -> a path on this machine: what comes before an engine process gets its Job."""

from collections.abc import Callable
from pathlib import Path

from headrace.base.config import Config, cache_dir

Report = Callable[[str, float], None]  # what loading is doing, and the fraction done


def find_model(config: Config, report: Report) -> Path:
    """The model's path on this machine, fetched when needed. Raises ModelNotFoundError or FetchError."""
    if config.backend == "fake":
        return Path("fake")
    from headrace.model.fetch import resolve_model

    def progress(what: str, done: int, total: int) -> None:
        report(what, done / total if total else 0.0)

    return resolve_model(config.model, cache_dir(config.cache_dir), progress)


def find_model_here(config: Config) -> Path | None:
    """The path that `find_model` will give, if nothing need be fetched. Raises ModelNotFoundError."""
    if config.backend == "fake":
        return Path("fake")
    from headrace.model.fetch import find_here

    return find_here(config.model, cache_dir(config.cache_dir))
