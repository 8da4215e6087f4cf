"""The engine process as a process: it dies, hangs, is started again, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from engine_harness import Watcher, ask, collect, endless, run, running, with_params

from headrace.base.config import Config
from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError, ModelTooLargeError
from headrace.core.events import EventKind
from headrace.core.request import FinishReason
from headrace.engine.child import Watch, first_job
from headrace.engine.client import AsyncEngine
from headrace.engine.spawn import Spawned
from headrace.engine.supervisor import RestartPolicy

ROOT = Path(__file__).parents[2]


def pid_of(engine: AsyncEngine) -> int:
    return int(engine.status().details["pid"])


def wait_gone(pid: int) -> None:
    """Until the process is no more. Only for processes that are not our children."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(30_000), f"process {pid} is still there"
    finally:
        os.close(descriptor)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of this test alone, so that a leftover is seen."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_kill_9_fails_streams_at_once_and_queued_requests_survive(tmp_path: Path, temporary: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, max_num_seqs=1) as engine:
            watcher = Watcher(engine)
            first = pid_of(engine)
            stream = engine.generate(endless(engine))
            await anext(stream)
            queued = [asyncio.ensure_future(collect(engine, ask(engine, "q" * i))) for i in (1, 2, 3)]
            await watcher.until(EventKind.QUEUED, at_least=4)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async with asyncio.timeout(10):  # it is event-driven; the bound only turns a hang into a failure
                    while True:
                        await anext(stream)
            assert engine.status().state == "restarting"
            assert "SIGKILL" in engine.status().error
            with pytest.raises(EngineDeadError, match="restarting"):
                engine.generate(ask(engine))
            answers = await asyncio.gather(*queued)
            assert [answer.last.num_output_tokens for answer in answers] == [16] * 3
            assert engine.status().state == "ready"
            assert pid_of(engine) != first
            assert watcher.count(EventKind.ENGINE_DIED) == 1
            assert {event.epoch for event in watcher.events if event.source == "engine"} == {1, 2}
            assert (await watcher.until_idle()).kv_blocks_used == 0
            assert list(temporary.iterdir()) == []

    run(main())


def test_a_restarted_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            watcher = Watcher(engine)
            request = ask(engine, max_tokens=64, temperature=1.0, seed=3)
            before = await collect(engine, request)
            os.kill(pid_of(engine), signal.SIGKILL)
            await watcher.until(EventKind.ENGINE_READY, at_least=1)
            after = await collect(engine, with_params(request))
            assert after.token_ids == before.token_ids

    run(main())


