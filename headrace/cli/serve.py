"""`headrace serve [MODEL]`: the server."""

import gc
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

    gc.disable()  # what is made until the server is ready stays; `serve` turns it on again
    # The engine process starts, and where the model is here loads it, while we import what a server needs.
    with Spawned(given.config.backend) as spawned:
        from headrace.engine.child import first_job
        from headrace.engine.model_path import find_model_here

        path = find_model_here(given.config)
        if path is not None:
            spawned.give(first_job(given.config, path).line())
        from headrace.cli.cached import say_licence
        from headrace.cli.progress import loading
        from headrace.server.run import serve

        say_licence(given.config)
        return serve(given.config, loading(), spawned)
