"""`headrace models`: the catalog, and which of it is on this machine."""

from collections.abc import Sequence
from pathlib import Path

from headrace.base.config import cache_dir
from headrace.cli.options import Command, NoOptions, read
from headrace.model.catalog import CATALOG, CatalogEntry
from headrace.model.fetch import cached_path, is_trusted
from headrace.model.hub import hub_folder

COMMAND = Command("models", "List the catalog and what is cached where.", NoOptions, config_fields=("cache_dir",))


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    root = cache_dir(given.config.cache_dir)
    print(f"{'NAME':<14} {'LICENCE':<11} {'HERE':>8}  DESCRIPTION")
    places: list[tuple[str, Path]] = []
    for entry in CATALOG:
        place, size = _where(entry, root)
        if place is not None:
            places.append((entry.name, place))
        here = f"{size / 1e6:,.0f} MB" if place is not None else "-"
        print(f"{entry.name:<14} {entry.licence:<11} {here:>8}  {entry.description}")
    for name, place in places:
        print(f"\n{name} is at {place}", end="")
    print(
        "\n\nMODEL can also be a path (GGUF file or Hugging Face folder) or a hub id (owner/name, owner/name:Q4_K_M)."
    )
    return 0


def _where(entry: CatalogEntry, root: Path) -> tuple[Path | None, int]:
    if entry.package is not None:
        path = cached_path(entry, root)
        return (path, path.stat().st_size) if is_trusted(path, entry.package) else (None, 0)
    folder = hub_folder(entry.hub)
    if folder is None:
        return None, 0
    blobs = [file for file in (folder / "blobs").rglob("*") if file.is_file()]
    return folder, sum(file.stat().st_size for file in blobs)
