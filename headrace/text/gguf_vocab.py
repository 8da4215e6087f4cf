"""The vocabulary part of GGUF metadata: `tokenizer.ggml.*` keys, checked and with the format's defaults filled in.

Knows the keys and their meaning; does not read files and does not tokenise. Arrays may be lists or NumPy arrays.
Invariant: `tokens` and `scores` have one entry per token id, each id has one type, and every special id is a valid
index or None.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from headrace.base.errors import ModelFileError
from headrace.text.special import ALWAYS_SHOWN, END_OF_TURN_TEXTS

_PREFIX = "tokenizer.ggml."

# Defaults of the format for keys that older files leave out: model -> (bos, eos, unknown, separator).
_DEFAULT_IDS: dict[str, tuple[int | None, int | None, int | None, int | None]] = {
    "llama": (1, 2, 0, None),
    "gpt2": (11, 11, None, None),
    "bert": (101, None, 100, 102),
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` as GGUF numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """One vocabulary. `merges` are "left right" pairs in rank order; ids index `tokens`."""

    model: str  # "gpt2" (byte-level BPE), "llama" (SentencePiece-style) or "bert" (WordPiece)
    pre: str  # name of the pre-tokenizer; only BPE uses it
    tokens: list[str]
    ids_by_type: Mapping[int, list[int]]  # by TokenType
    scores: list[float]
    merges: list[str]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    separator_token_id: int | None
    declared_stop_ids: tuple[int, ...]  # eos, end of turn and end of message, where the file names them
    add_bos: bool | None  # None: the file does not say
    add_eos: bool
    add_space_prefix: bool
    rstrip_ids: frozenset[int]  # special tokens that swallow the whitespace after them (Phi-3)
    chat_template: str | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], path: str) -> "GGUFVocab":
        """Raises ModelFileError, naming `path` and the key, for a missing, short or unsupported entry."""
        reader = _Reader(metadata, path)
        model = reader.string("model")
        if model not in _DEFAULT_IDS:
            known = ", ".join(sorted(_DEFAULT_IDS))
            raise ModelFileError(path, _PREFIX + "model", f"unsupported tokenizer model {model!r}; supported: {known}")
        tokens = reader.strings("tokens")
        if not tokens:
            raise ModelFileError(path, _PREFIX + "tokens", "the vocabulary is empty")
        if "" in tokens:
            tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
        size = len(tokens)
        bos, eos, unknown, separator = _DEFAULT_IDS[model]
        eos = reader.token_id("eos_token_id", size, eos)
        stops = [eos, reader.token_id("eot_token_id", size, None), reader.token_id("eom_token_id", size, None)]
        types = _marked_types(tokens, list(map(int, reader.numbers("token_type", size, TokenType.NORMAL))))
        ids_by_type: defaultdict[int, list[int]] = defaultdict(list)
        for i, kind in enumerate(types):
            ids_by_type[kind].append(i)
        template = metadata.get("tokenizer.chat_template")
        return cls(
            model=model,
            pre=str(metadata.get(_PREFIX + "pre", "") or ""),
            tokens=tokens,
            ids_by_type=ids_by_type,
            scores=reader.numbers("scores", size, 0.0),
            merges=reader.strings("merges") if model == "gpt2" else [],
            bos_token_id=reader.token_id("cls_token_id" if model == "bert" else "bos_token_id", size, bos),
            eos_token_id=eos,
            unknown_token_id=reader.token_id("unknown_token_id", size, unknown),
            # The format spells this key wrong; newer files may spell it right.
            separator_token_id=reader.token_id(
                "seperator_token_id", size, reader.token_id("separator_token_id", size, separator)
            ),
            declared_stop_ids=tuple(i for i in stops if i is not None),
            add_bos=reader.flag("add_bos_token", None),
            add_eos=bool(reader.flag("add_eos_token", False)),
            add_space_prefix=bool(reader.flag("add_space_prefix", model == "llama")),
            rstrip_ids=_rstrip_ids(str(metadata.get("general.name", "")), tokens, ids_by_type),
            chat_template=str(template) if template else None,
        )

    def ids_of(self, *types: TokenType) -> dict[str, int]:
        """Text -> id of every token of these types."""
        ids = sorted(i for kind in types for i in self.ids_by_type.get(kind, ()))
        return dict(zip(map(self.tokens.__getitem__, ids), ids, strict=True))


def _marked_types(tokens: list[str], types: list[int]) -> list[int]:
    """Corrects files whose end-of-turn tokens are marked as ordinary text, as the format's reference reader does."""
    marked = {*ALWAYS_SHOWN, *END_OF_TURN_TEXTS}
    for i, text in enumerate(tokens):
        if text not in marked:
            continue
        if text in ALWAYS_SHOWN:
            types[i] = TokenType.USER_DEFINED
        elif text in END_OF_TURN_TEXTS and types[i] == TokenType.NORMAL and text.startswith(("<|", "<\uff5c")):
            types[i] = TokenType.CONTROL
    return types


def _rstrip_ids(name: str, tokens: list[str], ids_by_type: Mapping[int, list[int]]) -> frozenset[int]:
    """Phi-3's special tokens strip to the right. GGUF has no key for it: its reference reader goes by the name."""
    if not any(marker in name.lower() for marker in ("phi-3", "phi3")):
        return frozenset()
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    special = (i for kind in kinds for i in ids_by_type.get(kind, ()))
    return frozenset(i for i in special if tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"))


class _Reader:
    """Typed access to the `tokenizer.ggml.*` keys of one file."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata = metadata
        self._path = path

    def string(self, key: str) -> str:
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, str):
            raise ModelFileError(self._path, _PREFIX + key, "is missing or not a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            raise ModelFileError(self._path, _PREFIX + key, "is missing: the file carries no usable vocabulary")
        values = list(value)
        if any(kind is not str for kind in set(map(type, values))):
            raise ModelFileError(self._path, _PREFIX + key, "is not an array of strings")
        return values

    def numbers(self, key: str, size: int, default: float) -> list[float]:
        """The first `size` numbers, or `default` for each token when the key is absent."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return [default] * size
        try:
            values = list(map(float, value))
        except (TypeError, ValueError) as error:
            raise ModelFileError(self._path, _PREFIX + key, "is not an array of numbers") from error
        if len(values) < size or not all(map(math.isfinite, values)):
            raise ModelFileError(self._path, _PREFIX + key, f"is not one finite number for each of {size} tokens")
        return values[:size]

    def token_id(self, key: str, size: int, default: int | None) -> int | None:
        """A special id. One outside the vocabulary counts as absent: published files have them."""
        value = self._metadata.get(_PREFIX + key)
        for candidate in (value, default):
            if candidate is not None and 0 <= int(candidate) < size:
                return int(candidate)
        return None

    def flag(self, key: str, default: bool | None) -> bool | None:
        value = self._metadata.get(_PREFIX + key)
        return default if value is None else bool(value)
