"""From a model folder to a running engine on the CPU backend."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from engine_harness import Watcher, ask, collect, run, running, with_params

from headrace import LLM, SamplingParams
from headrace.base.clock import SystemClock
from headrace.base.config import Config
from headrace.base.errors import ConfigError, ModelFileError
from headrace.core.events import EventKind
from headrace.engine.launch import launch
from headrace.engine.self_test import SelfTestRun

SMALL = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 32, "max_num_seqs": 4}


def test_launch_says_what_it_chose_and_runs(folder: Path) -> None:
    phases: list[str] = []
    config = Config(model=str(folder), **SMALL)
    launched = launch(config, folder, 1, SystemClock(), lambda phase, fraction: phases.append(phase))
    assert {"model", "weights", "threads", "kernels", "KV cache", "context", "step"} == set(launched.ready.summary)
    assert launched.ready.max_model_len == 256  # what the model knows
    assert launched.ready.vocab_size == 160
    assert "packing the weights" in phases
    run = SelfTestRun(launched.engine, launched.recorder, SystemClock())
    while (result := run.step()) is None:
        pass
    assert result.decode_tokens_per_s > 0
    launched.engine.scheduler.check_integrity()
    launched.engine.backend.close()


def test_errors_of_a_launch_name_their_cause(folder: Path) -> None:
    def start(**options: object) -> None:
        launch(Config(**{"model": str(folder), **SMALL, **options}), folder, 1, SystemClock(), lambda *_: None)

    with pytest.raises(ConfigError, match="which is 256"):
        start(max_model_len=300)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        start()


def test_llm_on_real_kernels_is_the_same_alone_and_together(folder: Path) -> None:
    prompts = [[7, 8, 9], list(range(10, 60)), [100]]
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=5)
    with LLM(str(folder), **SMALL) as llm:
        together = llm.generate(prompts, params, ignore_eos=True)
        assert [len(result.token_ids) for result in together] == [24] * 3
        for prompt, result in zip(prompts, together, strict=True):
            (alone,) = llm.generate(prompt, params, ignore_eos=True)
            assert alone.token_ids == result.token_ids


def test_a_killed_engine_comes_back_with_the_same_tokens(tmp_path: Path, folder: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, backend="cpu", model=str(folder), **SMALL) as engine:
            watcher = Watcher(engine)
            request = ask(engine, [5, 6, 7], max_tokens=32, temperature=0.7, seed=11)
            before = await collect(engine, request)
            os.kill(int(engine.status().details["pid"]), signal.SIGKILL)
            await watcher.until(EventKind.ENGINE_READY)
            after = await collect(engine, with_params(request))
            assert after.token_ids == before.token_ids
            streams = await asyncio.gather(*(collect(engine, with_params(request)) for _ in range(8)))
            assert {tuple(stream.token_ids) for stream in streams} == {tuple(before.token_ids)}

    run(main())
