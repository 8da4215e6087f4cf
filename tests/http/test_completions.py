"""POST /v1/completions: prompts of every kind, echo, and the older logprob shape."""

from typing import Any

import pytest
from fake_engine import END, FakeEngine
from starlette.testclient import TestClient

from headrace.engine.generation import TokenInfo
from headrace.server.legacy_logprobs import LegacyLogprobs

PATH = "/v1/completions"


def test_an_answer_has_openais_shape_and_sixteen_tokens(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json={"prompt": "ab"}).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "text": f"0: {engine.text}"[:16],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[97, 98]]),
        (["ab"], [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_of_every_kind(client: TestClient, engine: FakeEngine, prompt: Any, token_ids: Any) -> None:
    body = client.post(PATH, json={"prompt": prompt, "n": 2, "max_tokens": 1}).json()
    assert [request.prompt_token_ids for request in engine.requests] == token_ids
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(token_ids)))
    assert [choice["text"] for choice in body["choices"]] == ["0", "1"] * len(token_ids)
    assert body["usage"]["prompt_tokens"] == sum(map(len, token_ids))
    assert len({request.request_id for request in engine.requests}) == len(token_ids)


@pytest.mark.parametrize("prompt", [[], [[]], "", ["a", 1], [1, "a"], [1, [2]], [["a"]], [257], [-1], [1.5], {}])
def test_prompts_that_are_none(client: TestClient, engine: FakeEngine, prompt: Any) -> None:
    response = client.post(PATH, json={"prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("prompt")
    assert not engine.requests


def test_too_many_answers_in_one_request(client: TestClient) -> None:
    assert client.post(PATH, json={"prompt": ["a"] * 129}).status_code == 400
    assert client.post(PATH, json={"prompt": ["a"] * 100, "n": 3}).status_code == 400


def test_one_prompt_of_several_that_does_not_fit_starts_none(client: TestClient, engine: FakeEngine) -> None:
    engine.max_model_len = 50
    response = client.post(PATH, json={"prompt": ["a", "b" * 60]})
    assert response.json()["error"]["code"] == "context_length_exceeded" and not engine.live


def test_logprobs_in_parallel_lists(client: TestClient) -> None:
    body = client.post(PATH, json={"prompt": "ab", "max_tokens": 3, "logprobs": 1}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["0", ":", " "],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"0": -0.5}, {":": -0.5}, {" ": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_echo_scores_the_prompt_and_the_first_token_has_no_score(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json={"prompt": [97, 98], "max_tokens": 1, "logprobs": 0, "echo": True}).json()
    choice = body["choices"][0]
    assert choice["text"] == "ab0"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "0"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"0": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert engine.requests[0].params.prompt_logprobs == 0


def test_echo_without_tokens_only_scores(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json={"prompt": "abc", "max_tokens": 0, "logprobs": 1, "echo": True}).json()
    assert body["choices"][0]["text"] == "abc" and body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 0 and engine.requests[0].params.max_tokens == 0


def test_echo_alone_asks_for_no_scores(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json={"prompt": "abc", "max_tokens": 1, "echo": True}).json()
    assert body["choices"][0]["text"] == "abc0" and body["choices"][0]["logprobs"] is None
    assert engine.requests[0].params.prompt_logprobs is None


def test_half_characters_have_names_and_places_of_their_own(engine: FakeEngine) -> None:
    pieces = ["é".encode()[:1], "é".encode()[1:], b"x"]
    shaped = LegacyLogprobs(engine.tokenizer).shape(
        [TokenInfo(i, data.decode("utf-8", "replace"), data, float("-inf")) for i, data in enumerate(pieces)]
    )
    assert shaped.tokens == ["bytes:\\xc3", "bytes:\\xa9", "x"] and shaped.text_offset == [0, 0, 1]
    assert shaped.token_logprobs == [-9999.0] * 3  # JSON has no infinity


def test_places_count_only_what_the_text_shows(engine: FakeEngine) -> None:
    shaped = LegacyLogprobs(engine.tokenizer, start=-5).shape([END, *b"ab"])
    assert shaped.tokens == ["<end>", "a", "b"] and shaped.text_offset == [0, 0, 1]


def test_tokenize_and_detokenize_undo_each_other(client: TestClient) -> None:
    tokenized = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert tokenized == {"count": 3, "max_model_len": 4096, "tokens": [97, 195, 169], "token_strs": ["a", "�", "�"]}
    assert client.post("/detokenize", json={"tokens": [*tokenized["tokens"], END]}).json() == {"prompt": "aé<end>"}


def test_tokenize_takes_a_conversation_as_chat_does(client: TestClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens) == b"user: hi\nassistant: "
    bare = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert bytes(bare) == b"user: hi\n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
        ("/detokenize", {"tokens": [257]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {}),
    ],
)
def test_wrong_tokenizer_requests(client: TestClient, path: str, body: Any) -> None:
    assert client.post(path, json=body).status_code == 400
