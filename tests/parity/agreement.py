"""How closely logits agree with a golden, and the rule that decides whether that is close enough.

An argmax other than the golden's is tolerated only where the golden's two best logits lie within `margin` of each
other, and only `max_flips` times; every logit that the golden stores must lie within `tolerance`, and the root of their
mean squared difference within `rms`.
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
    def spread(self) -> float:
        """Standard deviation of the stored logits: the scale that backends' tolerances are multiples of."""
        return float(self.top_logits.std())

    @property
    def margins(self) -> Array:
        return self.top_logits[:, 0] - self.top_logits[:, 1]


@dataclass(frozen=True)
class Rule:
    tolerance: float
    rms: float
    margin: float = 0.0
    max_flips: int = 0

    def times(self, scale: float) -> "Rule":
        return Rule(self.tolerance * scale, self.rms * scale, self.margin * scale, self.max_flips)


@dataclass(frozen=True)
class Agreement:
    worst: float  # largest difference of a stored logit
    rms: float
    flips: list[float]  # the golden's margin wherever our argmax is another token

    def problems(self, rule: Rule) -> list[str]:
        """In words; empty when close enough."""
        found = []
        if not self.worst <= rule.tolerance:  # NaN must not pass
            found.append(f"a logit differs by {self.worst:.3g}, more than {rule.tolerance:.3g}")
        if not self.rms <= rule.rms:
            found.append(f"logits differ by {self.rms:.3g} (root mean square), more than {rule.rms:.3g}")
        for margin in self.flips:
            if margin > rule.margin:
                found.append(f"another token although the margin is {margin:.3g}, more than {rule.margin:.3g}")
        if len(self.flips) > rule.max_flips:
            found.append(f"{len(self.flips)} other tokens, more than {rule.max_flips}")
        return found


def agree(golden: Golden, logits: Array) -> Agreement:
    """`logits` [N, vocab] are ours for the golden's rows, given the golden's own tokens so far."""
    difference = np.take_along_axis(logits, golden.top_ids, axis=1) - golden.top_logits
    best = logits.argmax(axis=1)
    flips = [float(m) for ours, token, m in zip(best, golden.tokens, golden.margins, strict=True) if ours != token]
    return Agreement(float(np.abs(difference).max()), float(np.sqrt((difference**2).mean())), flips)
