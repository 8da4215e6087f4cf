"""What a decoding step costs outside the kernels: the engine process's own work, stage by stage.

    python benchmarks/engine_overhead.py [MODEL] [--batches 1,8,32,256] [--waiting 10,1000,100000] [--steps 60]

The real engine, scheduler, KV manager and channel run in this process; a child drains the socket as the server would.
`cpu` rows run the model. `null` rows have a backend that answers at once, so nothing but overhead is left. Every step
decodes one token of each of `batch` sequences, behind which `waiting` requests queue. Numbers are medians in
microseconds over steps; a stage holds its own time only, without the stages that it calls; `worst` is the longest time
outside the kernels.
"""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backend.base import BackendSpec
from headrace.base.clock import SystemClock
from headrace.base.config import Config, cache_dir
from headrace.core.batch import Batch, OutputFlag, StepResult
from headrace.core.request import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.generation import GenerationRequest
from headrace.engine.launch import launch
from headrace.engine.process import Channel
from headrace.engine.wire import add_message
from headrace.model.fetch import resolve_model

STAGES = ("inbox", "schedule", "build", "submit", "call", "update", "outbox", "send")
PROMPT = 16
DRAIN = """
import socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
while end.recv(1 << 18):
    pass
"""


class Stopwatch:
    """Exclusive nanoseconds of the calls it wraps, by stage, since the last `lap`."""

    def __init__(self) -> None:
        self._own: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._inner: list[int] = []

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.perf_counter_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - began
                self._own[stage] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, timed)

    def lap(self) -> dict[str, int]:
        own, self._own = self._own, dict.fromkeys(STAGES, 0)
        return own


class NullBackend:
    """Chooses token 1 for every row, at once."""

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec
        self._batch: Batch | None = None

    def submit(self, batch: Batch) -> None:
        self._batch = batch

    def collect(self) -> StepResult:
        batch, self._batch = self._batch, None
        assert batch is not None
        samples = (batch.output_flags & OutputFlag.SAMPLE) != 0
        owners = np.searchsorted(batch.cu_seqlens_q, batch.output_rows, side="right") - 1
        cu_tokens = np.zeros(batch.num_seqs + 1, np.int32)
        np.cumsum(np.bincount(owners[samples], minlength=batch.num_seqs), out=cu_tokens[1:])
        return StepResult(
            step_id=batch.step_id,
            token_ids=np.ones(int(samples.sum()), np.int32),
            cu_tokens=cu_tokens,
            num_accepted=np.zeros(batch.num_seqs, np.int32),
            logprobs=np.zeros((batch.num_rows, 1), np.float32),
            top_ids=np.empty((batch.num_rows, 0), np.int32),
            signals=np.zeros((batch.num_rows, 4), np.float32),
            status=np.zeros(batch.num_seqs, np.uint8),
            hidden=np.empty((0, 0), np.float32),
            started_ns=0,
            ended_ns=0,
            phase_ns=np.empty(0, np.int64),
        )

    def close(self) -> None:
        pass


def make_engine(backend: str, model: str, batch: int, threads: int) -> Engine:
    config = Config(
        model=model,
        backend="cpu" if backend == "cpu" else "fake",
        max_num_seqs=batch,
        max_model_len=1024,
        threads=threads,
        kv_cache_memory_bytes=2 << 30,
    )
    path = Path("fake") if backend == "null" else resolve_model(model, cache_dir(), lambda what, done, total: None)
    engine = launch(config, path, 1, SystemClock(), lambda phase, fraction: None).engine
    if backend == "null":
        engine.backend = NullBackend(engine.backend.spec)  # type: ignore[assignment]
    return engine


