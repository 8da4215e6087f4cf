"""LLM: a model inside this Python process, without server or child process.

    from headrace import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate("Water flows", SamplingParams(max_tokens=32))[0].text)
    print(llm.chat([{"role": "user", "content": "Hello!"}])[0].text)

All prompts of a call are batched together. The engine runs on a thread of its own, so that Ctrl-C ends a call between
two steps and leaves the model usable; calls from several threads take turns.
"""

import operator
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from numbers import Integral
from types import TracebackType
from typing import Any

from headrace.base.clock import SystemClock
from headrace.base.config import Config, check_keys, load
from headrace.base.errors import RequestError, RequestFailedError
from headrace.core.request import FinishReason, SamplingParams
from headrace.engine.checks import check_generation
from headrace.engine.choice import ChoiceStream
from headrace.engine.engine import Engine
from headrace.engine.generation import Delta, GenerationRequest, TokenInfo
from headrace.engine.launch import launch
from headrace.engine.messages import Abort, Finish, Output
from headrace.engine.model_path import find_model
from headrace.engine.model_text import ModelText
from headrace.engine.wire import add_message
from headrace.text.tokenizer import Tokenizer

# Fields of Config that mean nothing without a server or an engine process.
_OF_A_SERVER = frozenset(
    {
        "host",
        "port",
        "served_model_name",
        "api_key",
        "max_waiting",
        "shutdown_timeout",
        "keep_alive_interval",
        "log_level",
        "self_test",
    }
)

Prompt = str | Sequence[int]  # a text, or its token ids
Message = dict[str, Any]

_NO_PROMPT = "a prompt is a text or a list of token ids; prompts is one or a list of them"


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One answer to one prompt."""

    text: str
    token_ids: list[int]  # the stop token included, what a stop string made waste not
    finish_reason: str  # "stop" or "length"
    stop_reason: int | str | None  # the stop token id or stop string that ended it
    logprobs: list[TokenInfo] | None  # parallel to token_ids


@dataclass(frozen=True, slots=True)
class LLMResult:
    """What one prompt gave; the short names speak of its first choice."""

    prompt_token_ids: list[int]
    choices: list[ChoiceResult]
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    prompt_logprobs: list[TokenInfo] | None  # from the second prompt token on

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenInfo] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class _Options:
    """How to answer, beside the sampling parameters."""

    stop: tuple[str, ...]
    n: int
    ignore_eos: bool


class LLM:
    def __init__(self, model: str | os.PathLike[str] = "", **overrides: Any) -> None:
        """`model` as for `headrace serve`; `overrides` are fields of Config, such as `max_model_len=2048`, except
        those of a server.

        Loads at once. Raises ConfigError, ModelNotFoundError, FetchError, ModelFileError or ModelTooLargeError.
        """
        if model:
            overrides["model"] = os.fspath(model)
        check_keys(overrides, [spec.name for spec in fields(Config) if spec.name not in _OF_A_SERVER], "LLM")
        self._config = load(Config, overrides, {}, {})
        path = find_model(self._config, _silent)
        self._text = ModelText.load(self._config, path)
        launched = launch(self._config, path, 1, SystemClock(), _silent)
        self._engine = launched.engine
        self.summary = launched.ready.summary
        self.max_model_len = launched.ready.max_model_len
        self._vocab_size = launched.ready.vocab_size
        self._next_id = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-llm")

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults."""
        return self._text.defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        ignore_eos: bool = False,
    ) -> list[LLMResult]:
        """Continues each prompt; one result per prompt, in order.

        `params`: one for all, one per prompt, or None for the model's defaults; given ones are taken as they are, their
        seed too, so the same call gives the same answers. `stop`: strings that end an answer and
        are not part of it. The model's own end-of-turn tokens end it too unless `ignore_eos`.
        Raises RequestError for a bad argument, ContextLengthError for what does not fit, RequestFailedError.
        """
        token_ids = [self._encoded(prompt) for prompt in _as_prompts(prompts)]
        return self._answer(token_ids, params, _Options(_as_stops(stop), n, ignore_eos))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        ignore_eos: bool = False,
        **template_kwargs: Any,
    ) -> list[LLMResult]:
        """Answers a conversation, or each of several. Without `params` an answer may fill the context.

        Raises RequestError where the model has no chat template or the template refuses the messages; see `generate`.
        """
        token_ids = [self._text.encode_chat_sync(chat, template_kwargs) for chat in _as_chats(messages)]
        if params is None:
            rooms = [max(1, self.max_model_len - len(prompt)) for prompt in token_ids]
            params = [replace(self._drawn(), max_tokens=room) for room in rooms]
        return self._answer(token_ids, params, _Options(_as_stops(stop), n, ignore_eos))

    def close(self) -> None:
        """Frees the model. The object is of no use afterwards."""
        self._closed = True
        self._thread.shutdown()
        self._engine.backend.close()
        self._text.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._text.tokenizer.encode(prompt)
        try:
            return [operator.index(token_id) for token_id in prompt]  # NumPy's integers too
        except TypeError as error:
            raise RequestError(_NO_PROMPT, param="prompts") from error

    def _drawn(self) -> SamplingParams:
        """The defaults with a seed: the configured one, else a fresh one per call."""
        return replace(self._text.defaults, seed=self._config.seed or secrets.randbits(63))

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if isinstance(params, SamplingParams | None):
            return [params or self._drawn() for _ in range(num_prompts)]
        if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
            raise RequestError("params is a SamplingParams, or a list of them", param="params")
        if not all(isinstance(one, SamplingParams) for one in params):
            raise RequestError("params is a SamplingParams, or a list of them", param="params")
        return list(params)

    def _answer(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: _Options,
    ) -> list[LLMResult]:
        if self._closed:
            raise RequestError("this LLM was closed")
        each = self._params_of_each(params, len(prompts))
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts were given and {len(each)} params", param="params")
        requests = [self._request(prompt, one, options) for prompt, one in zip(prompts, each, strict=True)]
        for request in requests:
            check_generation(request, self.max_model_len, self._vocab_size)
        batch = _Batch(self._engine, requests, self._text.tokenizer)
        future = self._thread.submit(batch.run)
        try:
            return future.result()
        except BaseException:
            batch.cancelled.set()
            wait([future])
            raise

    def _request(self, prompt: list[int], params: SamplingParams, options: _Options) -> GenerationRequest:
        end_ids = self._text.defaults.stop_token_ids
        if options.ignore_eos:
            stops = tuple(i for i in params.stop_token_ids if i not in end_ids)
        else:
            stops = tuple(dict.fromkeys((*params.stop_token_ids, *end_ids)))
        params = replace(params, stop_token_ids=stops)
        self._next_id += 1
        return GenerationRequest(f"llm-{self._next_id}", prompt, params, n=options.n, stop=options.stop)


