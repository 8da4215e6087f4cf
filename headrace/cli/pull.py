"""`headrace pull MODEL`: fetch a model before it is needed."""

from collections.abc import Sequence

from headrace.base.config import cache_dir
from headrace.cli.cached import say_licence
from headrace.cli.options import Command, NoOptions, Positional, read
from headrace.cli.progress import ProgressLine
from headrace.model.fetch import resolve_model

COMMAND = Command(
    "pull",
    "Fetch a model into the cache.",
    NoOptions,
    (Positional("model", "catalog name or hub id", required=True),),
    ("model", "cache_dir"),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    say_licence(given.config)
    with ProgressLine() as line:
        path = resolve_model(given.config.model, cache_dir(given.config.cache_dir), line.report)
    print(path)
    return 0
