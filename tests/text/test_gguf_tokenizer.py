"""Folders' tokenizers written as GGUF keys: read back they give the same ids, and what GGUF cannot say is refused."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import vocabs
from test_hf_folder import byte_level, folder_with, sentencepiece_like
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from headrace.base.errors import ExportError
from headrace.text.byte_level import byte_pretokenizer
from headrace.text.gguf_tokenizer import PROBE, gguf_keys
from headrace.text.pretokenizers import PRETOKENIZERS
from headrace.text.tokenizer import Tokenizer


def smollm2() -> tokenizers.Tokenizer:
    """SmolLM2's vocabulary as its makers' tokenizer.json has it: digits apart, then GPT-2's byte-level cuts."""
    metadata = vocabs.metadata("smollm2")
    texts = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    library.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    library.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    return library


def test_smollm2_gets_the_keys_of_its_published_gguf_file(tmp_path: Path) -> None:
    published = vocabs.metadata("smollm2")
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    config = names | {"pad_token": "<|im_end|>", "chat_template": published["tokenizer.chat_template"]}
    keys = gguf_keys(folder_with(tmp_path, smollm2(), tokenizer_config=config), 49152, vocabs.corpus())
    for key, value in published.items():
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
            assert keys[key] == list(value)
        elif key == "tokenizer.ggml.token_type":
            assert list(keys[key]) == list(value)
        elif key == "tokenizer.ggml.unknown_token_id":
            assert keys[key] == value
        elif key.startswith("tokenizer."):
            assert keys[key] == value, key


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("size", [0, 900])
def test_ids_survive(tmp_path: Path, make: Any, size: int) -> None:
    library = make()
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = folder_with(tmp_path, library, tokenizer_config=config)
    keys = gguf_keys(folder, size or library.get_vocab_size(), vocabs.corpus())
    own, written = Tokenizer.from_folder(folder), Tokenizer.from_gguf(keys)
    assert written.vocab_size == (size or own.vocab_size)
    assert (written.bos_token_id, written.add_bos) == (own.bos_token_id, own.add_bos)
    assert written.eos_token_ids == own.eos_token_ids
    assert written.strips_leading_space == own.strips_leading_space
    for text in vocabs.corpus():
        for special in (True, False):
            ids = own.encode(text, special, special)
            assert written.encode(text, special, special) == ids
        assert written.decode(ids) == own.decode(ids)
    for token_id in range(own.vocab_size):
        assert written.token_bytes(token_id) == own.token_bytes(token_id), token_id
        assert written.is_special(token_id) == own.is_special(token_id)


def test_further_ends_of_a_generation_get_the_roles_that_are_left(tmp_path: Path) -> None:
    library = byte_level()
    folder = folder_with(
        tmp_path, library, tokenizer_config={"eos_token": "</s>"}, generation_config={"eos_token_id": [70, 80]}
    )
    keys = gguf_keys(folder, library.get_vocab_size())
    roles = [keys[f"tokenizer.ggml.{role}_token_id"] for role in ("eos", "eot", "eom")]
    assert roles == [library.token_to_id("</s>"), 70, 80]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [70, 80, 90]}')
    with pytest.raises(ExportError, match="would end generations at"):
        gguf_keys(folder, library.get_vocab_size())


def test_a_token_without_a_row_is_left_out_when_it_was_added(tmp_path: Path) -> None:
    library = byte_level()
    size = library.get_vocab_size()
    library.add_special_tokens(["<image>"])
    keys = gguf_keys(folder_with(tmp_path, library), size)
    assert len(keys["tokenizer.ggml.tokens"]) == size
    with pytest.raises(ExportError, match=r"token \d+ of tokenizer.json has no row in an embedding of 300"):
        gguf_keys(tmp_path, 300)


def test_the_probe_tells_every_known_pretokenizer_apart() -> None:
    """Two pairs cut alike whatever the text: they differ in what a file without add_bos means, or in spelling alone."""
    found: dict[tuple[str, bool], set[int]] = {}
    for known in PRETOKENIZERS.values():
        cuts = str(byte_pretokenizer(known).pre_tokenize_str(PROBE))
        found.setdefault((cuts, known.whole_words), set()).add(id(known))
    alike = [{name for name, known in PRETOKENIZERS.items() if id(known) in ids} for ids in found.values()]
    shared = [names for ids, names in zip(found.values(), alike, strict=True) if len(ids) > 1]
    assert len(shared) == 2
    assert any({"llama-bpe", "glm4"} <= names for names in shared)
    assert any({"qwen2", "bailingmoe"} <= names for names in shared)


# As the makers' tokenizer.json spells them, which is not how headrace does.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("pattern", "ignore_merges", "name"),
    [
        (
            rf"{WORDS}|\p{{N}}{{1,3}}{REST}",
            True,
            "llama-bpe",
        ),
        (
            rf"{WORDS}|\p{{N}}{REST}",
            False,
            "qwen2",
        ),
    ],
)
def test_pretokenizers_are_known_by_what_they_do(tmp_path: Path, pattern: str, ignore_merges: bool, name: str) -> None:
    library = byte_level()
    library.model.ignore_merges = ignore_merges
    library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    keys = gguf_keys(folder_with(tmp_path, library), library.get_vocab_size(), vocabs.corpus())
    assert keys["tokenizer.ggml.pre"] == name


def test_a_pretokenizer_without_a_name_is_shown(tmp_path: Path) -> None:
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[aeiou]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(ExportError, match=r"no name in GGUF files that headrace knows.*\[aeiou\]"):
        gguf_keys(folder_with(tmp_path, library), library.get_vocab_size())


def lower_casing() -> tokenizers.Tokenizer:
    library = byte_level()
    library.normalizer = normalizers.Lowercase()
    return library


def framed() -> tokenizers.Tokenizer:
    library = byte_level()
    library.post_processor = processors.TemplateProcessing("</s> $A", "</s> $A $B", [("</s>", 1)])
    return library


def marked() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"a": 0, "##b": 1}, [], continuing_subword_prefix="##"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lower_casing, "the normalizer Lowercase"),
        (framed, r"the tokens \(1,\) and \(\) around each text"),
        (marked, "the subword marks"),
        (lambda: tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})), "a tokenizer of type WordPiece"),
    ],
)
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    library = make()
    with pytest.raises(ExportError, match=message):
        gguf_keys(folder_with(tmp_path, library, tokenizer_config={"bos_token": "<s>"}), library.get_vocab_size())


def test_a_tokenizer_that_reads_back_otherwise_is_refused_with_the_place(tmp_path: Path) -> None:
    """This one writes k for q, which no key says."""
    library = sentencepiece_like()
    library.normalizer = normalizers.Sequence([library.normalizer, normalizers.Replace("q", "k")])
    with pytest.raises(ExportError, match=r"would read .* differently"):
        gguf_keys(
            folder_with(tmp_path, library, tokenizer_config={"bos_token": "<s>"}),
            library.get_vocab_size(),
            ["a quick one"],
        )
