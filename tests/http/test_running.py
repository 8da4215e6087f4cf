"""The list of running servers: alive ones only."""

import os
from pathlib import Path

import msgspec

from headrace.server.running import RunningServer, registered, running


def test_a_server_is_listed_while_it_runs(tmp_path: Path) -> None:
    server = RunningServer(os.getppid(), 1.0, "http://127.0.0.1:1", "toy")
    with registered(tmp_path, server):
        assert len(list(tmp_path.glob("*.json"))) == 1
    assert not list(tmp_path.glob("*.json"))


def test_dead_servers_and_rubbish_are_swept_or_skipped(tmp_path: Path) -> None:
    dead = RunningServer(2**22 + 1, 1.0, "http://127.0.0.1:1", "toy")
    (tmp_path / "dead.json").write_bytes(msgspec.json.encode(dead))
    (tmp_path / "rubbish.json").write_bytes(b"{")
    assert running(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["rubbish.json"]
