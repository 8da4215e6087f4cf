"""SelfTest: how fast this model runs on this machine, measured on idle time and remembered.

    warm-up  16 tokens of prompt, 1 answer token       finds how long the real measurement may be
    prefill  as many prompt tokens as take about 0.4 s
    decode   up to 32 answer tokens, one sequence

It runs through the engine like any request, a step at a time, so real work can come between any two steps; then it is
given up until the engine is idle again. Its events are taken back: it is nobody's traffic. Steps, and with them real
work that arrives during one, take at most as long as the warm-up showed to be harmless.
"""

import json
import random
from pathlib import Path

from headrace.base.clock import Clock
from headrace.core.events import EventRecorder
from headrace.engine.engine import Engine
from headrace.engine.messages import Abort, Add, Sampling, SelfTest

REQUEST_ID = "self-test"
_WARM_TOKENS = 16
_PREFILL_NS = 400_000_000
_DECODE_TOKENS = 32


class SelfTestRun:
    """One attempt. Call `step` while nothing else is there to do; `cancel` before real work is handled."""

    def __init__(self, engine: Engine, recorder: EventRecorder, clock: Clock) -> None:
        """`recorder` is the one that the engine's scheduler writes to."""
        self._engine = engine
        self._recorder = recorder
        self._longest = engine.scheduler.max_model_len - _DECODE_TOKENS - 1
        self._vocab_size = engine.backend.spec.vocab_size
        self._clock = clock
        self._random = random.Random(0)
        self._started_ns = clock.now_ns()
        self._first_token_ns = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._is_warm = False
        self.is_possible = self._longest >= _WARM_TOKENS
        if self.is_possible:
            self._begin(_WARM_TOKENS, 1)

    def step(self) -> SelfTest | None:
        """One step of the engine; the measurement when it was the last. Raises what the engine raises."""
        step = self._engine.step()
        self._recorder.take_back(step.events)
        now_ns = self._clock.now_ns()
        ended = False
        for output in step.outputs:
            if output.token_ids and not self._num_tokens:
                self._first_token_ns = now_ns
            self._num_tokens += len(output.token_ids)
            ended = ended or output.finish_reason is not None
        if not ended:
            return None
        if not self._is_warm:
            self._is_warm = True
            token_ns = max(1, (self._first_token_ns - self._started_ns) // _WARM_TOKENS)
            self._begin(max(_WARM_TOKENS, min(512, self._longest, _PREFILL_NS // token_ns)), _DECODE_TOKENS)
            return None
        return SelfTest(
            prefill_tokens_per_s=1e9 * self._num_prompt_tokens / max(1, self._first_token_ns - self._started_ns),
            decode_tokens_per_s=1e9 * (self._num_tokens - 1) / max(1, now_ns - self._first_token_ns),
        )

    def cancel(self) -> None:
        self._engine.handle(Abort(REQUEST_ID))
        self._recorder.take_back(self._engine.scheduler.drain().events)

    def _begin(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        sampling = Sampling(
            max_tokens=max_tokens,
            min_tokens=0,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=[],
            seed=0,
            stop_token_ids=[],
            logprobs=None,
            prompt_logprobs=None,
        )
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        self._started_ns = self._clock.now_ns()
        self._engine.handle(Add(REQUEST_ID, prompt, sampling, self._started_ns, cache_salt=REQUEST_ID))


def remembered(folder: Path, identity: str) -> SelfTest | None:
    """What was measured before for this model on this machine, or None. A damaged file counts as none."""
    try:
        entry = json.loads((folder / "self-test.json").read_text())[identity]
        return SelfTest(float(entry["prefill_tokens_per_s"]), float(entry["decode_tokens_per_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(folder: Path, identity: str, result: SelfTest) -> None:
    """Best effort: a cache that cannot be written is no reason for anything to fail."""
    path = folder / "self-test.json"
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, dict):
            entries = {}
    except (OSError, ValueError):
        entries = {}
    entries[identity] = {
        "prefill_tokens_per_s": result.prefill_tokens_per_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(entries, indent=1))
        temporary.replace(path)
    except OSError:
        pass
