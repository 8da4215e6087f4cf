"""OpenAI's older logprob shape: parallel lists over tokens, with each token's place in the text."""

import codecs
from collections.abc import Sequence

import msgspec

from headrace.engine.generation import TokenInfo
from headrace.server.answers import finite
from headrace.server.service import Vocabulary


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`text_offset` counts characters from the start of `text`, the echoed prompt included."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class LegacyLogprobs:
    """Shapes the tokens of one choice, chunk after chunk: offsets run on."""

    def __init__(self, vocabulary: Vocabulary, start: int = 0) -> None:
        """`start`: place of the first token's first character; what lies before 0 counts as 0."""
        self._vocabulary = vocabulary
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")  # a token may hold half of one
        self._offset = start

    def shape(self, tokens: Sequence[TokenInfo | int]) -> CompletionLogprobs:
        """A bare id is a token without a logprob."""
        result = CompletionLogprobs([], [], [], [])
        for token in tokens:
            if isinstance(token, int):
                data, logprob, top = self._vocabulary.token_bytes(token), None, None
            else:
                data, logprob, top = token.data, finite(token.logprob), _top(token)
            result.tokens.append(_name(data))
            result.token_logprobs.append(logprob)
            result.top_logprobs.append(top)
            result.text_offset.append(max(0, self._offset))
            self._offset += len(self._characters.decode(data))
        return result


def _top(token: TokenInfo) -> dict[str, float]:
    """The likeliest tokens and always the chosen one, as OpenAI does."""
    return {_name(entry.data): finite(entry.logprob) for entry in (*token.top, token)}


def _name(data: bytes) -> str:
    """The token's text, or `bytes:\\x..` for half a character: names of different tokens must not collide."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
