"""A server from its first breath to its last: real processes, real signals."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import PATIENCE_S, ServerProcess, is_running

import headrace
from headrace.base.config import Config
from headrace.base.errors import ConfigError
from headrace.server.listen import listen, url_of
from headrace.server.run import serve

LONG = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 4000, "temperature": 0}


def get(server: ServerProcess, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data.startswith(b"{") else data.decode()
    finally:
        connection.close()


class Stream:
    """A streamed completion, read frame by frame."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        self._connection.request("POST", "/v1/completions", json.dumps(body))
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def __iter__(self) -> Iterator[str]:
        while line := self._response.readline():
            if line.strip():
                yield line.decode().strip()
        self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def eventually(is_true: Callable[[], bool]) -> None:
    """Waits for what another process does, which no event of ours can tell."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_server_says_what_it_does_from_its_first_moment_to_its_last(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(PATIENCE_S)
        with ServerProcess(tmp_path, ready=False, env={"NOTIFY_SOCKET": path}) as server:
            assert get(server, "/livez") == (200, {"status": "alive"})
            status, body = get(server, "/readyz")
            assert (status, body["status"]) in ((503, "loading"), (200, "ready"))
            server.line_with("curl")
            assert get(server, "/readyz") == (200, {"status": "ready"})
            assert systemd.recv(1000) == b"STATUS=Loading the model"
            assert systemd.recv(1000).startswith(b"READY=1")
            [entry] = (tmp_path / "cache" / "run").glob("*.json")  # what `headrace ps` reads
            assert json.loads(entry.read_text())["url"] == server.url
            engine, children = server.engine_pid, server.children()
            assert engine in children
            server.signal(signal.SIGTERM)
            assert systemd.recv(1000) == b"STOPPING=1"
            assert server.wait() == 0, server.log
            eventually(lambda: not any(is_running(pid) for pid in children))
            assert not entry.exists() and "Traceback" not in server.log


def test_what_runs_at_sigterm_is_finished(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        stream = Stream(server, {**LONG, "max_tokens": 200})
        frames = iter(stream)
        next(frames)
        server.signal(signal.SIGTERM)
        server.line_with("finishing 1 requests")
        assert get(server, "/readyz") == (503, {"status": "draining"})
        late = Stream(server, LONG)
        assert late.status == 503
        late.close()
        *_, last, done = frames
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length" and done == "data: [DONE]"
        assert server.wait() == 0, server.log
        stream.close()


def test_what_is_not_done_within_the_grace_gets_an_error_frame(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--shutdown-timeout=0.1") as server:
        stream = Stream(server, LONG)
        frames = iter(stream)
        next(frames)
        server.signal(signal.SIGTERM)
        *_, last = frames
        assert json.loads(last[6:])["error"]["type"] == "server_error"
        assert server.wait() == 0, server.log
        stream.close()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--shutdown-timeout=3600") as server:
        engine = server.engine_pid
        stream = Stream(server, LONG)
        next(iter(stream))
        server.signal(signal.SIGINT)
        server.line_with("finishing 1 requests")
        server.signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT, server.log
        eventually(lambda: not is_running(engine))
        stream.close()


def test_a_killed_engine_gives_error_frames_and_comes_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        first = server.engine_pid
        streams = [Stream(server, LONG) for _ in range(3)]
        frames = [iter(stream) for stream in streams]
        for each in frames:
            next(each)
        os.kill(first, signal.SIGKILL)
        for each in frames:
            *_, last = each
            error = json.loads(last[6:])["error"]
            assert error["code"] == "engine_died" and "SIGKILL" in error["message"]
        eventually(lambda: get(server, "/readyz")[0] == 200)
        assert server.engine_pid != first
        again = Stream(server, {**LONG, "max_tokens": 3})
        assert list(again)[-1] == "data: [DONE]"
        assert "headrace_engine_deaths_total" in get(server, "/metrics")[1]
        for stream in (*streams, again):
            stream.close()


def test_vanished_clients_leave_no_request_and_a_killed_server_leaves_no_orphan(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--max-num-seqs=4") as server:
        streams = [Stream(server, LONG) for _ in range(12)]  # four run, eight wait
        next(iter(streams[0]))
        for stream in streams:
            stream.close()

        def idle() -> bool:
            found = get(server, "/metrics")[1].splitlines()
            gauges = [line for line in found if line.startswith(("headrace_num_requests_", "headrace_kv_cache_usage"))]
            return len(gauges) == 3 and all(line.endswith(" 0.0") for line in gauges)

        eventually(idle)
        assert 'headrace_kv_cache_bytes{kv_cache_dtype="bf16"' in get(server, "/metrics")[1]
        assert list(Stream(server, {**LONG, "max_tokens": 2}))[-1] == "data: [DONE]"
        children = server.children()
        server.process.kill()
        server.wait()
        eventually(lambda: not any(is_running(pid) for pid in children))


def test_a_stop_while_loading_ends_with_status_0(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, ready=False) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.log


def test_a_download_that_goes_on_and_on_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    script = (
        "import headrace.engine.client as client, time\n"
        "from headrace.base.config import Config\n"
        "from headrace.server.run import serve\n"
        "client.find_model = lambda config, report: time.sleep(3600)\n"
        f"serve(Config(backend='fake', port=0, cache_dir={str(tmp_path)!r}))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout and "loading" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def test_a_model_that_is_not_there_ends_the_server_with_a_word(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "headrace.cli.main", "serve", "--port=0"),
            *(f"--cache-dir={tmp_path}", "no-such-model.gguf"),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1])},
    )
    assert result.returncode == 1 and "no-such-model.gguf" in result.stderr and "Traceback" not in result.stderr


def test_a_server_needs_no_numpy(smollm2_gguf: Path) -> None:
    """It would be a third of what a server imports, and as much of its memory; only the engine process computes."""
    code = (
        "import sys, headrace.server.run\n"
        "from pathlib import Path\n"
        "from headrace.base.config import Config\n"
        "from headrace.engine.model_text import ModelText\n"
        "ModelText.load(Config(), Path(sys.argv[1]))\n"
        "assert not {'numpy', 'headrace._C', 'headrace.core.scheduler'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2_gguf)], check=True, timeout=PATIENCE_S)


def test_a_port_in_use_is_an_error_that_names_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: .*--port"):
            serve(Config(backend="fake", port=port))


def test_a_command_that_fails_before_it_serves_leaves_no_process(tmp_path: Path) -> None:
    """The engine process is started before the port is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = subprocess.run(
            [sys.executable, "-m", "headrace.cli.main", "serve", f"--port={taken.getsockname()[1]}"],
            stderr=subprocess.PIPE,  # held by every process that is left: run() waits for its end
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1]), "TMPDIR": str(tmp_path)},
        )
    assert result.returncode == 2 and "is in use" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_beyond_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        listen(host, 0, has_key=False)
    with listen(host, 0, has_key=True) as listener:
        assert url_of(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9"])
def test_loopback_needs_none(host: str) -> None:
    with listen(host, 0, has_key=False) as listener:
        assert url_of(listener).startswith("http://127.")


@pytest.mark.parametrize("host", ["256.1.1.1", "8.8.8.8"])
def test_a_host_that_is_not_ours_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host|cannot listen"):
        listen(host, 0, has_key=True)
