"""PenaltyHistory: which tokens a sequence has seen, kept up to date one token at a time.

Only requests that use a penalty have one. Arrays and not a Counter, because a step copies them whole into its Batch.
"""

import numpy as np
import numpy.typing as npt

from headrace.core.request import Request, SamplingParams


def uses_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class PenaltyHistory:
    """Distinct ids of prompt and output, and how often each stands in the output."""

    def __init__(self, request: Request) -> None:
        distinct = list(dict.fromkeys(request.prompt_token_ids))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self._length = len(distinct)
        for token in request.output_token_ids:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._length]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        return self._counts[: self._length]

    def add(self, token: int) -> None:
        """One more output token."""
        place = self._place.setdefault(token, self._length)
        if place == self._length:
            if self._length == len(self._ids):
                self._ids = np.resize(self._ids, max(16, 2 * self._length))
                self._counts = np.resize(self._counts, max(16, 2 * self._length))
            self._ids[place] = token
            self._counts[place] = 0
            self._length += 1
        self._counts[place] += 1
