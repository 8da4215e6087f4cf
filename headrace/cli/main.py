"""The `headrace` command: finds the subcommand and imports only it, so that `--help` is instant."""

import sys
from collections.abc import Sequence
from importlib import import_module

from headrace import __version__
from headrace.base.config import nearest
from headrace.base.errors import ConfigError, HeadraceError

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible API",
    "run": "chat with a model in the terminal",
    "bench": "put load on any OpenAI-compatible server and measure it",
    "quality": "measure what a model's arithmetic costs in KL divergence and perplexity",
    "quantize": "write a model's weights in fewer bits, and show what that costs",
    "inspect": "show a model's graph, sizes, kernels and memory plan",
    "profile": "show where the time of a step goes, against what the machine can do",
    "models": "list the catalog and what is here",
    "pull": "fetch a model",
    "rm": "delete a fetched model",
    "ps": "list the servers running on this machine",
}


def usage() -> str:
    lines = [f"  {name:<9} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headrace COMMAND [ARGUMENTS] | --version | --help",
            "",
            "Headrace serves language models: steady, fast, with promises that it keeps.",
            "",
            "commands:",
            *lines,
            "",
            "`headrace COMMAND --help` shows a command's flags. Start with: headrace run",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0 done, 1 failed, 2 called wrongly, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"headrace {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"headrace: unknown command {name!r}{nearest(name, COMMANDS)}; see headrace --help", file=sys.stderr)
        return 2
    try:
        return int(import_module(f"headrace.cli.{name}").main(arguments[1:]))
    except ConfigError as error:
        print(f"headrace {name}: {error}", file=sys.stderr)
        return 2
    except HeadraceError as error:
        print(f"headrace {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `headrace models | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a folder that may not be read: the machine's, not a defect of ours
        print(f"headrace {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
