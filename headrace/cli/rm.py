"""`headrace rm MODEL`: delete a fetched model, and its packed weights."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.base.config import Config, cache_dir, pack_folder
from headrace.base.errors import ModelNotFoundError
from headrace.cli.cached import bytes_of
from headrace.cli.options import Command, NoOptions, Positional, read
from headrace.model.catalog import find
from headrace.model.fetch import cached_path, remove_catalog
from headrace.model.hub import hub_folder

COMMAND = Command(
    "rm",
    "Delete a fetched model from the cache. Files given by path are never touched.",
    NoOptions,
    (Positional("model", "catalog name or hub id", required=True),),
    ("model", "cache_dir", "pack_cache"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    name = given.config.model
    entry = find(name)
    if entry is not None and entry.package is not None:
        root = cache_dir(given.config.cache_dir)
        freed = _forget(given.config, cached_path(entry, root).parent) + remove_catalog(name, root)
    else:
        repo = entry.hub if entry is not None else name
        if repo.count("/") != 1:
            raise ModelNotFoundError(f"{name!r} is neither a catalog name nor a hub id; see headrace models")
        folder = hub_folder(repo)
        freed = 0
        if folder is not None:
            freed = bytes_of(folder) + _forget(given.config, folder)
            shutil.rmtree(folder)
    if freed == 0:
        print(f"{name} is not here", file=sys.stderr)
        return 1
    print(f"removed {name}, {freed / 1e6:,.0f} MB")
    return 0


def _forget(config: Config, model_folder: Path) -> int:
    """Removes packed weights made of files in that folder; gives their bytes."""
    from headrace.backend.pack_cache import forget

    packed = pack_folder(config)
    return 0 if packed is None else forget(packed, model_folder)
