"""Byte-level BPE: the alphabet that writes each byte as one printable character, and BPE tokenizers built from GGUF.

The alphabet is GPT-2's: printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from headrace.base.errors import ModelFileError
from headrace.text.gguf_vocab import GGUFVocab, TokenType
from headrace.text.pretokenizers import PRETOKENIZERS, Pretokenizer

# No byte-level text can contain it: NUL is not in the alphabet.
_MISSING_BYTE = "\0missing byte\0"


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return letters


BYTE_OF_LETTER: Mapping[str, int] = _alphabet()


def letters_to_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    Characters outside the alphabet, which only hand-added tokens have, stand for their own UTF-8 bytes.
    """
    try:
        return bytes([BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def build_bpe(vocab: GGUFVocab, path: str) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer for a GGUF "gpt2" vocabulary; it adds no begin or end token.

    Some vocabularies (SmolLM's) lack a few bytes. Such a byte gets the first id after the vocabulary, for the caller
    to drop: without a token of its own it would vanish before merging and let its neighbours merge across it.

    Raises ModelFileError when the pre-tokenizer is unknown or the merges do not fit the vocabulary.
    """
    pre = PRETOKENIZERS.get(vocab.pre or "default")
    if pre is None:
        raise ModelFileError(
            path,
            "tokenizer.ggml.pre",
            f"unknown pre-tokenizer {vocab.pre!r}; guessing one would degrade answers silently. "
            f"Known: {', '.join(sorted(PRETOKENIZERS))}",
        )
    ids = {text: i for i, text in enumerate(vocab.tokens)}
    ids[_MISSING_BYTE] = len(vocab.tokens)
    merges = [merge.partition(" ")[::2] if merge[:1] != " " else _pair(merge) for merge in vocab.merges]
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole_words, unk_token=_MISSING_BYTE)
    except Exception as error:  # the library raises bare Exception; it checks that merges join and make known tokens
        raise ModelFileError(path, "tokenizer.ggml.merges", f"do not fit the vocabulary: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = byte_pretokenizer(pre)
    control = vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    shown = vocab.ids_of(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in shown])
    return tokenizer


def byte_pretokenizer(pre: Pretokenizer) -> pre_tokenizers.PreTokenizer:
    """Cuts a text and writes the pieces in the alphabet of bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    encode_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, encode_bytes])


def _pair(merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)  # from 1: a token may itself begin with a space
    return merge[:space], merge[space + 1 :]
