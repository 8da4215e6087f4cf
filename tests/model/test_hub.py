"""Hub downloads against a fake hub: a small HTTP server behind HF_ENDPOINT, in its own process environment."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILES = {
    "toy/safe": {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"s" * 5000, "evil.py": b"1"},
    "toy/gguf": {"toy-Q8_0.gguf": b"8" * 3000, "toy-Q4_K_M.gguf": b"4" * 2000, "README.md": b""},
    "toy/none": {"README.md": b"nothing to serve"},
}
COMMIT = "0" * 40


class FakeHub(BaseHTTPRequestHandler):
    requests: list[str] = []  # noqa: RUF012  (reset per server by the fixture)

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").split("/revision/")[0]
            files = FILES.get(repo)
            if files is None:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
                return
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            info = {"id": repo, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
            return
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        if repo not in FILES:
            self.reply(404, b"{}", {}, body)
            return
        content = FILES[repo][rest.partition("/")[2]]
        etag = hashlib.sha256(content).hexdigest()
        self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[str]:
    FakeHub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_progress_counts_bytes_to_the_end(hub: str, tmp_path: Path) -> None:
    script = "from headrace.model.fetch import resolve_model; resolve_model('toy/safe', progress=print)"
    environ = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    total = len(b"{}") * 2 + 5000
    reports = [
        tuple(map(int, line.split()[-2:])) for line in done.stdout.splitlines() if line.startswith("downloading")
    ]
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)


def resolve(spec: str, endpoint: str, home: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from headrace.model.fetch import resolve_model; print(resolve_model(sys.argv[1]))"
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **extra}
    return subprocess.run(
        [sys.executable, "-c", script, spec], env=environ, capture_output=True, text=True, check=False, cwd=Path.cwd()
    )


def test_safetensors_folder_without_foreign_code(hub: str, tmp_path: Path) -> None:
    done = resolve("toy/safe", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert str(folder).startswith(str(tmp_path))


def test_gguf_repository_prefers_q4_k_m_and_honours_a_named_quant(hub: str, tmp_path: Path) -> None:
    assert Path(resolve("toy/gguf", hub, tmp_path).stdout.strip()).read_bytes() == b"4" * 2000
    assert Path(resolve("toy/gguf:Q8_0", hub, tmp_path).stdout.strip()).read_bytes() == b"8" * 3000
    missing = resolve("toy/gguf:Q2_K", hub, tmp_path)
    assert missing.returncode != 0
    assert "no GGUF file like 'Q2_K'; it has" in missing.stderr


def test_offline_uses_the_cache_and_asks_nothing(hub: str, tmp_path: Path) -> None:
    assert resolve("toy/safe", hub, tmp_path).returncode == 0
    FakeHub.requests.clear()
    assert resolve("toy/safe", hub, tmp_path, HF_HUB_OFFLINE="1").returncode == 0
    assert not FakeHub.requests
    absent = resolve("toy/gguf", hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in absent.stderr


def test_errors_name_the_cause(hub: str, tmp_path: Path) -> None:
    assert "the hub has no model toy/absent" in resolve("toy/absent", hub, tmp_path).stderr
    assert "neither GGUF files nor safetensors" in resolve("toy/none", hub, tmp_path).stderr
    assert "cannot fetch toy/safe" in resolve("toy/safe", "http://127.0.0.1:9", tmp_path / "empty").stderr
