"""What the handlers share: the engine behind its narrow face, the model's name, and the checks of every surface."""

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.base.config import Config, nearest
from headrace.base.errors import EngineDeadError, NotFoundError, OverloadedError, RequestError
from headrace.core.request import SamplingParams
from headrace.engine.generation import Delta, EngineStatus, GenerationRequest
from headrace.engine.messages import Gauges
from headrace.server.lifecycle import Lifecycle

_LOADING_RETRY_S = 2.0


class Vocabulary(Protocol):
    """What the surfaces ask of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


class Engine(Protocol):
    """The part of `AsyncEngine` that HTTP uses. Everything but `status` needs a ready engine."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def tokenizer(self) -> Vocabulary: ...

    def status(self) -> EngineStatus: ...

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, with every id that ends a turn as `stop_token_ids`."""
        ...

    def choose_seed(self) -> int:
        """For a request that gave none."""
        ...

    @property
    def gauges(self) -> Gauges: ...

    @property
    def kv_cache(self) -> tuple[str, int]: ...

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Admits the request before it returns: OverloadedError and ContextLengthError are raised here, so that they
        can still become a status code. Closing the iterator aborts the request, wherever it is."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """One served model."""

    engine: Engine
    lifecycle: Lifecycle
    model_name: str
    created: int  # seconds since the epoch
    keep_alive_interval: float  # seconds
    body_timeout: float  # seconds

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a model that is not served here. No name means the one that is."""
        if name is not None and name != self.model_name:
            shown = name if len(name) <= 120 else name[:120] + "..."
            message = f"The model {shown!r} is not served here{nearest(name[:120], [self.model_name])}"
            raise NotFoundError(f"{message}; see /v1/models", param="model", code="model_not_found")

    def require_ready(self) -> None:
        """Raises the 503 that tells a client why and when to come back."""
        if self.lifecycle.draining:
            raise OverloadedError("The server is shutting down", retry_after=_LOADING_RETRY_S)
        status = self.engine.status()
        if status.state == "ready":
            return
        if status.state in ("loading", "restarting"):
            what = "loading" if status.state == "loading" else "restarting after a failure"
            progress = f": {status.phase}, {status.fraction:.0%}" if status.phase else ""
            raise OverloadedError(f"The model is {what}{progress}", retry_after=_LOADING_RETRY_S)
        if status.state == "draining":
            raise OverloadedError("The server is shutting down", retry_after=_LOADING_RETRY_S)
        raise EngineDeadError(f"The engine is dead: {status.error or 'unknown cause'}", code="engine_dead")

    def output_budget(self, num_prompt_tokens: int, asked: int | None, default: int | None) -> int:
        """How many tokens may be generated. `default` None fills the context.

        Nothing is ever cut to fit: what was asked for stands, and a prompt that leaves no room still asks for one
        token, so that the engine's own check refuses both with the numbers.
        """
        if asked is not None:
            return asked
        room = max(1, self.engine.max_model_len - num_prompt_tokens)
        return room if default is None else min(default, room)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        size = self.engine.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                message = f"{param}: {token_id} is not a token of this model, whose vocabulary has {size}"
                raise RequestError(message, param=param, code="invalid_value")


def served_name(config: Config) -> str:
    """The model's name in the API: the configured one, else the file's or folder's own, else as it was asked for."""
    if config.served_model_name:
        return config.served_model_name
    if config.backend == "fake":
        return config.backend  # nothing of the configured model is loaded
    path = Path(config.model)
    if path.suffix == ".gguf" or path.is_absolute() or path.exists():
        return path.stem if path.suffix == ".gguf" else path.resolve().name
    return config.model


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
