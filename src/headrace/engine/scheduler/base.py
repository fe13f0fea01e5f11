"""What the core asks of a scheduler: which sequence computes how many tokens in the next step, and in which blocks.

The core calls every method from its one thread, between two steps. A scheduler owns the queue, the slots of the
persistent batch and the KV manager; it ends no request and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.engine.sequence import Sequence
from headrace.transport.plan import StepPlan


class Scheduler(Protocol):
    """Policy of an engine. `continuous.py` is the one there is."""

    @property
    def running(self) -> Mapping[int, Sequence]:
        """By slot, the sequences that own blocks."""
        ...

    @property
    def num_queued(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int:
        """Total since the start."""
        ...

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Totals since the start: prompt tokens looked up in the prefix index, and found."""
        ...

    def add(self, seq: Sequence) -> None:
        """Queues a WAITING sequence."""
        ...

    def remove(self, seq: Sequence, *, is_faulty: bool = False) -> None:
        """Lets go of a sequence that was added and ends now: its blocks are free at once, its slot leaves with the next
        plan. What a faulty one computed is never reused."""
        ...

    def preempt_all(self, *, prefills_only: bool = False) -> None:
        """Sequences that run go back to the queue, in their order, and will compute all their tokens again."""
        ...

    def schedule(self, step: int, now_s: float) -> StepPlan | None:
        """The next step's plan; None if there is nothing to compute. Preempts when blocks run out."""
        ...

    def advance(self) -> list[Sequence]:
        """The planned step was computed. Returns the sequences whose prefill it completed."""
        ...

    def check_invariants(self) -> None: ...
