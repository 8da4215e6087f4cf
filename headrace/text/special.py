"""Special tokens: which texts end a turn, and how a prompt is cut around tokens that are matched as whole texts.

Knows texts and ids, not tokenizers. The list of texts is a fact of the published model families.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

# A control token with one of these texts ends generation even when the file declares only one end-of-sequence id:
# chat models end turns with another token than documents, and many files declare just one of the two.
END_OF_TURN_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "[EOS]",
        "[EOT]",
        "<|im_end|>",  # ChatML: Qwen, SmolLM
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|eot|>",  # Llama 4
        "<|eom|>",
        "<|end|>",  # Phi
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",  # Command R
        "<end_of_turn>",  # Gemma
        "<turn|>",
        "<end_of_utterance>",
        "<|return|>",  # Harmony
        "<|call|>",
        "<\uff5cend▁of▁sentence\uff5c>",  # DeepSeek
    }
)

# Harmony's message structure: always shown, because a reader of the channel needs it.
ALWAYS_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


def end_of_turn_ids(control: Mapping[str, int], declared: Iterable[int]) -> tuple[int, ...]:
    """Every id that ends generation, ascending. `control`: text -> id of the control tokens; `declared`: from the file.

    Only control tokens count: "</s>" is an ordinary HTML tag in Gemma's vocabulary.
    """
    ids = {control[text] for text in END_OF_TURN_TEXTS if text in control}
    if "<|return|>" in control and "<|call|>" in control and "<|end|>" in control:
        ids.discard(control["<|end|>"])  # Harmony: ends a message inside a turn, not the turn
    return tuple(sorted(ids | set(declared)))


class SpecialSplitter:
    """Cuts a text at special tokens: leftmost first, the longest where several match.

    A dictionary look-up per candidate length replaces one regular expression with thousands of alternatives (Gemma
    has 6,000 special tokens), which would be slow to compile and to run.
    """

    def __init__(self, ids: Mapping[str, int], rstrip_ids: frozenset[int] = frozenset()) -> None:
        """`rstrip_ids`: special tokens that swallow the whitespace after them."""
        self._ids = {text: i for text, i in ids.items() if text}
        self._rstrip_ids = rstrip_ids
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("[" + "".join(re.escape(c) for c in sorted(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yields, in order, the non-empty texts between special tokens and the ids of the special tokens."""
        start = position = 0
        while self._first is not None and (candidate := self._first.search(text, position)):
            position = candidate.start()
            found = self._match_at(text, position)
            if not found:
                position += 1
                continue
            if position > start:
                yield text[start:position]
            position += len(found)
            if self._ids[found] in self._rstrip_ids:
                position = _skip_whitespace(text, position)
            yield self._ids[found]
            start = position
        if start < len(text):
            yield text[start:]

    def _match_at(self, text: str, position: int) -> str:
        for length in self._lengths[text[position]]:
            piece = text[position : position + length]
            if piece in self._ids:
                return piece
        return ""


def _skip_whitespace(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\n\v\f\r":
        position += 1
    return position
