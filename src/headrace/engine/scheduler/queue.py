"""The queue of sequences that have no blocks: preempted ones in front, then by a static key with ageing built in.

A waiting sequence's key is `arrival_s + priority * priority_ageing_s`. Everybody ages alike, so the order between two
of them never changes and a plain heap is enough; whoever comes later than a low-priority sequence by that one's
handicap runs behind it, whatever its own priority. Used by the scheduler, and the heap by the core for deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from headrace.engine.sequence import Sequence, SequenceState

T = TypeVar("T")

_Entry = tuple[float, int, T]
_MIN_STALE = 64


class KeyedHeap(Generic[T]):
    """A priority queue that lets items leave from the middle: first in, first out among equal keys.

    A discarded item's entry stays until it surfaces, or until such entries are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[T]] = []
        self._orders: dict[T, int] = {}  # item -> the order number of its live entry
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[T]:
        return iter(self._orders)

    def __contains__(self, item: T) -> bool:
        return item in self._orders

    def push(self, key: float, item: T) -> None:
        assert item not in self._orders, "queued twice"
        self._orders[item] = self._next_order
        heappush(self._heap, (key, self._next_order, item))
        self._next_order += 1

    def peek(self) -> T | None:
        entry = self._head()
        return entry[2] if entry is not None else None

    def peek_key(self) -> float | None:
        entry = self._head()
        return entry[0] if entry is not None else None

    def pop(self) -> T:
        entry = self._head()
        assert entry is not None, "pop from an empty heap"
        heappop(self._heap)
        del self._orders[entry[2]]
        return entry[2]

    def discard(self, item: T) -> bool:
        """False if it is not here."""
        if self._orders.pop(item, None) is None:
            return False
        if len(self._heap) > 2 * len(self._orders) + _MIN_STALE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)
        return True

    def _head(self) -> _Entry[T] | None:
        heap = self._heap
        while heap:
            if self._is_live(heap[0]):
                return heap[0]
            heappop(heap)
        return None

    def _is_live(self, entry: _Entry[T]) -> bool:
        return self._orders.get(entry[2]) == entry[1]


class WaitingQueue:
    """Sequences to admit, in order, with the number of tokens that they still have to prefill."""

    def __init__(self) -> None:
        self._waiting: KeyedHeap[Sequence] = KeyedHeap()
        self._preempted: deque[Sequence] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._waiting

    def add(self, seq: Sequence) -> None:
        self._waiting.push(seq.request.priority_key, seq)
        self.num_tokens += seq.num_tokens

    def add_preempted(self, seq: Sequence) -> None:
        """To the very front: victims are taken newest first, so the oldest of them ends up first."""
        self._preempted.appendleft(seq)
        self.num_tokens += seq.num_tokens

    def peek(self) -> Sequence | None:
        return self._preempted[0] if self._preempted else self._waiting.peek()

    def pop(self) -> Sequence:
        seq = self._preempted.popleft() if self._preempted else self._waiting.pop()
        self.num_tokens -= seq.num_tokens
        return seq

    def remove(self, seq: Sequence) -> None:
        if seq.state is SequenceState.PREEMPTED:
            self._preempted.remove(seq)
        else:
            assert self._waiting.discard(seq), f"{seq!r} is not queued"
        self.num_tokens -= seq.num_tokens

    def check_invariants(self) -> None:
        assert self.num_tokens == sum(seq.num_tokens for seq in self), "the queued token counter is off"
        assert all(seq.state is SequenceState.PREEMPTED for seq in self._preempted)
        assert all(seq.state is SequenceState.WAITING for seq in self._waiting)
        assert all(seq.table is None for seq in self), "a queued sequence owns blocks"
