"""`headrace run [MODEL] [PROMPT]`: a chat in the terminal, or one answer when a prompt is given or piped in."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.base.config import option
from headrace.cli.options import Command, Positional, read


@dataclass(frozen=True)
class RunOptions:
    """How to chat."""

    stats: bool = option(False, "After each answer print tok/s and time to first token.")
    system: str = option("", "System message of the chat.")
    temperature: float = option(-1.0, "Sampling temperature; 0 is greedy; below 0: the model's own default.")
    top_p: float = option(-1.0, "Nucleus sampling; below 0: the model's own default.", maximum=1)
    max_tokens: int = option(0, "Most tokens of an answer; 0: what the context holds.", count=True, minimum=0)
    raw: bool = option(False, "Continue the prompt as plain text, without a chat template.")


COMMAND = Command(
    "run",
    "Chat with a model in the terminal. With PROMPT, or with text on standard input, answer once and exit.",
    RunOptions,
    (
        Positional("model", "catalog name, path or hub id; smollm2-135m when absent"),
        Positional("prompt", "what to ask; a chat starts when absent"),
    ),
)


def main(arguments: Sequence[str]) -> int:
    given = read(COMMAND, arguments)
    prompt = given.positionals["prompt"]
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.buffer.read().decode(errors="replace")
    from headrace.cli.cached import say_licence
    from headrace.cli.chat import chat

    say_licence(given.config)
    return asyncio.run(chat(replace(given.config, self_test=False), given.own, prompt))
