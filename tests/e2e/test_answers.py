"""What the real model answers: the same streamed and whole, counted right, ended right, and repeatable."""

from typing import Any

import httpx
import pytest
from asking import CONTEXT, GREEDY, MESSAGES, MODEL, SEEDED, chat, chat_stream, complete, complete_stream, tokenize
from openai import OpenAI

BOTH = pytest.mark.parametrize("how", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])


def test_it_knows_the_capital_of_france(client: OpenAI) -> None:
    assert "Paris" in complete(client, "The capital of France is", max_tokens=3, **GREEDY).choices[0].text


@BOTH
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, http: httpx.Client, how: dict[str, Any]) -> None:
    whole, streamed = chat(client, **how), chat_stream(client, **how)
    prompt = http.post("/tokenize", json={"messages": MESSAGES}).raise_for_status().json()["count"]
    [choice] = whole.choices
    assert streamed.text == choice.message.content != ""
    assert streamed.finish_reason == choice.finish_reason == "length"
    for usage in (whole.usage, streamed.usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 24, prompt + 24)


@BOTH
def test_a_streamed_completion_too(client: OpenAI, how: dict[str, Any]) -> None:
    whole = complete(client, "Rain falls on the hills and", max_tokens=16, **how).choices[0]
    assert complete_stream(client, "Rain falls on the hills and", max_tokens=16, **how) == whole.text != ""


def test_the_models_own_end_of_turn_ends_the_answer(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say only: yes"}]
    whole = chat(client, messages=messages, max_tokens=200, **GREEDY)
    assert whole.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in whole.choices[0].message.content
    assert whole.usage.completion_tokens < 200
    streamed = chat_stream(client, messages=messages, max_tokens=200, **GREEDY)
    assert (streamed.text, streamed.finish_reason) == (whole.choices[0].message.content, "stop")


@pytest.mark.parametrize("count", [1, 7])
def test_max_tokens_is_kept(client: OpenAI, count: int) -> None:
    whole = chat(client, max_tokens=count, **GREEDY)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", count)
    assert chat(client, max_tokens=24, **GREEDY).choices[0].message.content.startswith(whole.choices[0].message.content)


def test_a_completion_without_max_tokens_takes_16(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="One, two, three,", temperature=0)
    assert (answer.choices[0].finish_reason, answer.usage and answer.usage.completion_tokens) == ("length", 16)


def test_a_chat_without_max_tokens_may_fill_the_context(client: OpenAI, http: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "la" + " la" * (CONTEXT - 60)}]
    count = http.post("/tokenize", json={"messages": messages}).raise_for_status().json()["count"]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage and answer.usage.prompt_tokens == count > CONTEXT - 60
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_seeds_repeat_and_differ(client: OpenAI) -> None:
    def said(seed: int) -> str:
        return str(chat(client, temperature=1, seed=seed).choices[0].message.content)

    assert said(1) == said(1) != said(2)


def test_two_choices_draw_on_their_own_and_repeat(client: OpenAI) -> None:
    def said(**options: Any) -> list[str]:
        answer = chat(client, **SEEDED, **options)
        assert [choice.index for choice in answer.choices] == list(range(options.get("n", 1)))
        return [str(choice.message.content) for choice in answer.choices]

    both = said(n=2)
    assert both[0] != both[1]
    assert both == said(n=2)
    assert both[:1] == said()
    answer = chat(client, n=2, **SEEDED)
    assert answer.usage.completion_tokens == 48


def test_token_ids_are_as_good_as_text(client: OpenAI, http: httpx.Client) -> None:
    texts = ["The river flows", "Once upon a time"]
    ids = [tokenize(http, text) for text in texts]
    assert http.post("/detokenize", json={"tokens": ids[0]}).json() == {"prompt": texts[0]}
    by_text = [choice.text for choice in complete(client, texts, **GREEDY).choices]
    assert [choice.text for choice in complete(client, ids, **GREEDY).choices] == by_text
    assert [complete(client, one, **GREEDY).choices[0].text for one in ids] == by_text
