"""A folder's tokenizer as GGUF's `tokenizer.*` keys: the inverse of text/gguf_vocab.py.

GGUF names a pre-tokenizer instead of spelling it out, and has scores where tokenizer.json has ranked merges. What a
name stands for is compared by what it does to a probe text, and the finished keys are read back and must give the ids
of the folder's own tokenizer: a tokenizer that GGUF cannot express is refused, never approximated.
"""

import json
import unicodedata
from array import array
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tokenizers

from headrace.base.errors import ExportError
from headrace.text.byte_level import byte_pretokenizer
from headrace.text.gguf_vocab import TokenType
from headrace.text.hf_folder import HFFolder
from headrace.text.pretokenizers import PRETOKENIZERS
from headrace.text.sentencepiece import SPACE, byte_of_piece
from headrace.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Each of the known pre-tokenizers cuts this text in its own way; a test holds that.
PROBE = (
    "Don't DON'T we'LL it\u017f I'm 1 12 123 1234 12345 3,500.75 x1y22z333 \u00bd\u00b2\u0663\u0664"
    "\n\n \t\r\n  two  three   "
    "\u3000\u3042\u30a2\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\ud55c\uad6d\uc5b4 \u0440\u0443\u0441 \u03b5\u03bb "
    "na\u00efve cafe\u0301 \u0939\u093f\u0928\u094d\u0926\u0940\u0964 \u0639\u0631\u0628\u0649\u060c camelCaseWord "
    'XMLHttp iOS\'s (foo)[bar] {a:"b"} <=> $5 `x` a+b ~~ ^^ || /path/to //\n/\n ...!?\u2026 \u00ab\u00bb \u2014 '
    "\U0001f642\u200d\u2194\ufe0f\U0001f44d\U0001f3fd _under_score #tag @me 100% \u20ac9 \r\rend \n"
)


def gguf_keys(path: Path, size: int, samples: Iterable[str] = ()) -> dict[str, Any]:
    """The `tokenizer.*` metadata of a Hugging Face folder whose model has `size` rows in its embedding.

    Raises ModelFileError for a folder without a readable tokenizer, ExportError for one that GGUF cannot express or
    that would read any of `samples` (and a probe of every kind of text) in another way.
    """
    folder = HFFolder(path)
    library = folder.load_tokenizer()
    spec = json.loads(library.to_str())
    byte_level = spec["model"]["type"] == "BPE" and not spec["model"].get("byte_fallback")
    keys = _byte_level(path, library, spec) if byte_level else _space_mark(path, spec, size)
    unknown = "" if byte_level else folder.special_texts().get("unk_token") or spec["model"].get("unk_token") or ""
    keys |= _tokens(path, library, size, unknown, byte_level)
    own = Tokenizer.from_folder(path)
    keys |= _special(path, folder, library, own, size)
    named = {key if "." in key else _PREFIX + key: value for key, value in keys.items()}
    _check(path, own, Tokenizer.from_gguf(named, path), [PROBE, *samples])
    return named


def _byte_level(path: Path, library: tokenizers.Tokenizer, spec: dict[str, Any]) -> dict[str, Any]:
    model, normalizer = spec["model"], spec.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise ExportError(f"{path}: a GGUF file cannot express the normalizer {normalizer['type']} of tokenizer.json")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ExportError(f"{path}: a GGUF file cannot express the subword marks of tokenizer.json")
    whole_words = bool(model.get("ignore_merges"))
    name = _pretokenizer_name(library, whole_words)
    if name is None:
        kind = json.dumps(spec.get("pre_tokenizer"), ensure_ascii=False)
        raise ExportError(
            f"{path}: the pre-tokenizer of tokenizer.json has no name in GGUF files that headrace knows, and a wrong "
            f"one would degrade answers silently; it is {kind:.300} (ignore_merges: {whole_words})"
        )
    return {"model": "gpt2", "pre": name, "merges": [" ".join(merge) for merge in _merges(model)]}


def _merges(model: dict[str, Any]) -> list[list[str]]:
    """Pairs in rank order. Older files join a pair with a space."""
    return [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]


def _pretokenizer_name(library: tokenizers.Tokenizer, whole_words: bool) -> str | None:
    """The first name whose pre-tokenizer cuts the probe text as this tokenizer's own does."""
    own = library.pre_tokenizer
    if own is None:
        return None
    cuts = own.pre_tokenize_str(PROBE)
    for name, known in PRETOKENIZERS.items():
        if known.whole_words == whole_words and byte_pretokenizer(known).pre_tokenize_str(PROBE) == cuts:
            return name
    return None


