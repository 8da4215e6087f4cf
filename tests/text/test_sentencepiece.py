"""The merge loop against the rule it implements, written out naively, on vocabularies full of ties."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.sentencepiece import SPACE, SentencePieceEncoder, byte_of_piece

LETTERS = "abé"
texts = st.text(LETTERS + " ", max_size=24)
pieces = st.dictionaries(
    st.text(LETTERS + SPACE, min_size=1, max_size=5), st.integers(-3, 0).map(float), min_size=1, max_size=25
)


def naive(text, scores, byte_ids, ids):
    """Joins the best-scored adjacent pair, leftmost on a tie, over the whole text at once."""
    symbols = list(text.replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [byte_ids[byte] for byte in symbol.encode()]
    return result


def build(scores):
    """Bytes are ids 0 to 255, pieces follow in order."""
    ids = {text: 256 + i for i, text in enumerate(scores)}
    byte_ids = {byte: byte for byte in range(256)}
    return SentencePieceEncoder(ids, [0.0] * 256 + list(scores.values()), byte_ids, None), ids, byte_ids


@given(pieces, st.lists(texts, min_size=1, max_size=4))
def test_merging_follows_the_rule(scores, cases):
    encoder, ids, byte_ids = build(scores)
    for text in cases * 2:  # the second time from the cache
        assert encoder.encode(text) == naive(text, scores, byte_ids, ids)


def test_equal_scores_are_joined_from_the_left():
    encoder, ids, _ = build({"a": 0.0, "aa": -1.0, "aaa": -1.0})
    assert encoder.encode("aaaa") == [ids["aaa"], ids["a"]]


def test_a_piece_may_span_a_space():
    encoder, ids, _ = build({"a": -5.0, SPACE: -5.0, "a" + SPACE: -1.0, f"a{SPACE}a": -0.5})
    assert encoder.encode("a a") == [ids[f"a{SPACE}a"]]


def test_characters_without_a_piece_become_bytes():
    encoder, ids, _ = build({"a": 0.0})
    assert encoder.encode("aé") == [ids["a"], 0xC3, 0xA9]


def test_without_byte_tokens_characters_become_the_unknown_token():
    encoder = SentencePieceEncoder({"a": 1}, [0.0, 0.0], {}, unknown_id=0)
    assert encoder.encode("ab") == [1, 0]
    assert SentencePieceEncoder({"a": 1}, [0.0, 0.0], {}, unknown_id=None).encode("ab") == [1]


def test_byte_pieces():
    assert byte_of_piece("<0x0A>") == 10
    assert byte_of_piece("<0xFF>x") is None
    assert byte_of_piece("<0xG0>") is None
