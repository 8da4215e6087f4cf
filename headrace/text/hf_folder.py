"""A Hugging Face model folder as the source of a tokenizer: which file says what, and in which order they win.

Reads JSON and the chat template; builds no text logic of its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from headrace.base.errors import ModelFileError
from headrace.text.token_table import Alphabet

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HFFolder:
    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when a JSON file in the folder is unreadable."""
        self._path = path
        self._tokenizer_config = self._read_json("tokenizer_config.json")
        self._special_map = self._read_json("special_tokens_map.json")
        self._generation_config = self._read_json("generation_config.json")
        self._config = self._read_json("config.json")

    def load_tokenizer(self) -> tokenizers.Tokenizer:
        file = self._path / "tokenizer.json"
        if not file.is_file():
            raise ModelFileError(
                self._path,
                "tokenizer.json",
                "is missing; save the model again with a fast tokenizer, or use a GGUF file",
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelFileError(file, "tokenizer.json", f"cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def special_texts(self) -> dict[str, str]:
        """ "bos_token" -> text, for each named special token that the folder gives."""
        texts: dict[str, str] = {}
        for source in (self._special_map, self._tokenizer_config):
            texts.update({name: text for name in _NAMED if (text := _token_text(source.get(name)))})
        return texts

    def token_id(self, tokenizer: tokenizers.Tokenizer, name: str) -> int | None:
        text = self.special_texts().get(name)
        return None if text is None else tokenizer.token_to_id(text)

    def declared_stop_ids(self, tokenizer: tokenizers.Tokenizer) -> list[int]:
        """eos ids of tokenizer_config.json, generation_config.json and config.json (its text_config too) together."""
        ids: list[int] = []
        eos = self.token_id(tokenizer, "eos_token")
        if eos is not None:
            ids.append(eos)
        nested = self._config.get("text_config")
        for source in (self._generation_config, self._config, nested if isinstance(nested, dict) else {}):
            value = source.get("eos_token_id")
            ids.extend(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
        return ids

    def frame(self, tokenizer: tokenizers.Tokenizer, bos: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the folder's post-processor puts before and after a text.

        `add_bos_token` in tokenizer_config.json overrides the begin token, as it does in transformers.
        """
        framed = tokenizer.encode("a", add_special_tokens=True).ids
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        before = next(i for i in range(len(framed) + 1) if framed[i : i + len(plain)] == plain)
        prefix, suffix = tuple(framed[:before]), tuple(framed[before + len(plain) :])
        add_bos = self._tokenizer_config.get("add_bos_token")
        if add_bos is True and bos is not None and bos not in prefix:
            prefix = (bos, *prefix)
        elif add_bos is False:
            prefix = tuple(i for i in prefix if i != bos)
        return prefix, suffix

    def decoding(self, tokenizer: tokenizers.Tokenizer) -> tuple[Alphabet, bool]:
        """How tokens spell text, and whether decoding takes one leading space away."""
        if tokenizer.decoder is None:
            return Alphabet.SPACE_MARK, False
        steps = list(_steps(json.loads(tokenizer.decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds:
            return Alphabet.BYTE_LEVEL, False
        if "WordPiece" in kinds:
            return Alphabet.HASH_MARK, True
        strips = any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return Alphabet.SPACE_MARK, strips

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the template (of several, the one named "default") in tokenizer_config.json."""
        file = self._path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._tokenizer_config.get("chat_template") or self._read_json("chat_template.json").get(
            "chat_template"
        )
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self._path / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelFileError(file, name, f"is not readable JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelFileError(file, name, "is not a JSON object")
        return value


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield decoder
    for step in decoder.get("decoders", []):
        yield from _steps(step)
