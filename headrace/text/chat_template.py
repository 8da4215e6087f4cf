"""Chat messages to prompt text, by the model's own Jinja template, rendered in a bounded process (template_worker).

One worker process per ChatTemplate, driven by one thread; it starts with `start` or the first render and again after
it had to be killed. A failing template fails its one request. Knows no tokens.

Limits: memory and CPU time are enforced by the kernel inside the worker, output size by the worker, wall time here.
"""

import asyncio
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, RequestError, RequestFailedError
from headrace.text.chat_messages import prepare_messages, takes_parts

_WORKER = Path(__file__).with_name("template_worker.py")
_LENGTH = struct.Struct("<I")
_NO_TEMPLATE = (
    "this model has no chat template: give one with --chat-template (a Jinja file or the template itself), or let it "
    "continue plain text (/v1/completions, headrace run --raw, LLM.generate)"
)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one render may use. The wall time also covers the start of the worker and a busy machine."""

    memory_bytes: int = 512 << 20
    cpu_seconds: int = 2
    output_chars: int = 8 << 20
    wall_seconds: float = 20.0


class ChatTemplate:
    def __init__(
        self,
        template: str | None,
        variables: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """`variables`: texts of special tokens ("bos_token", ...). `template` None: every render is refused."""
        self._template = template
        self._variables = dict(variables or {})
        self._keep_parts = template is not None and takes_parts(template)
        self._worker = _Worker(limits or RenderLimits())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-template")

    def start(self) -> None:
        """Starts the worker and compiles the template in the background, so that the first request finds it ready."""
        if self._template is not None:
            self._thread.submit(self._worker.render, self._template, {})

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `kwargs` are further template variables; they cannot replace the named ones.

        Raises RequestError (400) with the template's own message, when a limit is hit, or when there is no template;
        RequestFailedError (500) when something else ended the worker.
        """
        template, variables = self._prepare(messages, add_generation_prompt, tools, kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._worker.render, template, variables)

    def render_sync(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """`render` for callers without an event loop."""
        template, variables = self._prepare(messages, add_generation_prompt, tools, kwargs)
        return self._thread.submit(self._worker.render, template, variables).result()

    def close(self) -> None:
        """Ends the worker. Renders under way or waiting fail at once with RequestFailedError, and so do later ones."""
        self._worker.stop()
        self._thread.shutdown(wait=True)
        self._worker.close()

    def _prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        if self._template is None:
            raise RequestError(_NO_TEMPLATE, param="messages", code="no_chat_template")
        self._worker.check_open()
        return self._template, {
            **kwargs,
            **self._variables,
            "messages": prepare_messages(messages, self._keep_parts),
            "tools": None if not tools else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }


def template_from_option(value: str) -> str:
    """The template that --chat-template names: a file's content, or the value itself when it is a template.

    Raises ConfigError when it is neither.
    """
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {value!r}: neither a Jinja template nor a readable file: {error}"
        ) from error


class _Worker:
    """The child process and its pipes. Used from one thread at a time, except `stop` and `check_open`."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Refuses further renders and ends the one under way."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def check_open(self) -> None:
        if self._stopped:
            raise RequestFailedError("the server is shutting down")

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        request = {"template": template, "variables": variables, "now": datetime.now().isoformat()}
        try:
            frame = msgspec.msgpack.encode(request)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise RequestError(f"the chat template cannot take these messages: {error}", param="messages") from error
        self.check_open()
        deadline = time.monotonic() + self._limits.wall_seconds
        process = self._running()
        try:
            self._write(process, _LENGTH.pack(len(frame)) + frame, deadline)
            (size,) = _LENGTH.unpack(self._read(process, _LENGTH.size, deadline))
            reply = msgspec.msgpack.decode(self._read(process, size, deadline))
        except (TimeoutError, EOFError, OSError) as error:
            raise self._failure(process, error) from error
        if reply["error"]:
            raise RequestError(f"the chat template failed: {reply['error']}", param="messages")
        return str(reply["text"])

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        limits = self._limits
        arguments = [str(limits.memory_bytes), str(limits.cpu_seconds), str(limits.output_chars)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(_WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Only the way to its libraries: the server's environment holds secrets.
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        return process

    def _failure(self, process: subprocess.Popen[bytes], error: Exception) -> RequestError:
        """Ends the worker, so that the next render starts a fresh one, and says what happened.

        Raises RequestFailedError itself when the worker was stopped on purpose.
        """
        if not isinstance(error, TimeoutError):
            process.wait()  # its end of the pipe is closed: it is ending by itself
        self.close()
        self.check_open()
        if isinstance(error, TimeoutError):
            problem = f"it takes longer than {self._limits.wall_seconds:g} s"
        elif process.returncode == -signal.SIGXCPU:
            problem = f"it needs more than {self._limits.cpu_seconds} s of CPU time"
        else:
            return RequestFailedError(f"the process that renders chat templates ended ({process.returncode})")
        return RequestError(f"the chat template failed: {problem}", param="messages")

    def _write(self, process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        descriptor = _descriptor(process.stdin)
        view = memoryview(data)
        while view:
            _wait(descriptor, select.POLLOUT, deadline)
            view = view[os.write(descriptor, view[: 1 << 16]) :]

    def _read(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        descriptor = _descriptor(process.stdout)
        parts: list[bytes] = []
        while size:
            _wait(descriptor, select.POLLIN, deadline)
            part = os.read(descriptor, min(size, 1 << 16))
            if not part:
                raise EOFError("the template worker closed its pipe")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _descriptor(pipe: Any) -> int:
    return int(pipe.fileno())


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Waits until the pipe is ready; TimeoutError after the deadline (monotonic seconds)."""
    poll = select.poll()
    poll.register(descriptor, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
