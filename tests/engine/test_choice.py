"""ChoiceStream: however tokens are grouped into outputs, the user gets the same text, tokens and end."""

import pytest

from headrace.core.request import FinishReason, SamplingParams
from headrace.engine.choice import ChoiceStream
from headrace.engine.fake_model import END_OF_TURN, fake_tokenizer
from headrace.engine.generation import GenerationRequest
from headrace.engine.messages import Output, TokenLogprob

TOKENIZER = fake_tokenizer()
TEXT = "né 🌊 STOP and on"


def stream_of(stop: tuple[str, ...] = (), include: bool = False, **params: object) -> ChoiceStream:
    sampling = SamplingParams(stop_token_ids=(END_OF_TURN,), **params)  # type: ignore[arg-type]
    request = GenerationRequest("a", [1, 2, 3], sampling, stop=stop, include_stop_str_in_output=include)
    return ChoiceStream(request, 0, TOKENIZER)


def feed(stream: ChoiceStream, groups: list[list[int]], reason: str | None) -> tuple[str, list[int], list[int]]:
    """Text, tokens and logprob ids, up to where the stream says that it has ended."""
    text, tokens, logprobs = "", [], []
    for i, group in enumerate(groups):
        infos = [TokenLogprob(token, -1.0, []) for token in group]
        delta = stream.push(Output("a", 0, group, reason if i + 1 == len(groups) else None, infos))
        if delta is not None:
            text += delta.text
            tokens += delta.token_ids
            logprobs += [info.token_id for info in delta.logprobs or []]
            assert delta.num_output_tokens == len(tokens)
        if stream.finish_reason is not None:
            break
    return text, tokens, logprobs


def splits(ids: list[int]) -> list[list[list[int]]]:
    """Cut in two at every boundary, and token by token."""
    return [[ids[:i], ids[i:]] for i in range(1, len(ids))] + [[[token] for token in ids]]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["STOP", "é", "🌊 S", " ", "P"])
def test_a_stop_string_cuts_text_tokens_and_logprobs_at_the_same_token(stop: str, include: bool) -> None:
    ids = TOKENIZER.encode(TEXT)
    end = TEXT.index(stop)
    counted = len(TEXT[: end + len(stop)].encode())
    for groups in splits(ids):
        stream = stream_of((stop,), include)
        text, tokens, logprobs = feed(stream, groups, None)
        assert text == TEXT[: end + len(stop) * include]
        assert tokens == logprobs == ids[:counted]
        assert (stream.finish_reason, stream.stop_string) == (FinishReason.STOP, stop)


def test_without_a_match_everything_comes_out() -> None:
    ids = TOKENIZER.encode(TEXT)
    for groups in splits(ids):
        stream = stream_of(("and on and on", "never"))
        text, tokens, _ = feed(stream, groups, "length")
        assert (text, tokens, stream.finish_reason, stream.stop_string) == (TEXT, ids, FinishReason.LENGTH, None)


def test_the_stop_token_counts_but_does_not_show() -> None:
    ids = [*TOKENIZER.encode("hi"), END_OF_TURN]
    for groups in splits(ids):
        text, tokens, logprobs = feed(stream_of(), groups, "stop")
        assert (text, tokens, logprobs) == ("hi", ids, ids)


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    wave = TOKENIZER.encode("🌊")
    text, tokens, _ = feed(stream_of(), [[token] for token in wave[:3]], "length")
    assert (text, len(tokens)) == ("\ufffd", 3)


def test_a_chunk_of_prompt_shows_nothing_and_its_logprobs_come_with_the_first_token() -> None:
    stream = stream_of(prompt_logprobs=0)
    assert stream.push(Output("a", 0, [], None, None, [TokenLogprob(2, -1.0, [])])) is None
    delta = stream.push(Output("a", 0, [65], None, None, [TokenLogprob(3, -2.0, [])], 16))
    assert delta is not None and delta.prompt_logprobs is not None
    assert [info.token_id for info in delta.prompt_logprobs] == [2, 3]
    assert delta.num_cached_tokens == 16
    later = stream.push(Output("a", 0, [66], None))
    assert later is not None and later.prompt_logprobs is None
