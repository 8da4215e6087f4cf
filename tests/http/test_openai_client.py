"""OpenAI's own client as the oracle, against a real server and a real engine on the fake backend."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from server_process import ServerProcess

MODEL = "fake"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the mill."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "--api-key=sk-test", "--keep-alive-interval=0.01") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0) as sdk:
        yield sdk


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat_streams_what_it_answers_whole(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=3, temperature=1.5, max_completion_tokens=200
    )
    text, finish, usage = "", None, None
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        seed=3,
        temperature=1.5,
        max_completion_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert text and text == whole.choices[0].message.content and finish == whole.choices[0].finish_reason
    assert usage and whole.usage and usage.completion_tokens == whole.usage.completion_tokens


def test_seeds_repeat_and_choices_differ(client: OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, seed=seed, temperature=2, max_tokens=60
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content for choice in answer.choices]

    first = ask(1)
    assert first == ask(1) and first[0] != first[1] and first != ask(2)


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=8, temperature=0
    )
    choice = answer.choices[0]
    assert choice.logprobs and choice.logprobs.content and answer.usage
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
    assert (
        bytes(byte for token in choice.logprobs.content for byte in token.bytes or [])
        .decode()
        .startswith(choice.message.content or "?")
    )


def test_stop_strings_end_the_answer_and_stay_out_of_it(client: OpenAI) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    free = client.chat.completions.create(**common).choices[0].message.content or ""  # type: ignore[call-overload]
    stop = free[20:23]
    cut = client.chat.completions.create(**common, stop=[stop, "never said"])  # type: ignore[call-overload]
    assert cut.choices[0].message.content == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.usage.completion_tokens < len(free)


def test_penalties_and_biases_change_the_answer(client: OpenAI) -> None:
    def ask(**options: object) -> str:
        answer = client.completions.create(model=MODEL, prompt="ab", temperature=0, max_tokens=40, **options)  # type: ignore[call-overload]
        return str(answer.choices[0].text)

    plain = ask()
    assert plain == ask() and plain != ask(frequency_penalty=2, presence_penalty=2)
    assert ask(logit_bias={str(ord("x")): 100}) == "x" * 40


def test_a_long_prompt_is_answered_and_a_longer_one_is_refused_with_both_numbers(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="word " * 800, max_tokens=5)
    assert answer.usage and answer.usage.prompt_tokens == 4000
    again = client.completions.create(model=MODEL, prompt="word " * 800, max_tokens=5)
    assert again.usage and again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens and again.usage.prompt_tokens_details.cached_tokens > 3900
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 900)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message and "4500" in caught.value.message


def test_completions_of_several_prompts_with_echo_and_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["ab", "xyz"], n=2, echo=True, logprobs=2, max_tokens=3, seed=1
    )
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "xy", "xy"]
    logprobs = answer.choices[2].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    assert logprobs.tokens[:3] == ["x", "y", "z"] and len(logprobs.tokens) == 6
    assert logprobs.token_logprobs[0] is None and all((p or 0) <= 0 for p in logprobs.token_logprobs)


def test_scoring_a_prompt_needs_no_answer(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[97, 98, 99], echo=True, logprobs=1, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abc" and logprobs and logprobs.tokens == ["a", "b", "c"]


def test_errors_become_the_clients_exceptions(client: OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert refused.value.param == "tools" and "not yet supported" in refused.value.message
    stranger = OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_sixty_four_streams_at_once(server: ServerProcess) -> None:
    async def one(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, temperature=1.5, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-test", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(64)))
            return together, [await one(client, seed) for seed in range(0, 64, 16)]

    together, alone = asyncio.run(both())
    assert together[::16] == alone and len(set(together)) > 32
