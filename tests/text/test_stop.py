import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.text.stop import StopMatcher

stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
texts = st.text("ab\n", max_size=30)


def naive(text, stops, include):
    """The stop string that ends first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher, parts):
    """The text shown in all, the match, and after each part what is held back."""
    shown, match = "", None
    for part in parts:
        text, match = matcher.push(part)
        shown += text
    return (shown if match else shown + matcher.flush()), match


@given(texts, stop_lists, st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_any_split_gives_the_same_answer(text, stops, include, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(StopMatcher(stops, include), parts) == naive(text, stops, include)
    assert run(StopMatcher(stops, include), list(text)) == naive(text, stops, include)


@given(texts, stop_lists)
def test_exactly_what_may_become_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for i, char in enumerate(text):
        piece, match = matcher.push(char)
        shown += piece
        if match:
            return
        tails = [text[j : i + 1] for j in range(i + 2) if any(stop.startswith(text[j : i + 1]) for stop in stops)]
        assert text[len(shown) : i + 1] == tails[0]


def test_nothing_follows_a_match():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("one STOP two") == ("one ", "STOP")
    assert matcher.push(" three") == ("", "STOP")
    assert matcher.flush() == ""


def test_the_stop_string_can_be_included():
    assert StopMatcher(["\n\n"], include_stop=True).push("a\n\nb") == ("a\n\n", "\n\n")


def test_a_stop_string_that_never_completes_is_shown_at_the_end():
    matcher = StopMatcher(["</end>"])
    assert matcher.push("text</en") == ("text", None)
    assert matcher.flush() == "</en"


def test_without_stop_strings_text_passes():
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="must not be empty") as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
