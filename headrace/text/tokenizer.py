"""Tokenizer: text to token ids and back, whatever file the vocabulary came from.

Decoding is defined by `token_bytes`: a text is the UTF-8 decoding of its tokens' bytes, so the incremental Detokenizer
and `decode` agree by construction. Knows no requests and no chat messages.

Invariants: all methods may be called from several threads; `encode` accepts every Python string.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.text.byte_level import build_bpe
from headrace.text.encoders import FragmentEncoder, LibraryEncoder, TextEncoder
from headrace.text.gguf_vocab import GGUFVocab, TokenType
from headrace.text.hf_folder import HFFolder
from headrace.text.pretokenizers import PRETOKENIZERS
from headrace.text.sentencepiece import SentencePieceEncoder, byte_of_piece
from headrace.text.special import SpecialSplitter, end_of_turn_ids
from headrace.text.token_table import Alphabet, TokenTable
from headrace.text.wordpiece import WordPieceEncoder

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What frames a text and what is left out of one."""

    hidden_ids: frozenset[int]  # control tokens: not part of decoded text
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # every id that ends generation, ascending
    prefix_ids: tuple[int, ...] = ()  # what `encode` puts before and after a text
    suffix_ids: tuple[int, ...] = ()
    template_variables: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> text, for chat templates


class Tokenizer:
    def __init__(
        self,
        encoder: TextEncoder,
        table: TokenTable,
        special: SpecialTokens,
        chat_template: str | None = None,
        strips_leading_space: bool = False,
    ) -> None:
        """`strips_leading_space`: encoding puts a space before a text, so decoding takes one away."""
        self._encoder = encoder
        self._table = table
        self._special = special
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json and, where present, tokenizer_config.json, generation_config.json,
        config.json and chat_template.jinja. Raises ModelFileError."""
        folder = HFFolder(Path(path))
        library = folder.load_tokenizer()
        added = library.get_added_tokens_decoder()
        hidden = {token.content: i for i, token in added.items() if token.special}
        alphabet, strips = folder.decoding(library)
        # In a vocabulary that marks spaces, user-defined runs of "▁" still mean spaces.
        literal = frozenset(hidden.values() if alphabet is Alphabet.SPACE_MARK else added)
        bos = folder.token_id(library, "bos_token")
        prefix, suffix = folder.frame(library, bos)
        special = SpecialTokens(
            hidden_ids=frozenset(hidden.values()),
            bos_token_id=bos,
            eos_token_ids=end_of_turn_ids(hidden, folder.declared_stop_ids(library)),
            prefix_ids=prefix,
            suffix_ids=suffix,
            template_variables=folder.special_texts(),
        )
        size = library.get_vocab_size(with_added_tokens=True)
        table = TokenTable(size, library.id_to_token, alphabet, literal)
        return cls(LibraryEncoder(library), table, special, folder.chat_template(), strips)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: str | Path = "GGUF metadata") -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF file. `path` is only for errors. Raises ModelFileError."""
        vocab = GGUFVocab.from_metadata(metadata, str(path))
        byte_level = vocab.model == "gpt2"
        literal = vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        table = TokenTable(
            len(vocab.tokens),
            vocab.tokens.__getitem__,
            Alphabet.BYTE_LEVEL if byte_level else Alphabet.SPACE_MARK,
            frozenset(literal.values()),
        )
        encoder = LibraryEncoder(build_bpe(vocab, str(path)), len(vocab.tokens)) if byte_level else _own_encoder(vocab)
        strips = vocab.model == "bert" or vocab.add_space_prefix
        return cls(encoder, table, _gguf_special(vocab), vocab.chat_template, strips)

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token. A model's output layer may be padded beyond it."""
        return len(self._table)

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends generation: end of sequence, end of turn, end of message."""
        return self._special.eos_token_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` with special tokens begins with the begin token."""
        return self._special.bos_token_id in self._special.prefix_ids

    @property
    def template_variables(self) -> Mapping[str, str]:
        """Texts of the named special tokens ("bos_token", "eos_token", ...), as chat templates use them."""
        return self._special.template_variables

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`, framed by begin and end tokens where the model has them.

        `parse_special` False keeps the texts of control tokens as text. Lone surrogates become U+FFFD.
        """
        if not text.isascii() and _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = self._encoder.encode(text, parse_special)
        return [*self._special.prefix_ids, *ids, *self._special.suffix_ids] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids that stand alone; bytes that are no UTF-8 become U+FFFD."""
        hidden = self._special.hidden_ids if skip_special_tokens else frozenset()
        first_text = True
        parts: list[bytes] = []
        for token_id in token_ids:
            data = b"" if token_id in hidden else self._table.bytes_of(token_id)
            if first_text and not self.is_special(token_id):
                first_text = False
                data = self.without_leading_space(data)
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, half a character where it is one; empty outside the vocabulary."""
        return self._table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text for display; what is no UTF-8 shows as U+FFFD."""
        return self._table.bytes_of(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which decoding leaves out by default."""
        return token_id in self._special.hidden_ids

    def without_leading_space(self, data: bytes) -> bytes:
        """Bytes of the first text token of a text, less the space that encoding put there."""
        return data[1:] if self.strips_leading_space and data.startswith(b" ") else data


def _own_encoder(vocab: GGUFVocab) -> FragmentEncoder:
    """SentencePiece-style and WordPiece vocabularies, which run on our own loops."""
    user_defined = vocab.ids_of(TokenType.USER_DEFINED)
    every_special = {**vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN), **user_defined}
    splitters = (
        SpecialSplitter(every_special, vocab.rstrip_ids),
        SpecialSplitter(user_defined, vocab.rstrip_ids),
    )
    if vocab.model == "bert":
        ids = {text: i for i, text in enumerate(vocab.tokens)}
        return FragmentEncoder(WordPieceEncoder(ids, vocab.unknown_token_id or 0).encode, *splitters)
    byte_tokens = vocab.ids_of(TokenType.BYTE).items()
    byte_ids = {byte: i for text, i in byte_tokens if (byte := byte_of_piece(text)) is not None}
    # Control tokens and bytes are left out of the pieces, so that no user text can merge into one.
    pieces = vocab.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)
    encoder = SentencePieceEncoder(pieces, vocab.scores, byte_ids, vocab.unknown_token_id)
    return FragmentEncoder(encoder.encode, *splitters, prefix=" " if vocab.add_space_prefix else "")


def _gguf_special(vocab: GGUFVocab) -> SpecialTokens:
    control = vocab.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    add_bos = vocab.add_bos
    if add_bos is None:
        add_bos = vocab.model != "gpt2" or PRETOKENIZERS[vocab.pre or "default"].add_bos
    suffix = vocab.separator_token_id if vocab.model == "bert" else vocab.eos_token_id if vocab.add_eos else None
    named = {
        "bos_token": vocab.bos_token_id,
        "eos_token": vocab.eos_token_id,
        "unk_token": vocab.unknown_token_id,
        "sep_token": vocab.separator_token_id,
    }
    return SpecialTokens(
        hidden_ids=frozenset(control.values()),
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=end_of_turn_ids(control, vocab.declared_stop_ids),
        prefix_ids=(vocab.bos_token_id,) if add_bos and vocab.bos_token_id is not None else (),
        suffix_ids=() if suffix is None else (suffix,),
        template_variables={name: vocab.tokens[i] for name, i in named.items() if i is not None},
    )
