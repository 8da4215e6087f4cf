"""Streams: the same answer in pieces, an honest end, and no work for clients that have gone."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from asgi_call import Call, payload
from fake_engine import FakeEngine
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.base.config import Config
from headrace.base.errors import EngineDeadError
from headrace.server.app import create_app

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**HI, "stream": True}),
    (PLAIN, {"prompt": "hi", "stream": True}),
    (PLAIN, {"prompt": ["hi", "ho"], "stream": True, "n": 2}),
]


def chunks(text: str) -> Iterator[dict[str, Any]]:
    """The JSON of every frame but the last, which must be [DONE]."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    for frame in frames[:-2]:
        assert frame.startswith("data: ")
        yield json.loads(frame[6:])


def joined(text: str) -> dict[int, dict[str, Any]]:
    """A stream put together again: per choice its text, its logprobs and how it ended."""
    result: dict[int, dict[str, Any]] = {}
    for chunk in chunks(text):
        for choice in chunk["choices"]:
            whole = result.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None})
            assert whole["finish"] is None, "nothing follows a finish reason"
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice["logprobs"] or {}
            whole["logprobs"] += logprobs.get("content") or logprobs.get("tokens") or []
            whole["finish"] = choice["finish_reason"]
    return result


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"max_tokens": 1}, {"logprobs": True, "top_logprobs": 2}])
def test_a_chat_stream_is_the_whole_answer_in_pieces(client: TestClient, extra: dict[str, Any]) -> None:
    body = {**HI, "seed": 1, **extra}
    whole = client.post(CHAT, json=body).json()
    streamed = client.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    pieces = joined(streamed.text)
    for choice in whole["choices"]:
        piece = pieces[choice["index"]]
        assert piece["text"] == choice["message"]["content"] and piece["finish"] == choice["finish_reason"]
        assert piece["logprobs"] == (choice["logprobs"] or {}).get("content", [])
    *others, last = chunks(streamed.text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in others)
    assert {chunk["object"] for chunk in (*others, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*others, last)}) == 1


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"echo": True, "logprobs": 1}, {"prompt": ["ab", "c"], "n": 2}])
def test_a_completion_stream_is_the_whole_answer_in_pieces(client: TestClient, extra: dict[str, Any]) -> None:
    body = {"prompt": "hi", "seed": 1, **extra}
    whole = client.post(PLAIN, json=body).json()
    streamed = client.post(PLAIN, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    pieces = joined(streamed.text)
    for choice in whole["choices"]:
        piece = pieces[choice["index"]]
        assert piece["text"] == choice["text"] and piece["finish"] == choice["finish_reason"]
        assert piece["logprobs"] == (choice["logprobs"] or {}).get("tokens", [])
    assert list(chunks(streamed.text))[-1]["usage"] == whole["usage"]


def test_the_role_comes_once_per_choice_with_its_first_token(client: TestClient) -> None:
    streamed = client.post(CHAT, json={**HI, "stream": True, "n": 2, "max_tokens": 3})
    roles = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("role")) for c in chunks(streamed.text)]
    assert [index for index, role in roles if role == "assistant"] == [0, 1]
    assert "usage" not in next(chunks(streamed.text))


def test_the_headers_of_a_stream(client: TestClient) -> None:
    headers = client.post(CHAT, json={**HI, "stream": True}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-store" and headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"].startswith("req_") and headers["openai-processing-ms"].isdigit()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_headers_leave_before_the_first_token(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        engine = FakeEngine(hold_at=0)
        async with Call(create_app(engine, Config()), path, body) as call:
            assert (await call.start())[0] == 200
            engine.hold.set()
            assert (await call.rest())[-1] == "data: [DONE]\n\n"

    run(test)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_silent_stream_is_kept_alive_with_comments(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        engine = FakeEngine(hold_at=4)
        async with Call(create_app(engine, Config(keep_alive_interval=0.01)), path, body) as call:
            await call.start()
            comments = 0
            while comments < 3:
                comments += await call.frame() == ": keep-alive\n\n"
            engine.hold.set()
            assert (await call.rest())[-1] == "data: [DONE]\n\n"

    run(test)


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("failure", [RuntimeError("the backend broke"), EngineDeadError("the engine died: killed")])
def test_a_failure_in_the_middle_ends_with_one_error_frame_and_nothing_else(
    path: str, body: dict[str, Any], failure: Exception
) -> None:
    async def test() -> None:
        engine = FakeEngine(fail_at=3, failure=failure)
        async with Call(create_app(engine, Config()), path, body) as call:
            await call.start()
            *before, last = await call.rest()
            error = payload(last)["error"]
            assert error["type"] == "server_error" and "backend" not in error["message"]
            assert before and all(payload(frame)["choices"][0]["finish_reason"] is None for frame in before)
        assert not engine.live

    run(test)


@pytest.mark.parametrize("hold_at", [0, 4])
@pytest.mark.parametrize(("path", "body"), [*STREAMS, (CHAT, HI), (PLAIN, {"prompt": ["a", "b"]})])
def test_a_client_that_goes_away_frees_its_request(path: str, body: dict[str, Any], hold_at: int) -> None:
    async def test() -> None:
        engine = FakeEngine(hold_at=hold_at)
        async with Call(create_app(engine, Config()), path, body) as call:
            await engine.held.wait()
            assert engine.live
            call.disconnect()
            await call.ended()
            assert not engine.live

    run(test)


def test_a_client_that_goes_away_while_its_prompt_is_made_starts_nothing() -> None:
    class SlowTemplate(FakeEngine):
        async def encode_chat(self, messages: Any, **options: Any) -> list[int]:
            self.held.set()
            await asyncio.Event().wait()
            return []

    async def test() -> None:
        engine = SlowTemplate()
        async with Call(create_app(engine, Config()), CHAT, HI) as call:
            await engine.held.wait()
            call.disconnect()
            await call.ended()
            assert not engine.requests and await call.next() is None

    run(test)


def test_many_streams_at_once_do_not_mix(engine: FakeEngine, app: Starlette) -> None:
    async def one(i: int) -> str:
        async with Call(app, CHAT, {**HI, "stream": True, "max_tokens": 5 + i % 7}) as call:
            await call.start()
            return "".join(await call.rest())

    async def test() -> None:
        texts = await asyncio.gather(*(one(i) for i in range(64)))
        for i, text in enumerate(texts):
            assert joined(text)[0]["text"] == f"0: {engine.text}"[: 5 + i % 7]
        assert not engine.live

    run(test)


def test_one_prompt_of_several_that_fails_ends_the_others(app: Starlette, engine: FakeEngine) -> None:
    async def test() -> None:
        engine.fail_at = 2
        async with Call(app, PLAIN, {"prompt": ["a", "b", "c"], "stream": True}) as call:
            await call.start()
            assert "error" in payload((await call.rest())[-1])
        assert len(engine.requests) == 3 and not engine.live

    run(test)
