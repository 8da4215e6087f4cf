"""One server with the real model for all tests here, asked through OpenAI's own client and, for the wire, httpx."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

sys.path.append(str(Path(__file__).parents[1] / "http"))  # how to run a server process
from asking import CONTEXT, MODEL
from server_process import PATIENCE_S, ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[ServerProcess]:
    sizes = (f"--max-model-len={CONTEXT}", "--kv-cache-memory-bytes=96M")
    flags = ("--backend=cpu", f"--served-model-name={MODEL}", *sizes, str(smollm2_gguf))
    with ServerProcess(tmp_path_factory.mktemp("server"), *flags) as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as sdk:
        yield sdk


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as raw:
        yield raw
