"""Tokenizers from GGUF metadata: what the keys mean, and errors that name the key."""

import numpy as np
import pytest
import vocabs

from headrace.base.errors import ModelFileError
from headrace.text.tokenizer import Tokenizer


def spm(**changes):
    """A minimal SentencePiece-style vocabulary: <unk> <s> </s> a ▁ ▁a."""
    values = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "a", "▁", "▁a"],
        "token_type": [2, 3, 3, 1, 1, 1],
        "scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def bpe(**changes):
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<|end|>", "a", "b", "ab"],
        "token_type": [3, 1, 1, 1],
        "merges": ["a b"],
        "eos_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_published_vocabularies_declare_their_special_tokens():
    gpt2, spm_tokenizer, smollm2 = (vocabs.tokenizer(name) for name in ("gpt-2", "llama-spm", "smollm2"))
    assert (gpt2.bos_token_id, gpt2.eos_token_ids, gpt2.add_bos) == (50256, (50256,), False)
    assert (spm_tokenizer.bos_token_id, spm_tokenizer.eos_token_ids, spm_tokenizer.add_bos) == (1, (2,), True)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.add_bos) == (1, (0, 2), False)
    assert vocabs.tokenizer("gemma3").eos_token_ids == (1, 106)  # <eos> and <end_of_turn>
    assert vocabs.tokenizer("phi-3").eos_token_ids == (32000, 32007)  # <|endoftext|> and <|end|>


def test_an_html_tag_is_no_end_of_turn():
    gemma = vocabs.metadata("gemma3")
    tag = gemma["tokenizer.ggml.tokens"].index("<s>")
    assert not vocabs.tokenizer("gemma3").is_special(tag)


def test_chat_template_and_its_variables_come_along():
    tokenizer = vocabs.tokenizer("smollm2")
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.template_variables["bos_token"] == "<|im_start|>"
    assert tokenizer.template_variables["eos_token"] == "<|im_end|>"
    assert vocabs.tokenizer("gemma3").chat_template is None


def test_space_prefix_begin_and_end_tokens():
    tokenizer = Tokenizer.from_gguf(spm())
    assert tokenizer.encode("a") == [1, 5]
    assert tokenizer.encode("a", add_special_tokens=False) == [5]
    assert tokenizer.encode("") == [1]
    assert Tokenizer.from_gguf(spm(add_space_prefix=False)).encode("a") == [1, 3]
    assert Tokenizer.from_gguf(spm(add_bos_token=False, add_eos_token=True)).encode("a") == [5, 2]


def test_special_tokens_are_parsed_only_when_asked():
    tokenizer = Tokenizer.from_gguf(spm())
    assert tokenizer.encode("a</s>a", add_special_tokens=False) == [5, 2, 5]
    assert 2 not in tokenizer.encode("a</s>a", add_special_tokens=False, parse_special=False)
    smollm2 = vocabs.tokenizer("smollm2")
    assert smollm2.encode("<|im_end|>") == [2]
    assert 2 not in smollm2.encode("<|im_end|>", parse_special=False)
    assert smollm2.decode(smollm2.encode("<|im_end|>", parse_special=False)) == "<|im_end|>"


def test_no_text_merges_into_a_control_token():
    pieces = ["<unk>", "<s>", "</s>", "<", "s", ">", "s>"]
    tokenizer = Tokenizer.from_gguf(
        spm(tokens=pieces, token_type=[2, 3, 3, 1, 1, 1, 1], scores=[0.0] * 7, add_space_prefix=False)
    )
    assert tokenizer.encode("<s>", add_special_tokens=False, parse_special=False) == [3, 6]


def test_user_defined_tokens_match_even_when_control_tokens_do_not():
    tokenizer = Tokenizer.from_gguf(
        spm(token_type=[2, 3, 3, 1, 1, 4], add_space_prefix=False, tokens=["<unk>", "<s>", "</s>", "a", "▁", "aa"])
    )
    assert tokenizer.encode("aaa", add_special_tokens=False, parse_special=False) == [5, 3]


def test_end_tokens_marked_as_text_are_control_tokens():
    tokenizer = Tokenizer.from_gguf(bpe(tokens=["<|im_end|>", "a", "b", "ab"], token_type=[1, 1, 1, 1], eos_token_id=3))
    assert tokenizer.is_special(0)
    assert tokenizer.eos_token_ids == (0, 3)


def test_numbers_may_be_numpy_arrays_or_lists():
    arrays = spm(token_type=np.array([2, 3, 3, 1, 1, 1], np.int32), scores=np.array([0, 0, 0, -2, -3, -1], np.float32))
    assert Tokenizer.from_gguf(arrays).encode("aa") == Tokenizer.from_gguf(spm()).encode("aa")


def test_special_ids_outside_the_vocabulary_count_as_absent():
    tokenizer = Tokenizer.from_gguf(bpe(bos_token_id=99, eos_token_id=2))
    assert tokenizer.bos_token_id is None
    assert not tokenizer.add_bos


@pytest.mark.parametrize(
    ("metadata", "field", "problem"),
    [
        ({}, "tokenizer.ggml.model", "missing"),
        (spm(model="rwkv"), "tokenizer.ggml.model", "unsupported tokenizer model 'rwkv'"),
        (spm(tokens=None), "tokenizer.ggml.tokens", "missing"),
        (spm(tokens=[]), "tokenizer.ggml.tokens", "empty"),
        (spm(tokens=[1, 2]), "tokenizer.ggml.tokens", "not an array of strings"),
        (spm(scores=[0.0]), "tokenizer.ggml.scores", "each of 6 tokens"),
        (spm(scores=[0.0] * 5 + [float("nan")]), "tokenizer.ggml.scores", "finite"),
        (spm(token_type=["x"] * 6), "tokenizer.ggml.token_type", "not an array of numbers"),
        (bpe(pre="nobody-knows"), "tokenizer.ggml.pre", "unknown pre-tokenizer 'nobody-knows'"),
        (bpe(merges=None), "tokenizer.ggml.merges", "missing"),
        (bpe(merges=["a z"]), "tokenizer.ggml.merges", "do not fit"),
        (bpe(merges=["ab"]), "tokenizer.ggml.merges", "do not fit"),
        (bpe(merges=["b a"]), "tokenizer.ggml.merges", "do not fit"),
    ],
)
def test_a_bad_file_is_named_with_its_field(metadata, field, problem):
    with pytest.raises(ModelFileError, match=problem) as caught:
        Tokenizer.from_gguf(metadata, "some.gguf")
    assert (caught.value.path, caught.value.field) == ("some.gguf", field)
