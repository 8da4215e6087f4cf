"""LLM: a model in this process, on the fake model."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.base.errors import ConfigError, ContextLengthError, RequestError
from headrace.engine.fake_model import END_OF_TURN, LINE


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(backend="fake", max_num_seqs=4) as model:
        yield model


GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def test_one_prompt_or_many_texts_or_ids(llm: LLM) -> None:
    (one,) = llm.generate("Once", GREEDY)
    assert one.text == LINE[4:24]
    assert (one.finish_reason, len(one.token_ids), one.logprobs) == ("length", 20, None)
    ids = llm.tokenizer.encode("Once")
    assert [r.text for r in llm.generate(["Once", ids, "Once upon"], GREEDY)] == [one.text, one.text, LINE[9:29]]
    assert llm.generate(ids, GREEDY)[0].text == one.text
    assert llm.generate([], GREEDY) == []


def test_a_turn_ends_unless_told_otherwise(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    ended = llm.generate("Once", params)[0]
    assert (ended.text, ended.finish_reason, ended.choices[0].stop_reason) == (LINE[4:], "stop", END_OF_TURN)
    endless = llm.generate("Once", params, ignore_eos=True)[0]
    assert (len(endless.token_ids), endless.finish_reason) == (200, "length")


def test_stop_strings_choices_and_logprobs(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=60, seed=i, logprobs=1) for i in range(2)]
    results = llm.generate(["a", "b"], params, n=2, stop="e", ignore_eos=True)
    for result in results:
        for choice in result.choices:
            assert "e" not in choice.text
            assert choice.logprobs is not None
            assert [info.token_id for info in choice.logprobs] == choice.token_ids
            assert choice.stop_reason in (None, "e")
    assert results == llm.generate(["a", "b"], params, n=2, stop="e", ignore_eos=True)


def test_chat_fills_the_context_when_nobody_says_otherwise(llm: LLM) -> None:
    user = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(user, SamplingParams(temperature=0.0, max_tokens=100))
    assert result.finish_reason == "stop"
    assert llm.tokenizer.decode(result.prompt_token_ids, False).endswith("assistant\n")
    assert len(llm.chat([user, user])) == 2


WRONG: list[dict[str, Any]] = [
    {"prompts": value} for value in (5, None, [None], b"abc", [b"abc"], [1.5, 2], [[1.5]], [["a"]], [[]])
]
WRONG += [{"params": value} for value in ("x", {"max_tokens": 3}, 5, [5], SamplingParams)]
WRONG += [{"stop": value} for value in (5, "", [5], ["a"] * 99)]
WRONG += [{"n": value} for value in (0, 1.5, "2", None, True)]
WRONG += [
    {"params": replace(SamplingParams(), **{name: value})}
    for name, values in {
        "max_tokens": (-1, 3.5, None, "3", True),
        "seed": (None, 1.5, -1),
        "temperature": (None, "hot", True, float("nan")),
        "top_k": (1.5, 1 << 31),
        "logit_bias": ({5: 1.0}, ((5,),), (("a", "b"),), ((5, "b"),)),
        "stop_token_ids": (("x",), (1 << 40,)),
        "logprobs": (1.5, "all"),
    }.items()
    for value in values
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_no_argument_can_be_is_a_request_error(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.generate(**{"prompts": "a", "params": GREEDY, **wrong})


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once")
    assert llm.generate(np.array(ids), GREEDY) == llm.generate([np.array(ids)], GREEDY)  # type: ignore[arg-type]
    assert llm.generate(ids, GREEDY)[0].text == llm.generate(np.array(ids), GREEDY)[0].text  # type: ignore[arg-type]


def test_what_was_closed_says_so() -> None:
    model = LLM(backend="fake")
    model.close()
    with pytest.raises(RequestError, match="closed"):
        model.generate("a", GREEDY)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, [{"role": "user", "content": object()}]])
def test_what_is_no_conversation_is_a_request_error(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_wrong_arguments_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="4096"):
        llm.generate("x" * 4096, GREEDY)
    with pytest.raises(RequestError, match="2 prompts were given and 1 params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("a", SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(backend="fake", max_model_length=5)
    with pytest.raises(ConfigError, match="LLM: unknown key 'port'"):
        LLM(backend="fake", port=8000)


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    texts: list[str] = []

    def call() -> None:
        texts.append(llm.generate("Once", GREEDY)[0].text)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [LINE[4:24]] * 4


def test_an_interrupt_leaves_the_model_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = type(llm._engine).step
    calls = 0

    def interrupted(engine):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(type(llm._engine), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm._engine.scheduler.gauges().kv_blocks_used == 0
    assert llm.generate("Once", GREEDY)[0].text == LINE[4:24]
