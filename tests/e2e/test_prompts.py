"""Long prompts: read to their end, found again in the prefix cache, and refused with both numbers when too long."""

import httpx
import openai
import pytest
from asking import CONTEXT, GREEDY, MESSAGES, chat, complete, tokenize
from openai import OpenAI

LINES = "".join(f"Line {number} of the log says nothing of note.\n" for number in range(1, 170))
PROMPT = f"{LINES}The secret word is banana.\nThe secret word is"
BLOCK = 32


def test_a_long_prompt_is_read_to_its_end_and_found_again(client: OpenAI, http: httpx.Client) -> None:
    count = len(tokenize(http, PROMPT))
    assert 1900 < count < 2300
    first = complete(client, PROMPT, max_tokens=6, logprobs=3, **GREEDY)
    again = complete(client, PROMPT, max_tokens=6, logprobs=3, **GREEDY)
    tail = complete(client, PROMPT[-400:], max_tokens=6, **GREEDY)
    assert "banana" in first.choices[0].text
    assert first.usage.prompt_tokens == count
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == (count - 1) // BLOCK * BLOCK
    assert again.choices[0].text == first.choices[0].text
    assert again.choices[0].logprobs == first.choices[0].logprobs
    assert tail.usage.prompt_tokens_details.cached_tokens == 0


def test_a_salt_keeps_prefixes_apart(client: OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = complete(client, PROMPT[-600:], max_tokens=1, extra_body={"cache_salt": salt}, **GREEDY)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") == cached("b") > 0


def test_a_conversation_goes_on_from_its_prefix(client: OpenAI) -> None:
    """Every turn but the last is in the cache, the model's own answer with it."""
    question = {"role": "user", "content": "List five rivers of Europe, please, and one sentence about each of them."}
    first = chat(client, messages=[question], max_tokens=40, **GREEDY)
    history = [question, {"role": "assistant", "content": first.choices[0].message.content}]
    second = chat(client, messages=[*history, {"role": "user", "content": "Go on."}], max_tokens=2, **GREEDY)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // BLOCK * BLOCK > 0


@pytest.mark.parametrize("over", [0, 700])
def test_a_prompt_too_long_is_refused_with_both_numbers(client: OpenAI, over: int) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, [1000] * (CONTEXT + over), max_tokens=5)
    assert refused.value.code == "context_length_exceeded"
    assert str(CONTEXT) in refused.value.message
    assert str(CONTEXT + over) in refused.value.message


def test_what_fits_only_without_its_answer_is_refused_too(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, max_tokens=CONTEXT)
    assert refused.value.code == "context_length_exceeded"
    assert str(CONTEXT) in refused.value.message
    chat(client, messages=MESSAGES, max_tokens=1)