def _space_mark(path: Path, spec: dict[str, Any], size: int) -> dict[str, Any]:
    """SentencePiece-style BPE: the rank of the first merge that makes a piece becomes its score."""
    model = spec["model"]
    if model["type"] != "BPE":
        raise ExportError(f"{path}: a tokenizer of type {model['type']} cannot be written to a GGUF file; BPE can")
    merges = _merges(model)
    scores = array("f", [-float(len(merges))]) * size
    for rank, (left, right) in reversed(list(enumerate(merges))):
        token_id = model["vocab"][left + right]
        if token_id < size:
            scores[token_id] = -rank
    return {"model": "llama", "pre": "default", "scores": scores}


def _tokens(path: Path, library: tokenizers.Tokenizer, size: int, unknown: str, byte_level: bool) -> dict[str, Any]:
    """Texts and types of ids 0 to size - 1: readers want one for each row of the embedding."""
    texts = [f"[PAD{i}]" for i in range(size)]
    types = array("i", [TokenType.UNUSED]) * size
    added = library.get_added_tokens_decoder()
    for text, token_id in library.get_vocab(with_added_tokens=True).items():
        if token_id >= size:
            if token_id in added:
                continue  # the model has no row for it: Gemma 3's text models list an image token
            raise ExportError(f"{path}: token {token_id} of tokenizer.json has no row in an embedding of {size}")
        texts[token_id] = text
        if text == unknown:
            types[token_id] = TokenType.UNKNOWN
        elif token_id in added:
            types[token_id] = TokenType.CONTROL if added[token_id].special else TokenType.USER_DEFINED
        elif not byte_level and byte_of_piece(text) is not None:
            types[token_id] = TokenType.BYTE
        else:
            types[token_id] = TokenType.NORMAL
    return {"tokens": texts, "token_type": types}


def _special(path: Path, folder: HFFolder, library: tokenizers.Tokenizer, own: Tokenizer, size: int) -> dict[str, Any]:
    """The special ids, what frames a text, and the chat template."""
    keys: dict[str, Any] = {}
    for name, role in _NAMED.items():
        token_id = folder.token_id(library, name)
        if token_id is not None and token_id < size:
            keys[f"{role}_token_id"] = token_id
    stops = list(dict.fromkeys(folder.declared_stop_ids(library)))
    if "eos_token_id" not in keys and (ends := stops or own.eos_token_ids):
        keys["eos_token_id"] = ends[0]
    eos = keys.get("eos_token_id")
    # Readers know two more roles for ids that end a generation.
    further = [i for i in stops if i != eos]
    keys |= {f"{role}_token_id": i for role, i in zip(("eot", "eom"), further, strict=False)}
    prefix, suffix = folder.frame(library, own.bos_token_id)
    if prefix not in ((), (own.bos_token_id,)) or suffix not in ((), (eos,)):
        raise ExportError(f"{path}: a GGUF file cannot express the tokens {prefix} and {suffix} around each text")
    keys |= {"add_bos_token": bool(prefix), "add_eos_token": bool(suffix)}
    if "bos_token_id" not in keys and eos is not None:
        keys["bos_token_id"] = eos  # a reader would take id 11 for it
    first = library.encode("a", add_special_tokens=False).tokens
    keys["add_space_prefix"] = bool(first) and first[0].startswith(SPACE)
    template = folder.chat_template()
    return keys | ({"tokenizer.chat_template": template} if template else {})


def _check(path: Path, own: Tokenizer, written: Tokenizer, samples: Iterable[str]) -> None:
    """Both tokenizers must read every sample alike, and end a generation at the same tokens."""
    if own.eos_token_ids != written.eos_token_ids:
        raise ExportError(
            f"{path}: a GGUF file would end generations at {written.eos_token_ids}, the folder says {own.eos_token_ids}"
        )
    special = "".join(
        own.decode([i], skip_special_tokens=False) for i in range(written.vocab_size) if own.is_special(i)
    )
    for text in [special, *samples]:
        text = unicodedata.normalize("NFC", text)
        expected, found = own.encode(text), written.encode(text)
        if expected != found:
            at = next(i for i, (a, b) in enumerate(zip_longest(expected, found)) if a != b)
            near = own.decode(expected[max(0, at - 3) : at + 3])
            raise ExportError(f"{path}: a GGUF file cannot express this tokenizer: it would read {near!r} differently")
