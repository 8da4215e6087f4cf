"""A progress line on a terminal, or a plain line now and then where there is none."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

_WIDTH = 28
_PLAIN_SECONDS = 2.0
_DRAW_SECONDS = 0.05


class ProgressLine:
    """Shows (what, done, total) reports. Totals over 10,000 are taken for bytes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last = 0.0 if self._terminal else time.monotonic()  # what is quick needs no plain line
        self._drawn = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        pause = _DRAW_SECONDS if self._terminal else _PLAIN_SECONDS
        if now - self._last < pause and done != total:
            return
        self._last = now
        share = min(1.0, done / total) if total else 0.0
        amount = f"{done / 1e6:,.1f} / {total / 1e6:,.1f} MB" if total > 10_000 else f"{100 * share:.0f} %"
        if self._terminal:
            filled = int(share * _WIDTH)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            self._stream.write(f"\r\x1b[K{what} [{bar}] {amount}")
            self._drawn = True
        else:
            self._stream.write(f"{what}: {amount}\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


@contextmanager
def loading() -> Iterator[Callable[[str, float], None]]:
    """A line that takes (what, fraction done) while a model loads, and is gone afterwards."""
    with ProgressLine() as line:

        def report(what: str, fraction: float) -> None:
            if fraction < 1:  # the end is not worth a line: what comes next is seen anyway
                line.report(what, int(1000 * fraction), 1000)

        yield report