def test_a_request_is_resubmitted_once_only(tmp_path: Path) -> None:
    """One that kills its engine must not kill every engine after it."""

    async def main() -> None:
        async with running(tmp_path, max_num_seqs=1) as engine:
            watcher = Watcher(engine)
            busy = engine.generate(endless(engine))
            await anext(busy)
            request = ask(engine, "x" * 4000, max_tokens=1)
            queued = engine.generate(request)
            await watcher.until(EventKind.QUEUED, request.request_id)
            os.kill(pid_of(engine), signal.SIGKILL)
            await watcher.until(EventKind.ENGINE_READY)
            os.kill(pid_of(engine), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await anext(queued)

    run(main())


def test_a_hung_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, watch=Watch(silence_s=1.0)) as engine:
            watcher = Watcher(engine)
            stream = engine.generate(endless(engine))
            await anext(stream)
            os.kill(pid_of(engine), signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                while True:
                    await anext(stream)
            await watcher.until(EventKind.ENGINE_READY)
            assert (await collect(engine, ask(engine))).last.finish_reason is FinishReason.LENGTH

    run(main())


def test_a_crash_loop_ends_in_a_dead_engine_that_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        policy = RestartPolicy(max_deaths=2, first_wait_s=0.0)
        async with running(tmp_path, policy=policy) as engine:
            watcher = Watcher(engine)
            for death in (1, 2, 3):
                os.kill(pid_of(engine), signal.SIGKILL)
                await watcher.until(EventKind.ENGINE_DIED, at_least=death)
                if death < 3:
                    await watcher.until(EventKind.ENGINE_READY, at_least=death)
            status = engine.status()
            assert status.state == "dead"
            assert "died 3 times" in status.error and "SIGKILL" in status.error
            with pytest.raises(EngineDeadError):
                engine.generate(ask(engine))

    run(main())


def test_restarts_wait_longer_and_longer() -> None:
    policy = RestartPolicy(first_wait_s=1.0, longest_wait_s=5.0)
    assert [policy.wait_s(n) for n in range(1, 7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_close_leaves_no_process_and_no_file(tmp_path: Path, temporary: Path) -> None:
    async def main() -> int:
        async with running(tmp_path) as engine:
            assert list(temporary.iterdir()) == []  # the socket's path is gone as soon as both ends are connected
            return pid_of(engine)

    pid = run(main())
    assert not Path(f"/proc/{pid}").exists()
    assert list(temporary.iterdir()) == []


def test_close_while_loading(tmp_path: Path, temporary: Path) -> None:
    async def main() -> None:
        engine = AsyncEngine(Config(backend="fake", cache_dir=str(tmp_path)))
        await engine.start()
        assert engine.status().state == "loading"
        ready = asyncio.ensure_future(engine.wait_ready())
        await engine.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await ready

    run(main())
    assert list(temporary.iterdir()) == []


def test_signals_for_the_parent_do_not_end_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as engine:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(engine), number)
            assert (await collect(engine, ask(engine))).last.num_output_tokens == 16
            assert engine.status().details["epoch"] == "1"

    run(main())


PARENT = """
import asyncio, sys
from headrace.base.config import Config
from headrace.engine.client import AsyncEngine

async def main():
    engine = AsyncEngine(Config(backend="fake", self_test=False, cache_dir=sys.argv[1]))
    await engine.start()
    await engine.wait_ready()
    print(engine.status().details["pid"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_gone(child)
    assert list(folder.iterdir()) == []


def test_an_engine_process_without_a_parent_does_not_start() -> None:
    """Started by hand, or its parent died before it came up."""
    arguments = ["--socket=0", "--life=1", "--parent=1", "--backend=cpu"]
    command = [sys.executable, "-m", "headrace.engine.process", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    assert ended.returncode == 1


def test_a_process_that_was_started_ahead_is_the_first_engine(tmp_path: Path, temporary: Path) -> None:
    async def main(spawned: Spawned) -> None:
        engine = AsyncEngine(Config(backend="fake", self_test=False, cache_dir=str(tmp_path)), spawned=spawned)
        watcher = Watcher(engine)
        await engine.start()
        await engine.wait_ready()
        assert pid_of(engine) == spawned.process.pid
        os.kill(pid_of(engine), signal.SIGKILL)
        await watcher.until(EventKind.ENGINE_READY, at_least=2)
        assert pid_of(engine) != spawned.process.pid
        await engine.close()

    with Spawned("fake") as spawned:
        run(main(spawned))
    assert list(temporary.iterdir()) == []


def test_what_a_process_said_before_anybody_listened_is_heard(tmp_path: Path) -> None:
    """It was given its Job ahead, and is dead by the time its engine is made."""
    model = tmp_path / "NOT_A_MODEL.gguf"
    model.write_bytes(b"GGUF but not really")
    config = Config(model=str(model), cache_dir=str(tmp_path))

    async def main(spawned: Spawned) -> None:
        engine = AsyncEngine(config, spawned=spawned)
        await engine.start()
        with pytest.raises(ModelFileError, match=r"NOT_A_MODEL.gguf"):
            await engine.wait_ready()
        await engine.close()

    with Spawned("cpu") as spawned:
        spawned.give(first_job(config, model).line())
        os.waitid(os.P_PID, spawned.process.pid, os.WEXITED | os.WNOWAIT)
        run(main(spawned))


def test_only_the_first_job_counts(tmp_path: Path) -> None:
    async def main(spawned: Spawned) -> None:
        config = Config(backend="fake", self_test=False, cache_dir=str(tmp_path), max_model_len=512)
        spawned.give(first_job(config, Path("fake")).line())
        engine = AsyncEngine(replace(config, max_model_len=1024), spawned=spawned)
        await engine.start()
        await engine.wait_ready()
        assert engine.max_model_len == 512
        await engine.close()

    with Spawned("fake") as spawned:
        run(main(spawned))


def test_a_job_holds_no_secret() -> None:
    line = first_job(Config(api_key="SECRET", chat_template="TEMPLATE"), Path("model")).line()
    assert b"SECRET" not in line
    assert b"TEMPLATE" not in line


def test_a_process_that_was_started_ahead_and_never_used_is_ended(temporary: Path) -> None:
    with Spawned("cpu") as spawned:
        assert spawned.process.poll() is None
    assert spawned.socket.fileno() == -1
    assert spawned.process.returncode is not None
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_cache_memory_bytes": 1}, ModelTooLargeError, "too little"),
        ({"kv_cache_memory_bytes": 1 << 60}, ModelTooLargeError, "would fit"),
        ({"max_model_len": 5000}, ConfigError, "which is 4096"),
        ({"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 20}, ModelTooLargeError, "len 1024 would fit"),
        ({"chat_template": "/no/such/file"}, ConfigError, "chat-template"),
        ({"backend": "cpu", "model": "NOT_A_MODEL.gguf"}, ModelFileError, "NOT_A_MODEL.gguf"),
    ],
)
def test_what_cannot_be_loaded_is_a_typed_error(
    tmp_path: Path, options: dict[str, object], error: type[Exception], words: str
) -> None:
    async def main() -> None:
        if "model" in options:
            path = tmp_path / str(options["model"])
            path.write_bytes(b"GGUF but not really")
            options["model"] = str(path)
        engine = AsyncEngine(Config(**{"backend": "fake", "cache_dir": str(tmp_path), **options}))
        watcher = Watcher(engine)
        try:
            await engine.start()
            with pytest.raises(error, match=words):
                await engine.wait_ready()
            assert engine.status().state == "dead"
            assert words in engine.status().error
            assert watcher.count(EventKind.ENGINE_READY) == 0
        finally:
            await engine.close()

    run(main())


def test_the_self_test_is_measured_once_and_remembered(tmp_path: Path) -> None:
    async def measure() -> tuple[float, float]:
        async with running(tmp_path, self_test=True) as engine:
            watcher = Watcher(engine)
            result = await engine.wait_self_test()
            assert not [event for event in watcher.events if event.source == "engine"]  # nobody's traffic
            assert (await collect(engine, ask(engine))).last.num_output_tokens == 16
            return result.prefill_tokens_per_s, result.decode_tokens_per_s

    first = run(measure())
    assert min(first) > 0
    assert run(measure()) == first