def fill(engine: Engine, batch: int, waiting: int, max_tokens: int) -> None:
    """`batch` requests that run and `waiting` ones behind them, which share one prompt: only their number matters."""
    chance = random.Random(0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [[chance.randrange(200) for _ in range(PROMPT)] for _ in range(batch)]
    prompts += itertools.repeat([1] * PROMPT, waiting)
    for index, prompt in enumerate(prompts):
        engine.handle(add_message(GenerationRequest(f"cmpl-{index:032}", prompt, params), index))


def watch(stopwatch: Stopwatch, engine: Engine, channel: Channel) -> None:
    stopwatch.wrap(channel, "receive", "inbox")
    stopwatch.wrap(engine.scheduler, "schedule", "schedule")
    stopwatch.wrap(engine.backend, "submit", "submit")
    stopwatch.wrap(engine.backend, "collect", "call")
    stopwatch.wrap(engine.scheduler, "update", "update")
    stopwatch.wrap(engine, "step", "outbox")
    stopwatch.wrap(channel, "send", "send")


def measure(engine: Engine, channel: Channel, batch: int, waiting: int, steps: int) -> dict[str, float]:
    """Medians per step, in microseconds: each stage, `kernels` inside `call`, `step` as a whole."""
    warm = 8
    kernels: list[int] = []
    inner_collect = engine.backend.collect

    def collect() -> StepResult:
        result = inner_collect()
        kernels.append(int(result.phase_ns.sum()))
        return result

    engine.backend.collect = collect  # type: ignore[method-assign]
    fill(engine, batch, waiting, steps + 10 * warm)
    stopwatch = Stopwatch()
    stopwatch.wrap(engine.scheduler._builder, "build", "build")
    watch(stopwatch, engine, channel)
    laps: list[dict[str, int]] = []
    scheduler = engine.scheduler
    while any(sequence.request.num_output_tokens < warm for sequence in scheduler.running) or not scheduler.running:
        channel.send(engine.step())
    kernels.clear()
    stopwatch.lap()
    for _ in range(steps):
        began = time.perf_counter_ns()
        for message in channel.receive(0):
            raise SystemExit(f"an unexpected message: {message}")
        channel.send(engine.step())
        laps.append({**stopwatch.lap(), "step": time.perf_counter_ns() - began})
    if len(scheduler.running) != batch or len(scheduler.waiting) != waiting:
        raise SystemExit("the batch did not stay whole")
    for lap, ns in zip(laps, kernels, strict=True):
        lap["kernels"] = ns
        lap["call"] -= ns
        lap["outside"] = lap["step"] - ns
    medians = {name: statistics.median(lap[name] for lap in laps) / 1e3 for name in laps[0]}
    return {**medians, "worst": max(lap["outside"] for lap in laps) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8,32,256")
    parser.add_argument("--waiting", default="10,1000,100000", help="queue lengths, measured at the --queue-batch")
    parser.add_argument("--queue-batch", type=int, default=32)
    parser.add_argument("--backends", default="null,cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    batches = [int(part) for part in given.batches.split(",") if part]
    queues = [int(part) for part in given.waiting.split(",") if part]
    columns = (*STAGES, "outside", "worst", "kernels", "step")
    print(f"{'backend':<8}{'batch':>6}{'waiting':>9}" + "".join(f"{name:>9}" for name in columns) + "  outside/step")
    own_end, child_end = socket.socketpair()
    command = [sys.executable, "-c", DRAIN, str(child_end.fileno())]
    with subprocess.Popen(command, pass_fds=(child_end.fileno(),)):
        child_end.close()
        channel = Channel(own_end)
        for backend in given.backends.split(","):
            for batch, waiting in [(batch, 0) for batch in batches] + [(given.queue_batch, count) for count in queues]:
                engine = make_engine(backend, given.model, batch, given.threads)
                medians = measure(engine, channel, batch, waiting, given.steps)
                engine.backend.close()
                numbers = "".join(f"{medians[name]:>9.0f}" for name in columns)
                share = 100 * medians["outside"] / medians["step"]
                print(f"{backend:<8}{batch:>6}{waiting:>9}{numbers}  {share:6.1f} %", flush=True)
        channel.close(0)


if __name__ == "__main__":
    main()
