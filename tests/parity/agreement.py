"""How closely logits agree with a golden, and the rule that decides whether that is close enough.

An argmax other than the golden's is tolerated only where the golden's two best logits lie within `margin` of each
other, and only `max_flips` times; every logit that the golden stores must lie within `tolerance`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Golden:
    """What transformers said at each greedy step: the token, and its `K` largest logits in descending order."""

    prompt: list[int]
    tokens: list[int]  # [N]
    top_ids: Array  # [N, K]
    top_logits: Array  # [N, K]
    logsumexp: Array  # [N] over the whole vocabulary: logit - logsumexp is the logprob

    @property
    def forced_ids(self) -> list[int]:
        """The sequence whose last N positions are the golden's rows."""
        return [*self.prompt, *self.tokens[:-1]]

    @property
    def rows(self) -> list[int]:
        return list(range(len(self.prompt) - 1, len(self.forced_ids)))

    @property
    def margins(self) -> Array:
        return self.top_logits[:, 0] - self.top_logits[:, 1]


@dataclass(frozen=True)
class Agreement:
    worst: float  # largest difference of a stored logit
    rms: float
    flips: list[float]  # the golden's margin wherever our argmax is another token

    def problems(self, *, tolerance: float, margin: float, max_flips: int) -> list[str]:
        """In words; empty when close enough."""
        found = []
        if not self.worst <= tolerance:  # NaN must not pass
            found.append(f"a logit differs by {self.worst:.3g}, more than {tolerance}")
        found += [f"another token although the margin is {m:.3g}, more than {margin}" for m in self.flips if m > margin]
        if len(self.flips) > max_flips:
            found.append(f"{len(self.flips)} other tokens, more than {max_flips}")
        return found


def agree(golden: Golden, logits: Array) -> Agreement:
    """`logits` [N, vocab] are ours for the golden's rows, given the golden's own tokens so far."""
    difference = np.take_along_axis(logits, golden.top_ids, axis=1) - golden.top_logits
    best = logits.argmax(axis=1)
    flips = [float(m) for ours, token, m in zip(best, golden.tokens, golden.margins, strict=True) if ours != token]
    return Agreement(float(np.abs(difference).max()), float(np.sqrt((difference**2).mean())), flips)
