"""Every field is honoured, ignored with a reason, or refused; nothing else passes, on any surface."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace.server.chat_messages import CalledFunction, ChatMessage, ContentPart, ToolCall
from headrace.server.fields import rules
from headrace.server.openai_chat import ChatRequest
from headrace.server.openai_completions import CompletionRequest
from headrace.server.sampling_fields import StreamOptions
from headrace.server.tokenize import DetokenizeRequest, TokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
BODIES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
STRUCTS = [
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    StreamOptions,
    ChatMessage,
    ContentPart,
    ToolCall,
    CalledFunction,
]


def refusal(client: TestClient, path: str, body: Any) -> dict[str, Any]:
    """The error of a request that must be refused with 400."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return dict(error)


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_field_says_what_becomes_of_it(struct: Any) -> None:
    for rule in rules(struct):
        assert rule.support in ("honoured", "ignored", "refused") and rule.doc
        assert (rule.support == "refused") == (None in rule.accepts)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("given", "nearest"), [("temperatur", "temperature"), ("max_token", "max_tokens"), ("Stream", "stream")]
)
def test_an_unknown_field_is_named_with_the_nearest_known(
    client: TestClient, path: str, body: dict[str, Any], given: str, nearest: str
) -> None:
    error = refusal(client, path, {**body, given: 1})
    assert error["param"] == given and error["code"] == "unknown_parameter"
    assert f"did you mean {nearest}?" in error["message"]


def test_an_unknown_nested_field_is_named_with_its_path(client: TestClient) -> None:
    error = refusal(
        client, "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}
    )
    assert error["param"] == "messages[0].content[0].txt" and "did you mean text?" in error["message"]


def test_a_very_long_unknown_name_is_not_echoed_whole(client: TestClient) -> None:
    assert len(refusal(client, "/v1/completions", {"prompt": "a", "x" * 5000: 1})["message"]) < 300


RANGES: list[tuple[str, list[str]]] = [
    ("temperature", ["-1", "101", "1e999", '"1"', "true"]),
    ("top_p", ["0", "-0.1", "1.1"]),
    ("top_k", ["-2", "9223372036854775808", "1.5"]),
    ("min_p", ["-0.1", "1.1"]),
    ("presence_penalty", ["-2.1", "2.1"]),
    ("frequency_penalty", ["-2.1", "2.1"]),
    ("repetition_penalty", ["0", "-1", "1e-9", "11"]),
    ("n", ["0", "-1", "129", "9223372036854775808"]),
    ("seed", ["-1", "9223372036854775808", "1e3"]),
    ("max_tokens", ["-1", "9223372036854775808", "1.0", '"5"']),
    ("min_tokens", ["-1", "9223372036854775808"]),
    ("stop", ['""', '[""]', "[1]", json.dumps(["a"] * 17), json.dumps("a" * 1025)]),
    ("stop_token_ids", ["[-1]", "[9223372036854775808]", json.dumps([1] * 129), "[257]"]),
    ("logit_bias", ['{"1": 101}', '{"1": -101}', '{"-1": 1}', '{"a": 1}', '{"257": 1}', "[]"]),
    ("stream", ["1", '"true"']),
    ("stream_options", ["[]", '{"include_usage": 1}']),
    ("ignore_eos", ["0"]),
    ("cache_salt", [json.dumps("a" * 513), "5"]),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(("name", "values"), RANGES)
def test_values_outside_their_range_are_refused(
    client: TestClient, path: str, body: dict[str, Any], name: str, values: list[str]
) -> None:
    opening = json.dumps(body)[:-1]
    for value in values:
        error = refusal(client, path, f'{opening}, "{name}": {value}}}'.encode())
        assert (error["param"] or "").replace("[", ".").split(".")[0] == name, (value, error)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_has_not_are_refused(client: TestClient, word: str) -> None:
    body = b'{"prompt": "a", "temperature": %s}' % word.encode()
    assert refusal(client, "/v1/completions", body)["code"] == "invalid_json"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_refused_fields_pass_only_when_they_ask_for_nothing(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    struct = ChatRequest if "messages" in body else CompletionRequest
    for rule in rules(struct):
        if rule.support != "refused":
            continue
        for neutral in rule.accepts:
            assert client.post(path, json={**body, rule.name: neutral}).status_code == 200, (rule.name, neutral)
        error = refusal(client, path, {**body, rule.name: {"some": "thing"}})
        assert error["param"] == rule.name and "not yet supported" in error["message"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_ignored_fields_take_anything(client: TestClient, path: str, body: dict[str, Any]) -> None:
    struct = ChatRequest if "messages" in body else CompletionRequest
    ignored = [rule.name for rule in rules(struct) if rule.support == "ignored"]
    assert "user" in ignored
    for name in ignored:
        assert client.post(path, json={**body, name: {"any": ["thing"]}}).status_code == 200


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_null_is_the_same_as_absent(client: TestClient, path: str, body: dict[str, Any]) -> None:
    struct = ChatRequest if "messages" in body else CompletionRequest
    optional = {rule.name: None for rule in rules(struct) if rule.name not in body}
    assert client.post(path, json={**optional, **body}).status_code == 200


def test_a_missing_required_field_is_named(client: TestClient) -> None:
    assert refusal(client, "/v1/completions", {})["param"] == "prompt"
    assert refusal(client, "/v1/chat/completions", {"messages": [{}]})["param"] == "messages[0].role"
    assert refusal(client, "/v1/chat/completions", {"messages": []})["param"] == "messages"


def test_rules_between_fields(client: TestClient) -> None:
    chat = "/v1/chat/completions"
    assert refusal(client, chat, {**CHAT, "top_logprobs": 2})["param"] == "top_logprobs"
    assert refusal(client, chat, {**CHAT, "stream_options": {}})["param"] == "stream_options"
    assert refusal(client, chat, {**CHAT, "max_tokens": 5, "max_completion_tokens": 6})["param"] == "max_tokens"
    assert refusal(client, chat, {**CHAT, "max_tokens": 5, "min_tokens": 6})["param"] == "min_tokens"
    both = {**CHAT, "add_generation_prompt": True, "continue_final_message": True}
    assert refusal(client, chat, both)["param"] == "continue_final_message"
    kwargs = {**CHAT, "chat_template_kwargs": {"messages": []}}
    assert refusal(client, chat, kwargs)["param"] == "chat_template_kwargs.messages"
    assert refusal(client, "/v1/completions", {**COMPLETION, "best_of": 2})["param"] == "best_of"
    assert refusal(client, "/v1/completions", {**COMPLETION, "max_tokens": 0})["param"] == "max_tokens"


RAW = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"\x00",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a"} trailing',
    b"[" * 100_000,
    b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "a"}',
    b'{"prompt": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_bodies_that_are_no_request_are_refused(client: TestClient, body: bytes) -> None:
    refusal(client, "/v1/completions", body)


def test_odd_but_valid_text_passes(client: TestClient) -> None:
    for text in ("\x00", "\u2028", "\U0001d4b3\U0001f469\u200d\U0001f467", "\ufeff", "a" * 3000):
        assert client.post("/v1/completions", json={"prompt": text}).status_code == 200
