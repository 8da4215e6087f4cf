"""Logprobs, stop strings, penalties and biases on the real model's numbers."""

import math
from typing import Any

import httpx
import pytest
from asking import GREEDY, SEEDED, chat, chat_stream, complete, complete_stream, tokenize
from openai import OpenAI


@pytest.mark.parametrize("how", [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")])
def test_logprobs_belong_to_the_text(client: OpenAI, how: dict[str, Any]) -> None:
    whole = chat(client, logprobs=True, top_logprobs=20, **how)
    [choice] = whole.choices
    tokens = choice.logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace") == choice.message.content
    for token in tokens:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 20 and tops == sorted(tops, reverse=True)
        assert sum(map(math.exp, tops)) <= 1 + 1e-5
        assert token.logprob <= tops[0]
        if how is GREEDY:
            assert (token.logprob, token.bytes) == (tops[0], token.top_logprobs[0].bytes)
    if how is SEEDED:
        assert any(token.logprob < token.top_logprobs[0].logprob for token in tokens)


def test_streamed_logprobs_are_those_of_the_whole_answer(client: OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2, **SEEDED).choices[0].logprobs.content
    with chat(client, logprobs=True, top_logprobs=2, stream=True, **SEEDED) as stream:
        shown = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert [token for logprobs in shown for token in logprobs.content] == whole


def test_a_scored_text_has_the_logprobs_that_it_was_written_with(client: OpenAI, http: httpx.Client) -> None:
    """Decoding gives them one by one; echo computes them all in one chunk. They are equal to the bit."""
    prompt = tokenize(http, "The miller opened the gate and")
    written = complete(client, prompt, logprobs=5, max_tokens=12, **GREEDY).choices[0]
    output = tokenize(http, written.text)
    scored = complete(client, prompt + output, logprobs=5, echo=True, max_tokens=0).choices[0]
    assert scored.text == "The miller opened the gate and" + written.text
    assert "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scored.logprobs.token_logprobs[1:])
    assert scored.logprobs.tokens[-12:] == written.logprobs.tokens
    assert scored.logprobs.token_logprobs[-12:] == written.logprobs.token_logprobs
    assert scored.logprobs.top_logprobs[-12:] == written.logprobs.top_logprobs
    for token, offset in zip(scored.logprobs.tokens, scored.logprobs.text_offset, strict=True):
        assert scored.text.startswith(token, offset)


def test_echo_streams_the_prompt_before_the_answer(client: OpenAI) -> None:
    prompt = "Water runs downhill because"
    whole = complete(client, prompt, echo=True, **GREEDY).choices[0].text
    assert whole.startswith(prompt)
    assert complete_stream(client, prompt, echo=True, **GREEDY) == whole


def test_a_stop_string_over_two_tokens_never_shows(client: OpenAI) -> None:
    free = chat(client, logprobs=True, **GREEDY).choices[0]
    text = free.message.content
    left = len(b"".join(bytes(token.bytes) for token in free.logprobs.content[:8]).decode())
    stop = text[left - 2 : left + 2]  # the end of one token and the beginning of the next
    expected = text[: text.index(stop)]
    for stops in (stop, [stop], ["never said", stop]):
        cut = chat(client, stop=stops, **GREEDY)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (expected, "stop")
        assert cut.choices[0].stop_reason == stop
        assert cut.usage.completion_tokens < 24
    streamed = chat_stream(client, stop=stop, **GREEDY)
    assert (streamed.text, streamed.finish_reason) == (expected, "stop")
    assert streamed.usage.completion_tokens == cut.usage.completion_tokens
    kept = chat(client, stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY)
    assert kept.choices[0].message.content == expected + stop


def test_a_stop_token_id_ends_the_answer(client: OpenAI, http: httpx.Client) -> None:
    ids = tokenize(http, complete(client, "Rain falls on", **GREEDY).choices[0].text)
    cut = complete(client, "Rain falls on", extra_body={"stop_token_ids": [ids[4]]}, **GREEDY)
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == ids[4]
    assert cut.usage.completion_tokens == ids.index(ids[4]) + 1


def test_penalties_break_a_loop(client: OpenAI, http: httpx.Client) -> None:
    def distinct(**options: Any) -> int:
        answer = complete(client, "ha ha ha ha ha ha", max_tokens=30, **GREEDY, **options)
        return len(set(tokenize(http, answer.choices[0].text)))

    looping = distinct()
    assert looping < 8
    assert distinct(frequency_penalty=2) > 2 * looping
    assert distinct(presence_penalty=2) > looping
    assert distinct(extra_body={"repetition_penalty": 1.5}) > 2 * looping


def test_a_bias_decides(client: OpenAI, http: httpx.Client) -> None:
    [word] = tokenize(http, " river")
    assert (
        complete(client, "I see a", max_tokens=3, logit_bias={str(word): 100}, **GREEDY).choices[0].text == " river" * 3
    )
    [first, *_] = tokenize(http, complete(client, "I see a", **GREEDY).choices[0].text)
    banned = complete(client, "I see a", logit_bias={str(first): -100}, **GREEDY).choices[0].text
    assert tokenize(http, banned)[0] != first


def test_narrow_sampling_is_greedy(client: OpenAI) -> None:
    greedy = chat(client, **GREEDY).choices[0].message.content
    for narrow in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}):
        assert chat(client, temperature=1.5, seed=5, **narrow).choices[0].message.content == greedy
