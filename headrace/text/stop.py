"""Stop strings, matched on streamed text.

Each stop string runs its own Knuth-Morris-Pratt automaton over the characters, so how the text is split cannot matter
and the text held back is exactly the longest tail that may still become a stop string. Knows no tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.base.errors import RequestError


class StopResult(NamedTuple):
    """`text` is safe to show. `matched` is the stop string that ended the text, or None."""

    text: str
    matched: str | None


class StopMatcher:
    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the matched string is part of the text. Raises RequestError for an empty stop string."""
        if "" in stops:
            raise RequestError("a stop string must not be empty", param="stop")
        # Longest first: of several that end at the same character, the longest wins.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Takes more text; gives what is now certain. After a match all text is dropped."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._stops:
            return StopResult(text, None)
        known = self._held + text
        for position in range(len(self._held), len(known)):
            stop = self._advance(known[position])
            if stop is not None:
                self._matched, self._held = stop, ""
                end = position + 1 if self._include_stop else position + 1 - len(stop)
                return StopResult(known[:end], stop)
        safe = len(known) - max(self._lengths)
        self._held = known[safe:]
        return StopResult(known[:safe], None)

    def flush(self) -> str:
        """The text still held back, when no more follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Moves every automaton by one character; returns the longest stop string that it completes."""
        matched = None
        for i, stop in enumerate(self._stops):
            length = self._lengths[i]
            while length and stop[length] != char:
                length = self._fallbacks[i][length - 1]
            length += stop[length] == char
            self._lengths[i] = length
            if length == len(stop) and matched is None:
                matched = stop
        return matched


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = lengths[length - 1]
        length += stop[i] == stop[length]
        lengths[i] = length
    return lengths
