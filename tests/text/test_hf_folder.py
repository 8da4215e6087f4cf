"""Tokenizers from Hugging Face folders, built here with the `tokenizers` library itself, which is also the oracle."""

import json

import pytest
import tokenizers
import vocabs
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.base.errors import ModelFileError
from headrace.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level():
    """ChatML-like: byte-level BPE, no begin token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(vocabs.corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_like():
    """Llama-2-like: "▁" before the text, byte fallback, a begin token."""
    pieces = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "he", "in"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("i", "n")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def folder_with(path, tokenizer, **files):
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_ids_and_text_are_those_of_the_library(tmp_path, make):
    library = make()
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, library))
    for text in vocabs.corpus():
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
        if not any(special in text for special in SPECIAL):
            assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_begin_token_and_leading_space(tmp_path):
    tokenizer = Tokenizer.from_folder(
        folder_with(
            tmp_path, sentencepiece_like(), tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}}
        )
    )
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False) == tokenizer.encode("the")[1:]
    assert tokenizer.token_bytes(tokenizer.encode("the")[1]) == b" the"
    assert tokenizer.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("make", "wish"), [(byte_level, True), (sentencepiece_like, False)])
def test_the_config_overrides_the_begin_token(tmp_path, make, wish):
    config = {"bos_token": "<s>", "add_bos_token": wish}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, make(), tokenizer_config=config))
    assert tokenizer.add_bos is wish
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) is wish


def test_every_end_id_of_the_folder_ends_generation(tmp_path):
    library = byte_level()
    tokenizer = Tokenizer.from_folder(
        folder_with(
            tmp_path,
            library,
            tokenizer_config={"eos_token": "<|im_end|>"},
            generation_config={"eos_token_id": [5, 6]},
            config={"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
        )
    )
    known = {library.token_to_id(text) for text in ("<|im_end|>", "</s>")}
    assert tokenizer.eos_token_ids == tuple(sorted(known | {5, 6, 7, 8}))


def test_special_and_added_tokens(tmp_path):
    library = byte_level()
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, library))
    end, tool = library.token_to_id("<|im_end|>"), library.token_to_id("<tool>")
    assert tokenizer.encode("<tool><|im_end|>") == [tool, end]
    assert tokenizer.decode([tool, end]) == "<tool>"
    plain = tokenizer.encode("<tool><|im_end|>", parse_special=False)
    assert plain[0] == tool
    assert end not in plain
    assert tokenizer.decode(plain) == "<tool><|im_end|>"


def test_the_chat_template_file_wins(tmp_path):
    folder = folder_with(tmp_path, byte_level(), tokenizer_config={"chat_template": "from config"})
    assert Tokenizer.from_folder(folder).chat_template == "from config"
    (folder / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "from file é"


def test_of_several_chat_templates_the_default_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = folder_with(tmp_path, byte_level(), tokenizer_config={"chat_template": several})
    assert Tokenizer.from_folder(folder).chat_template == "plain"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("one two three four five six")) == "one two three four five six"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not readable JSON"),
        ("config.json", "[]", "not a JSON object"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, problem):
    folder = folder_with(tmp_path, byte_level())
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=problem) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.field == name
