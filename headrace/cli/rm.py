"""`headrace rm MODEL`: delete a fetched model."""

import shutil
import sys
from collections.abc import Sequence

from headrace.base.config import cache_dir
from headrace.base.errors import ModelNotFoundError
from headrace.cli.cached import bytes_of
from headrace.cli.options import Command, NoOptions, Positional, read
from headrace.model.catalog import find
from headrace.model.fetch import remove_catalog
from headrace.model.hub import hub_folder

COMMAND = Command(
    "rm",
    "Delete a fetched model from the cache. Files given by path are never touched.",
    NoOptions,
    (Positional("model", "catalog name or hub id", required=True),),
    ("model", "cache_dir"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    name = given.config.model
    entry = find(name)
    if entry is not None and entry.package is not None:
        freed = remove_catalog(name, cache_dir(given.config.cache_dir))
    else:
        repo = entry.hub if entry is not None else name
        if repo.count("/") != 1:
            raise ModelNotFoundError(f"{name!r} is neither a catalog name nor a hub id; see headrace models")
        folder = hub_folder(repo)
        freed = 0
        if folder is not None:
            freed = bytes_of(folder)
            shutil.rmtree(folder)
    if freed == 0:
        print(f"{name} is not here", file=sys.stderr)
        return 1
    print(f"removed {name}, {freed / 1e6:,.0f} MB")
    return 0
