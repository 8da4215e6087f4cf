"""WaitingQueue: sequences that wait for compute, in the order of policy.

A heap with marks: removing a sequence from the middle (an abort) only marks it, and marked entries are dropped when
they come up or when they are the majority. Push, pop and remove cost O(log n) amortised, whatever waits.
"""

import heapq

from headrace.core.policy import Place
from headrace.core.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[Place, Sequence]] = []
        self._present: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._present

    def push(self, sequence: Sequence) -> None:
        if sequence in self._present:
            raise ValueError(f"{sequence.request.key} is already waiting")
        self._present.add(sequence)
        heapq.heappush(self._heap, (sequence.place, sequence))

    def peek(self) -> Sequence:
        """The first in order. Raises IndexError when nothing waits."""
        while self._heap[0][1] not in self._present:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Sequence:
        first = self.peek()
        heapq.heappop(self._heap)
        self._present.remove(first)
        return first

    def remove(self, sequence: Sequence) -> None:
        self._present.remove(sequence)
        if len(self._heap) > 2 * len(self._present) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._present]
            heapq.heapify(self._heap)
