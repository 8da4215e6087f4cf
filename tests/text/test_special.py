from hypothesis import given
from hypothesis import strategies as st

from headrace.text.special import SpecialSplitter, end_of_turn_ids


def naive_split(text, ids):
    """Leftmost, longest: scans every position for every token."""
    parts, start, i = [], 0, 0
    while i < len(text):
        found = max((t for t in ids if text.startswith(t, i)), key=len, default="")
        if not found:
            i += 1
            continue
        parts += ([text[start:i]] if i > start else []) + [ids[found]]
        i = start = i + len(found)
    return parts + ([text[start:]] if start < len(text) else [])


@given(st.text("<|ab>", max_size=40), st.lists(st.text("<|ab>", min_size=1, max_size=4), max_size=6, unique=True))
def test_splits_leftmost_longest(text, tokens):
    ids = {token: i for i, token in enumerate(tokens)}
    assert list(SpecialSplitter(ids).split(text)) == naive_split(text, ids)


def test_a_token_can_swallow_the_whitespace_after_it():
    splitter = SpecialSplitter({"<a>": 1, "<b>": 2}, rstrip_ids=frozenset({1}))
    assert list(splitter.split("<a> \n x<b> y<a>  ")) == [1, "x", 2, " y", 1]


def test_end_of_turn_ids_join_the_declared_and_the_known():
    control = {"<|im_start|>": 1, "<|im_end|>": 2, "<|endoftext|>": 0, "<s>": 7}
    assert end_of_turn_ids(control, [9, 2]) == (0, 2, 9)


def test_harmony_messages_end_inside_a_turn():
    control = {"<|end|>": 1, "<|return|>": 2, "<|call|>": 3}
    assert end_of_turn_ids(control, []) == (2, 3)
    assert end_of_turn_ids({"<|end|>": 1}, []) == (1,)
