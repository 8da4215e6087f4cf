"""The process that renders chat templates: a program of its own, run by `chat_template`, never imported by it.

A template is code from a stranger's model file, so it runs sandboxed, apart from the server, with limits on memory,
CPU time and output. Speaks msgpack frames (4-byte little-endian length, then the message) on stdin and stdout; ends at
end of file, which is also what the death of its parent looks like. Imports nothing of Headrace, so it starts quickly.

    python template_worker.py MAX_MEMORY_BYTES CPU_SECONDS MAX_OUTPUT_CHARS
"""

import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LENGTH = struct.Struct("<I")


class RenderRequest(msgspec.Struct):
    """An empty `variables` renders nothing: it only compiles the template ahead of its first use."""

    template: str
    variables: dict[str, Any]
    now: str  # local time of the parent, ISO 8601


class RenderReply(msgspec.Struct):
    text: str = ""
    error: str = ""  # not empty when rendering failed


class OutputLimitError(Exception):
    """The template wrote more than it may."""


class GenerationExtension(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """`tojson` as chat templates expect it: plain JSON, nothing escaped for HTML."""
    known = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


class Renderer:
    def __init__(self, max_output: int) -> None:
        self._max_output = max_output
        self._environment = make_environment()
        self._compile = lru_cache(maxsize=16)(self._environment.from_string)

    def render(self, request: RenderRequest) -> RenderReply:
        try:
            template: Template = self._compile(request.template)
            return RenderReply(text=self._text(template, request) if request.variables else "")
        except MemoryError:
            return RenderReply(error="it needs more memory than a chat template may use")
        except RecursionError:
            return RenderReply(error="it nests too deeply")
        except Exception as error:  # whatever a template can raise is the template's failure
            return RenderReply(error=str(error) or type(error).__name__)

    def _text(self, template: Template, request: RenderRequest) -> str:
        now = datetime.fromisoformat(request.now)
        written = 0
        parts: list[str] = []
        for part in template.generate({**request.variables, "strftime_now": now.strftime}):
            written += len(part)
            if written > self._max_output:
                raise OutputLimitError(f"it writes more than {self._max_output} characters")
            parts.append(part)
        return "".join(parts)


def limit_cpu(seconds: int) -> None:
    """Lets this process use that many more CPU seconds, then the kernel ends it with SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


def main(max_memory: int, cpu_seconds: int, max_output: int) -> None:
    # Ctrl-C and SIGTERM are for the server, which still renders while it drains; the end of stdin ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    decoder, encoder = msgspec.msgpack.Decoder(RenderRequest), msgspec.msgpack.Encoder()
    renderer = Renderer(max_output)
    while (frame := read_frame(stdin)) is not None:
        limit_cpu(cpu_seconds)
        reply = encoder.encode(renderer.render(decoder.decode(frame)))
        stdout.write(_LENGTH.pack(len(reply)) + reply)
        stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
