"""Streaming must give the text of the whole, whatever the tokenizer and wherever it is cut."""

import pytest
import vocabs
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.detokenizer import Detokenizer

# "Half" texts are cut by tokenizers in the middle of characters.
UNICODE = "한글 힣 漢字 👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 ñ नमस्ते ᏣᎳᎩ \U0001d518\U0001d52b"


def stream(detokenizer, ids):
    return [detokenizer.push(token_id) for token_id in ids]


@pytest.mark.parametrize("name", vocabs.EVERY)
def test_corpus_streams_to_its_whole_decoding(name):
    tokenizer = vocabs.tokenizer(name)
    for text in vocabs.corpus():
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        assert "".join(stream(detokenizer, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "show"])
@pytest.mark.parametrize("name", vocabs.EVERY)
def test_every_split_into_prompt_and_output_adds_up(name, skip):
    tokenizer = vocabs.tokenizer(name)
    for text in (UNICODE, "plain words", "<|im_end|>x</s>"):
        ids = tokenizer.encode(text)
        for cut in range(len(ids) + 1):
            before = "".join(stream(Detokenizer(tokenizer, skip), ids[:cut]))
            detokenizer = Detokenizer(tokenizer, skip, ids[:cut])
            after = "".join(stream(detokenizer, ids[cut:])) + detokenizer.flush()
            assert before + after == tokenizer.decode(ids, skip)


@given(st.data())
@pytest.mark.parametrize("name", vocabs.EVERY)
def test_any_ids_stream_to_their_whole_decoding(name, data):
    tokenizer = vocabs.tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip)
    assert "".join(stream(detokenizer, ids)) + detokenizer.flush() == tokenizer.decode(ids, skip)


def byte_ids(name):
    tokenizer = vocabs.tokenizer(name)
    ids = {}
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        if len(data) == 1 and not tokenizer.is_special(token_id):
            ids.setdefault(data[0], token_id)
    return ids


BYTE_IDS = {name: byte_ids(name) for name in ("gpt-2", "llama-spm")}


@given(st.binary(max_size=24))
@pytest.mark.parametrize("name", BYTE_IDS)
def test_any_bytes_are_decoded_as_utf8(name, data):
    detokenizer = Detokenizer(vocabs.tokenizer(name), prompt_token_ids=[BYTE_IDS[name][ord("x")]])
    text = "".join(stream(detokenizer, [BYTE_IDS[name][byte] for byte in data])) + detokenizer.flush()
    assert text == data.decode("utf-8", "replace")


@pytest.mark.parametrize("name", BYTE_IDS)
def test_a_character_comes_with_its_last_byte(name):
    ids = [BYTE_IDS[name][byte] for byte in "한🦙é".encode()]
    detokenizer = Detokenizer(vocabs.tokenizer(name))
    assert stream(detokenizer, ids) == ["", "", "한", "", "", "", "🦙", "", "é"]
    assert detokenizer.flush() == ""


def test_only_what_cannot_become_a_character_is_replaced():
    detokenizer = Detokenizer(vocabs.tokenizer("gpt-2"))
    ids = [BYTE_IDS["gpt-2"][byte] for byte in b"\xe2\x82x\xff"]
    assert stream(detokenizer, ids) == ["", "", "\ufffdx", "\ufffd"]
    assert detokenizer.push(BYTE_IDS["gpt-2"][0xF0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_character_that_the_prompt_began_is_completed():
    ids = [BYTE_IDS["gpt-2"][byte] for byte in "🦙".encode()]
    for cut in range(1, 4):
        assert "".join(stream(Detokenizer(vocabs.tokenizer("gpt-2"), prompt_token_ids=ids[:cut]), ids[cut:])) == "🦙"


def test_the_first_space_belongs_to_the_output_unless_no_text_came_before():
    tokenizer = vocabs.tokenizer("llama-spm")
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer, prompt_token_ids=tokenizer.encode("Say")), hello)) == " hello"
    assert "".join(stream(Detokenizer(tokenizer, prompt_token_ids=[tokenizer.bos_token_id]), hello)) == "hello"


def test_special_tokens_are_left_out_or_shown():
    tokenizer = vocabs.tokenizer("smollm2")
    ids = tokenizer.encode("a<|im_end|>b")
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "ab"
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "a<|im_end|>b"
