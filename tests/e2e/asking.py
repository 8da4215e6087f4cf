"""Short ways to ask the served model, whole and streamed, and to look at the server from outside."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI
from server_process import PATIENCE_S

MODEL = "smollm2"
CONTEXT = 2560
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about the water mill in two sentences."}]
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 11}
GAUGES = ("headrace_num_requests_running", "headrace_num_requests_waiting", "headrace_kv_cache_usage_perc")


@dataclass
class Said:
    """What one choice came to."""

    text: str
    finish_reason: str | None
    usage: Any


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **options})


def chat_stream(client: OpenAI, **options: Any) -> Said:
    said = Said("", None, None)
    with chat(client, stream=True, stream_options={"include_usage": True}, **options) as stream:
        for chunk in stream:
            said.usage = chunk.usage or said.usage
            for choice in chunk.choices:
                assert said.finish_reason is None, "something came after the end"
                said.text += choice.delta.content or ""
                said.finish_reason = choice.finish_reason
    return said


def complete(client: OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 8, **options})


def complete_stream(client: OpenAI, prompt: Any, **options: Any) -> str:
    with complete(client, prompt, stream=True, **options) as stream:
        return "".join(choice.text for chunk in stream for choice in chunk.choices)


def tokenize(http: httpx.Client, text: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    return ids


def gauges(http: httpx.Client) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line.startswith(GAUGES)]
    found = {name.split("{")[0]: float(value) for name, value in lines}
    assert sorted(found) == sorted(GAUGES)
    return found


def eventually(is_true: Callable[[], bool]) -> None:
    """Waits for what another process does, which no event of ours can tell."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
