"""`headrace models`: the catalog, and which of it is on this machine."""

from collections.abc import Sequence
from pathlib import Path

from headrace.base.config import cache_dir
from headrace.cli.cached import bytes_of, cached
from headrace.cli.options import Command, NoOptions, read
from headrace.model.catalog import CATALOG

COMMAND = Command("models", "List the catalog and what is cached where.", NoOptions, config_fields=("cache_dir",))


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    root = cache_dir(given.config.cache_dir)
    print(f"{'NAME':<14} {'LICENCE':<11} {'HERE':>8}  DESCRIPTION")
    places: list[tuple[str, Path]] = []
    for entry in CATALOG:
        place = cached(entry, root)
        if place is not None:
            places.append((entry.name, place))
        here = f"{bytes_of(place) / 1e6:,.0f} MB" if place is not None else "-"
        print(f"{entry.name:<14} {entry.licence:<11} {here:>8}  {entry.description}")
    for name, place in places:
        print(f"\n{name} is at {place}", end="")
    print(
        "\n\nMODEL can also be a path (GGUF file or Hugging Face folder) or a hub id (owner/name, owner/name:Q4_K_M)."
    )
    return 0
