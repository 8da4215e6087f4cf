"""Token ids must be exactly those of llama.cpp, the reference for GGUF vocabularies."""

import pytest
import vocabs

from headrace.text.pretokenizers import PRETOKENIZERS

PRE_ANSWERS = vocabs.expected("pretokenizers")


def mismatches(tokenizer, answers, *, special):
    """(text, ours, theirs) of every text of the corpus that we tokenise differently."""
    pairs = zip(vocabs.corpus(), answers, strict=True)
    ours = (
        (text, tokenizer.encode(text, add_special_tokens=special, parse_special=special), ids) for text, ids in pairs
    )
    return [case for case in ours if case[1] != case[2]]


@pytest.mark.parametrize("name", vocabs.PUBLISHED)
def test_published_texts_give_the_published_ids(name):
    texts = (vocabs.DATA / f"{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (vocabs.DATA / f"{name}.gguf.out").read_text().split("\n")[: len(texts)]
    tokenizer = vocabs.tokenizer(name)
    for text, line in zip(texts, lines, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == [int(token_id) for token_id in line.split()], text


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("name", vocabs.EVERY)
def test_corpus_gives_the_ids_of_llama_cpp(name, special):
    answers = vocabs.expected(name)["special" if special else "plain"]
    assert mismatches(vocabs.tokenizer(name), answers, special=special) == []


@pytest.mark.parametrize("pre", sorted(PRE_ANSWERS))
def test_every_pretokenizer_cuts_as_llama_cpp_does(pre):
    assert mismatches(vocabs.tokenizer("gpt-2", pre), PRE_ANSWERS[pre], special=True) == []


def test_every_kind_of_pretokenizer_has_an_answer_to_compare_with():
    asked = {PRETOKENIZERS[pre].patterns for pre in PRE_ANSWERS}
    assert {pretokenizer.patterns for pretokenizer in PRETOKENIZERS.values()} == asked


def test_the_wrong_pretokenizer_is_noticed():
    assert mismatches(vocabs.tokenizer("gpt-2", "llama-bpe"), PRE_ANSWERS["smollm"], special=True)


def test_smollm_splits_digits_one_by_one():
    tokenizer = vocabs.tokenizer("smollm2")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("12345")] == ["1", "2", "3", "4", "5"]


def test_a_missing_byte_is_dropped_but_still_parts_its_neighbours():
    tokenizer = vocabs.tokenizer("smollm2")  # has no token for byte 0x04
    assert tokenizer.decode(tokenizer.encode(".\x04's")) == ".'s"
    assert tokenizer.encode(".\x04's") == [*tokenizer.encode("."), *tokenizer.encode("'"), *tokenizer.encode("s")]


def test_runs_of_gemma_spaces_and_newlines_are_matched_whole():
    tokenizer = vocabs.tokenizer("gemma3")
    assert len(tokenizer.encode("\n" * 31, add_special_tokens=False)) == 1
    assert len(tokenizer.encode(" " * 31, add_special_tokens=False)) == 1
