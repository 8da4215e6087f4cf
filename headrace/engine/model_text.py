"""ModelText: the side of a model that deals in text. Its tokenizer, its chat template, its sampling defaults.

Lives beside the HTTP server, not in the engine process. Tokenising a long text happens on one helper thread; a short
one takes less time than the way there. Knows no requests.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.config import Config
from headrace.base.errors import RequestError
from headrace.core.limits import LIMITS
from headrace.core.request import SamplingParams
from headrace.model.catalog import find
from headrace.model.checkpoint import open_checkpoint
from headrace.model.gguf_config import SAMPLING_KEYS
from headrace.text.chat_template import ChatTemplate, template_from_option
from headrace.text.tokenizer import Tokenizer

_INLINE_CHARS = 256  # up to here tokenising is done in place
# Stands for the end of a message that is to be continued; no template writes it by itself.
_CONTINUE_MARK = "\ufdd0headrace-continue\ufdd1"
_RESERVED = frozenset({"self", "messages", "add_generation_prompt"})


class ModelText:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, defaults: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._template = template
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, config: Config, path: Path) -> "ModelText":
        """Reads what the model at `path` says about text. Raises ModelFileError or ConfigError.

        The chat template's worker process is started by `start`, not here.
        """
        if config.backend == "fake":
            from headrace.engine.fake_model import fake_tokenizer

            tokenizer = fake_tokenizer()
            return cls._of(config, tokenizer, SamplingParams(stop_token_ids=tokenizer.eos_token_ids))
        checkpoint = open_checkpoint(path)
        try:
            if checkpoint.format == "gguf":
                tokenizer = Tokenizer.from_gguf(checkpoint.metadata, path)
            else:
                tokenizer = Tokenizer.from_folder(path)
            declared = (
                declared_sampling(config.model, checkpoint.metadata) if config.generation_config == "auto" else {}
            )
            defaults = sampling_defaults(declared)
            end_ids = sorted({*tokenizer.eos_token_ids, *checkpoint.config.eos_token_ids})
        finally:
            checkpoint.close()
        return cls._of(config, tokenizer, replace(defaults, stop_token_ids=tuple(end_ids)))

    @classmethod
    def _of(cls, config: Config, tokenizer: Tokenizer, defaults: SamplingParams) -> "ModelText":
        own = template_from_option(config.chat_template) if config.chat_template else tokenizer.chat_template
        return cls(tokenizer, ChatTemplate(own, tokenizer.template_variables), defaults)

    def start(self) -> None:
        self._template.start()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the model's chat template writes it, which includes its begin token.

        `continue_final_message` leaves the last message open, so that the model goes on with it.
        """
        kwargs = checked_kwargs(template_kwargs)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("add_generation_prompt and continue_final_message exclude each other")
            messages = _marked(messages)
        text = await self._template.render(messages, add_generation_prompt, **kwargs)
        return await self.encode(_cut(text) if continue_final_message else text, add_special_tokens=False)

    def encode_chat_sync(self, messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any]) -> list[int]:
        """`encode_chat` for callers without an event loop."""
        text = self._template.render_sync(messages, True, **checked_kwargs(template_kwargs))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._template.close()


def declared_sampling(model: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's makers recommend, in generation_config.json's names.

    From generation_config.json, else the `general.sampling.*` keys of a GGUF file, else the catalog's entry.
    """
    declared = metadata.get("generation_config")
    if declared:
        return dict(declared)
    found = {name: metadata[key] for key, name in SAMPLING_KEYS.items() if key in metadata}
    if found:
        return found
    entry = find(model)
    return dict(entry.sampling) if entry is not None else {}


def sampling_defaults(declared: Mapping[str, Any]) -> SamplingParams:
    """The sampling part of a parsed generation_config.json over neutral values; what makes no sense is passed over."""
    bounds = {
        "temperature": (0.0, LIMITS.max_temperature),
        "top_p": (1e-6, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (LIMITS.min_repetition_penalty, LIMITS.max_repetition_penalty),
    }
    values: dict[str, Any] = {}
    for name, (low, high) in bounds.items():
        value = declared.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            values[name] = float(value)
    top_k = declared.get("top_k")
    if isinstance(top_k, int) and not isinstance(top_k, bool) and 0 < top_k <= LIMITS.max_count:
        values["top_k"] = top_k
    return SamplingParams(**values)


def checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further template variables. Raises RequestError for one that would replace what the API itself gives."""
    taken = sorted(_RESERVED & set(kwargs or {}))
    if taken:
        raise RequestError(f"chat_template_kwargs must not hold {', '.join(taken)}", param="chat_template_kwargs")
    return dict(kwargs or {})


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies, with a mark at the end of the last message's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: Any = content + _CONTINUE_MARK
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and content[-1].get("text"):
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
    else:
        raise RequestError("continue_final_message needs a last message with text", param="messages")
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut(text: str) -> str:
    """The text up to the mark. Raises RequestError when the template left the last message out."""
    before, mark, _ = text.partition(_CONTINUE_MARK)
    if not mark:
        raise RequestError("this model's chat template cannot continue a message", param="continue_final_message")
    return before
