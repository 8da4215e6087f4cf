"""Perplexity of what a server really computes, on the same windows of the same text for everyone.

As llama.cpp's own tool does it: windows of 512 tokens one after another, of which the last 255 are predicted. Servers
that give the logprobs of a prompt are asked for them; llama.cpp's does not, so its tool reads the same text.
"""

import asyncio
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from comparison.works import WorkError
from headrace.bench.client import Target, fetch
from headrace.bench.load import served_model
from headrace.model.gguf import GGUFFile
from headrace.text.tokenizer import Tokenizer

_WINDOW = 512
_FIRST = _WINDOW // 2
_CHARACTERS = 3000  # of each text of the corpus


def fixed_text(corpus: Path) -> str:
    """The beginning of every text of the corpus that `headrace quality` uses: eleven languages and Python."""
    return "\n".join(path.read_text(encoding="utf-8")[:_CHARACTERS] for path in sorted(corpus.glob("*.txt")))


def windows(vocabulary: Path, text: str) -> list[list[int]]:
    """Whole windows only. `vocabulary` is a GGUF file; where it has a begin token each window begins with it."""
    file = GGUFFile(vocabulary)
    tokenizer = Tokenizer.from_gguf(file.metadata, vocabulary)
    file.close()
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    ids = begin + tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    parts = [ids[start : start + _WINDOW] for start in range(0, len(ids) - _WINDOW + 1, _WINDOW)]
    return [begin + part[len(begin) :] for part in parts]


def served_perplexity(target: Target, parts: list[list[int]]) -> float:
    """From the logprobs that the server gives for a prompt. Raises WorkError."""
    return asyncio.run(_served(target, parts))


async def _served(target: Target, parts: list[list[int]]) -> float:
    model = await served_model(target)
    losses: list[float] = []
    for ids in parts:
        body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body |= {"echo": True, "logprobs": 1}
        status, answer = await fetch(target, "POST", "/v1/completions", msgspec.json.encode(body))
        if status != 200:
            raise WorkError(f"status {status}: {answer[:300].decode(errors='replace')}")
        found = msgspec.json.decode(answer)["choices"][0]["logprobs"]["token_logprobs"][:_WINDOW]
        losses += [-value for value in found[_FIRST + 1 :]]
    if len(losses) != len(parts) * (_WINDOW - _FIRST - 1) or not all(map(math.isfinite, losses)):
        raise WorkError("the server did not give a logprob for every token")
    return math.exp(sum(losses) / len(losses))


def tool_perplexity(tool: Path, model: Path, text: Path, threads: int) -> float:
    """From llama-perplexity. Raises WorkError."""
    command = [str(tool), "-m", str(model), "-f", str(text), "-c", str(_WINDOW), "-b", str(_WINDOW), "-t", str(threads)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    match = re.search(r"Final estimate: PPL = ([\d.]+)", found.stdout)
    if not match:
        raise WorkError(f"llama-perplexity ended with {found.returncode}: {found.stdout[-300:]}")
    return float(match[1])
