"""An engine for tests of the HTTP surface alone: a token is a byte, an answer is a walk through a text, nothing waits.

It keeps what it was asked and which requests are live, and it can be told to hold its breath, to fail or to be unready.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.base.errors import RequestError
from headrace.core.request import FinishReason, SamplingParams
from headrace.engine.checks import check_generation
from headrace.engine.generation import Delta, EngineStatus, GenerationRequest, TokenInfo
from headrace.engine.messages import Gauges

END = 256  # the end-of-turn token


class ByteVocabulary:
    vocab_size = 257

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = {END} if skip_special_tokens else set()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass
class FakeEngine:
    """`text` is what each choice says, after its index; `hold` is awaited before token number `hold_at`."""

    text: str = "The wheel turns; the water runs on."
    max_model_len: int = 4096
    state: EngineStatus = field(default_factory=lambda: EngineStatus("ready"))
    refuse: RequestError | None = None
    fail_at: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("the backend broke"))
    hold_at: int | None = None
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever the last live request has gone
    tokenizer: ByteVocabulary = field(default_factory=ByteVocabulary)
    requests: list[GenerationRequest] = field(default_factory=list)
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    live: set[str] = field(default_factory=set)

    def status(self) -> EngineStatus:
        return self.state

    def default_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_k=40, stop_token_ids=(END,))

    def choose_seed(self) -> int:
        return 77

    @property
    def gauges(self) -> Gauges:
        return Gauges(len(self.live), 0, len(self.live), 100)

    @property
    def kv_cache(self) -> tuple[str, int]:
        return ("bf16", 1 << 20)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.messages.append([dict(message) for message in messages])
        if messages[0]["content"] == "refuse":
            raise RequestError("The chat template refused: no such role", param="messages")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return list((text + ("assistant: " if add_generation_prompt else "")).encode("utf-8", "replace"))

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self.refuse is not None:
            raise self.refuse
        check_generation(request, self.max_model_len, self.tokenizer.vocab_size)
        self.requests.append(request)
        return self._run(request)

    async def _run(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        self.live.add(request.request_id)
        self.idle.clear()
        try:
            for choice in range(request.n):
                async for delta in self._choice(request, choice):
                    yield delta
        finally:
            self.live.discard(request.request_id)
            if not self.live:
                self.idle.set()

    async def _choice(self, request: GenerationRequest, choice: int) -> AsyncIterator[Delta]:
        params = request.params
        words = [*list(f"{choice}: {self.text}".encode()), END]
        limit = min(len(words), params.max_tokens)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and choice == 0:
            prompt_logprobs = [self._info(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:]]
        if not limit:  # a prompt that is only scored
            size = len(request.prompt_token_ids)
            yield Delta(choice, "", [], size, 0, prompt_logprobs=prompt_logprobs, finish_reason=FinishReason.LENGTH)
        for i, token_id in enumerate(words[:limit]):
            if i == self.fail_at:
                raise self.failure
            if i == self.hold_at:
                self.held.set()
                await self.hold.wait()
            await asyncio.sleep(0)
            finish = FinishReason.STOP if token_id == END else FinishReason.LENGTH if i + 1 == limit else None
            delta = Delta(
                choice=choice,
                text="" if token_id == END else chr(token_id),
                token_ids=[token_id],
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=i + 1,
                num_cached_tokens=2,
                logprobs=None if params.logprobs is None else [self._info(token_id, params.logprobs)],
                prompt_logprobs=prompt_logprobs,
                finish_reason=finish,
                stop_reason=END if token_id == END else None,
            )
            prompt_logprobs = None
            yield delta

    def _info(self, token_id: int, num_top: int) -> TokenInfo:
        data = self.tokenizer.token_bytes(token_id)
        info = TokenInfo(token_id, self.tokenizer.token_text(token_id), data, -0.5)
        others = (replace(info, token_id=(token_id + i) % 256, text="?", data=b"?", logprob=-1.0 - i) for i in range(9))
        return replace(info, top=(info, *others)[:num_top])
