"""A thin OpenAI-compatible server around OpenVINO GenAI's ContinuousBatchingPipeline, for the comparison only.

Runs in the peer's own environment. One thread adds requests and steps the pipeline; after each step it hands all new
tokens to the event loop at once. Text is coded by the checkpoint's tokenizer.json, which costs next to nothing.
Known: /health, /v1/models, and /v1/completions with prompt, max_tokens, stream, ignore_eos, echo and logprobs; greedy.

    .peers/openvino/bin/python benchmarks/peers/openvino_server.py FOLDER --port 8000
"""

import argparse
import asyncio
import codecs
import json
import queue
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer


def byte_table(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token of a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in printable)}
    table = []
    for i in range(tokenizer.get_vocab_size()):
        text = tokenizer.id_to_token(i) or ""
        known = all(letter in letters for letter in text)
        table.append(bytes(letters[letter] for letter in text) if known else text.encode())
    return table


class Engine:
    """The pipeline and its thread. `submit` is called on the event loop; results come back on it."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.cache_size = arguments.cache_gib
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": arguments.threads} if arguments.threads else {}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._arrived: queue.SimpleQueue[tuple[list[int], Any, asyncio.Queue[Any]]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, ids: list[int], config: Any) -> asyncio.Queue[Any]:
        """A queue of (new token ids, their logprobs, whether it was the last)."""
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._arrived.put((ids, config, answers))
        return answers

    def _run(self) -> None:
        live: dict[int, tuple[Any, asyncio.Queue[Any]]] = {}
        number = 0
        while True:
            while not live or not self._arrived.empty():
                ids, config, answers = self._arrived.get()
                tensor = openvino.Tensor(np.array([ids], np.int64))
                live[number] = (self._pipeline.add_request(number, tensor, config), answers)
                number += 1
            self._pipeline.step()
            found = []
            for key, (handle, answers) in list(live.items()):
                ids, logprobs = [], []
                while handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
                        logprobs += output.generated_log_probs
                ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if ids or ended:
                    found.append((answers, (ids, logprobs, ended)))
                if ended:
                    del live[key]
            if found:
                self._loop.call_soon_threadsafe(_deliver, found)


def _deliver(found: list[tuple[asyncio.Queue[Any], Any]]) -> None:
    for answers, item in found:
        answers.put_nowait(item)


class Service:
    """The HTTP side."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._name = str(folder)
        self._engine = engine
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._bytes = byte_table(self._tokenizer)
        self._eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def completions(self, request: Request) -> Any:
        body = await request.json()
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self._tokenizer.encode(prompt).ids
        answers = self._engine.submit(ids, self._config(body))
        if body.get("stream"):
            return StreamingResponse(self._frames(answers, len(ids)), media_type="text/event-stream")
        found, logprobs, ended = [], [], False
        while not ended:
            new, scores, ended = await answers.get()
            found += new
            logprobs += scores
        text = b"".join(self._bytes[i] for i in found).decode(errors="replace")
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": {"token_logprobs": logprobs}}
        return JSONResponse({"object": "text_completion", "model": self._name, "choices": [choice]})

    def _config(self, body: dict[str, Any]) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.eos_token_id = self._eos[0] if isinstance(self._eos, list) else self._eos
        config.echo = bool(body.get("echo"))
        config.logprobs = body.get("logprobs") or 0
        return config

    async def _frames(self, answers: asyncio.Queue[Any], num_prompt: int) -> AsyncIterator[bytes]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        count, ended = 0, False
        while not ended:
            ids, _, ended = await answers.get()
            count += len(ids)
            text = decoder.decode(b"".join(self._bytes[i] for i in ids), ended)
            choice = {"index": 0, "text": text, "finish_reason": "length" if ended else None}
            yield _event({"object": "text_completion", "model": self._name, "choices": [choice]})
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}
        yield _event({"object": "text_completion", "model": self._name, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--cache-gib", type=int, default=1)
    arguments = parser.parse_args()
    engine = Engine(arguments.folder, arguments)
    service = Service(arguments.folder, engine)
    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/completions", service.completions, methods=["POST"]),
    ]

    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), port=arguments.port, log_level="warning", access_log=False)
    )

    async def serve() -> None:
        engine.start()
        await server.serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
