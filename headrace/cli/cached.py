"""What of the catalog is on this machine, and what is said before the rest is fetched."""

import sys
from pathlib import Path

from headrace.base.config import Config, cache_dir
from headrace.model.catalog import CatalogEntry, find
from headrace.model.fetch import cached_path, is_trusted
from headrace.model.hub import hub_folder


def cached(entry: CatalogEntry, root: Path) -> Path | None:
    """The file, or for a model of the hub its folder in the hub's cache; None when it is not here."""
    if entry.package is None:
        return hub_folder(entry.hub)
    path = cached_path(entry, root)
    return path if is_trusted(path, entry.package) else None


def bytes_of(place: Path) -> int:
    """Bytes of a file, or of the blobs in a folder of the hub's cache, to which its snapshots only link."""
    if place.is_file():
        return place.stat().st_size
    return sum(file.stat().st_size for file in (place / "blobs").rglob("*") if file.is_file())


def say_licence(config: Config) -> None:
    """Prints the licence note of a catalog model that is about to be fetched."""
    entry = find(config.model)
    if config.backend == "fake" or entry is None or not entry.licence_note or Path(config.model).expanduser().exists():
        return
    if cached(entry, cache_dir(config.cache_dir)) is None:
        print(f"{entry.name}: {entry.licence_note}", file=sys.stderr)
