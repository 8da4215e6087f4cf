"""POST /v1/chat/completions, answered whole: what reaches the engine, and what comes back."""

import pytest
from fake_engine import END, FakeEngine
from starlette.testclient import TestClient

from headrace.base.errors import OverloadedError
from headrace.core.request import SamplingParams

PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def test_an_answer_has_openais_shape(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(PATH, json={**HI, "model": "toy"})
    body = response.json()
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "toy"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": f"0: {engine.text}", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": END,
        }
    ]
    prompt, output = len("user: hi\nassistant: "), len(f"0: {engine.text}") + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_absent_values_are_the_models_own_and_the_answer_may_fill_the_context(
    client: TestClient, engine: FakeEngine
) -> None:
    client.post(PATH, json=HI)
    room = engine.max_model_len - len("user: hi\nassistant: ")
    expected = SamplingParams(max_tokens=room, temperature=0.7, top_k=40, stop_token_ids=(END,), seed=77)
    assert engine.requests[0].params == expected and engine.requests[0].n == 1


def test_given_values_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = {
        **HI,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 5,
        "stop": ["a", "b"],
        "logit_bias": {"65": -100, "66": 2.5},
        "stop_token_ids": [7],
        "min_tokens": 2,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
        "n": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "cache_salt": "pepper",
    }
    assert client.post(PATH, json=body).status_code == 200
    request = engine.requests[0]
    assert request.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=((65, -100.0), (66, 2.5)),
        seed=5,
        stop_token_ids=(END, 7),
        logprobs=3,
    )
    assert request.n == 2 and request.stop == ("a", "b") and request.include_stop_str_in_output
    assert not request.skip_special_tokens and request.cache_salt == "pepper"


def test_ignore_eos_leaves_only_the_requests_own_stop_ids(client: TestClient, engine: FakeEngine) -> None:
    client.post(PATH, json={**HI, "ignore_eos": True, "stop_token_ids": [9], "stop": "x"})
    assert engine.requests[0].params.stop_token_ids == (9,) and engine.requests[0].stop == ("x",)


def test_several_choices_and_their_logprobs(client: TestClient) -> None:
    body = client.post(PATH, json={**HI, "n": 3, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["0:", "1:", "2:"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 3
    content = body["choices"][1]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["1", ":"] and content[0]["bytes"] == [49]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["1", "?"]
    assert body["usage"]["completion_tokens"] == 6


def test_messages_of_every_kind_reach_the_template(client: TestClient, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "name": "Jo"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so", "tool_calls": [], "reasoning_content": "hm"},
    ]
    assert client.post(PATH, json={"messages": messages}).status_code == 200
    assert engine.messages[0] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Jo"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "poem"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "arguments"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_messages_that_make_no_sense_are_named(client: TestClient, message: object, param: str) -> None:
    response = client.post(PATH, json={"messages": [message]})
    assert response.status_code == 400 and response.json()["error"]["param"].endswith(param)


def test_a_template_that_refuses_is_the_requests_fault(client: TestClient) -> None:
    response = client.post(PATH, json={"messages": [{"role": "user", "content": "refuse"}]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_the_model_is_checked_and_its_absence_means_the_served_one(client: TestClient) -> None:
    response = client.post(PATH, json={**HI, "model": "toyy"})
    error = response.json()["error"]
    assert (
        response.status_code == 404 and error["code"] == "model_not_found" and "did you mean toy?" in error["message"]
    )


def test_nothing_is_cut_to_fit_the_context(client: TestClient, engine: FakeEngine) -> None:
    engine.max_model_len = 100
    too_long = client.post(PATH, json={"messages": [{"role": "user", "content": "a" * 200}]})
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"
    assert "holds 100 tokens" in too_long.json()["error"]["message"] and "218 in the prompt" in too_long.text
    too_many = client.post(PATH, json={**HI, "max_tokens": 90})
    assert too_many.status_code == 400 and too_many.json()["error"]["code"] == "context_length_exceeded"
    assert "holds 100 tokens, but 110 are asked for: 20 in the prompt and 90 to generate" in too_many.text
    assert not engine.requests
    assert client.post(PATH, json={**HI, "max_tokens": 80}).status_code == 200


def test_a_full_queue_says_when_to_come_back(client: TestClient, engine: FakeEngine) -> None:
    engine.refuse = OverloadedError("the queue is full", retry_after=2.25)
    for stream in (False, True):
        response = client.post(PATH, json={**HI, "stream": stream})
        assert response.status_code == 503 and response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "3" and response.headers["retry-after-ms"] == "2250"
        assert response.headers["x-should-retry"] == "true"


def test_a_failure_of_the_engine_is_a_500_that_tells_nothing_of_the_inside(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.fail_at = 3
    response = client.post(PATH, json=HI)
    assert response.status_code == 500 and "backend" not in response.text
    assert response.json()["error"]["type"] == "server_error" and not engine.live
