"""`headrace serve [MODEL]`: the server."""

from collections.abc import Sequence

from headrace.cli.options import Command, NoOptions, Positional, read

COMMAND = Command(
    "serve",
    "Serve a model over an OpenAI-compatible API.",
    NoOptions,
    (Positional("model", "catalog name, path or hub id; smollm2-135m when absent"),),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    from headrace.engine.spawn import Spawned

    with Spawned(given.config.backend) as spawned:  # it imports what it needs while we do
        from headrace.cli.cached import say_licence
        from headrace.cli.progress import loading
        from headrace.server.run import serve

        say_licence(given.config)
        return serve(given.config, loading(), spawned)