class _Batch:
    """The requests of one call on their way through the engine."""

    def __init__(self, engine: Engine, requests: list[GenerationRequest], tokenizer: Tokenizer) -> None:
        self.cancelled = threading.Event()
        self._engine = engine
        self._requests = requests
        self._streams = {
            (request.request_id, choice): ChoiceStream(request, choice, tokenizer)
            for request in requests
            for choice in range(request.n)
        }
        self._deltas: dict[tuple[str, int], list[Delta]] = {key: [] for key in self._streams}

    def run(self) -> list[LLMResult]:
        """Runs steps until every choice has ended. Leaves nothing in the engine, however it ends."""
        try:
            for request in self._requests:
                self._engine.handle(add_message(request, 0))
            while self._streams and not self.cancelled.is_set():
                for output in self._engine.step().outputs:
                    self._take(output)
        finally:
            for request in self._requests:
                self._engine.handle(Abort(request.request_id))
            self._engine.step()
        return [self._result(request) for request in self._requests]

    def _take(self, output: Output) -> None:
        key = (output.request_id, output.choice)
        stream = self._streams.get(key)
        if stream is None:
            return
        if output.finish_reason == FinishReason.ERROR:
            raise RequestFailedError(output.error or "unknown cause", code="request_failed")
        delta = stream.push(output)
        if delta is None:
            return
        self._deltas[key].append(delta)
        if stream.finish_reason is not None:
            del self._streams[key]
        if stream.stop_string is not None and output.finish_reason is None:
            self._engine.handle(Finish(*key, FinishReason.STOP.value, stream.num_output_tokens))

    def _result(self, request: GenerationRequest) -> LLMResult:
        first = self._deltas[(request.request_id, 0)]
        return LLMResult(
            prompt_token_ids=request.prompt_token_ids,
            choices=[_joined(self._deltas[(request.request_id, choice)]) for choice in range(request.n)],
            num_cached_tokens=max((delta.num_cached_tokens for delta in first), default=0),
            prompt_logprobs=next((delta.prompt_logprobs for delta in first if delta.prompt_logprobs), None),
        )


def _joined(deltas: list[Delta]) -> ChoiceResult:
    last = deltas[-1]
    with_logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return ChoiceResult(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=(last.finish_reason or FinishReason.ABORT).value,
        stop_reason=last.stop_reason,
        logprobs=[info for infos in with_logprobs for info in infos] if with_logprobs else None,
    )


def _as_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, Sequence):
        raise RequestError("stop is a text, or a list of texts", param="stop")
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(_NO_PROMPT, param="prompts")
    items: list[Any] = list(prompts)
    if any(isinstance(item, bytes) or not isinstance(item, Integral | Iterable) for item in items):
        raise RequestError(_NO_PROMPT, param="prompts")
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    if any(isinstance(item, Integral) for item in items):
        raise RequestError(_NO_PROMPT, param="prompts")
    return items


def _as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    if isinstance(messages, str | Mapping):
        raise RequestError("messages is a list of messages, such as {'role': 'user', 'content': ...}", param="messages")
    if all(isinstance(item, Mapping) for item in messages):
        return [list(messages)] if messages else []  # type: ignore[arg-type]
    return [list(chat) for chat in messages]  # type: ignore[arg-type]


def _silent(phase: str, fraction: float) -> None:
    pass
