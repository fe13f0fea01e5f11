"""Bounded admission, checked in the front end before the engine sees a request; the one place that counts and releases.

A request holds a `Permit` for its choices and prompt tokens until they leave the queue: at a choice's first output, at
its end, or when it is aborted. With several front ends the bound is over the sum of all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headrace.config.options import AdmissionConfig
from headrace.errors import InvalidRequest, QueueFull

_MAX_RETRY_AFTER_S = 60
_WAIT_SMOOTHING = 0.2


class Permit:
    """What one request has in the queue. Every choice and token is released exactly once, whoever asks how often."""

    __slots__ = ("_admission", "_since", "num_choices", "num_tokens")

    def __init__(self, admission: Admission, num_choices: int, num_tokens: int) -> None:
        self._admission = admission
        self._since = admission.clock()
        self.num_choices = num_choices
        self.num_tokens = num_tokens

    def release_part(self, num_choices: int, num_tokens: int) -> None:
        """Some choices have left the queue, with these prompt tokens."""
        num_choices, num_tokens = min(num_choices, self.num_choices), min(num_tokens, self.num_tokens)
        self.num_choices -= num_choices
        self.num_tokens -= num_tokens
        if num_choices or num_tokens:
            self._admission.released(num_choices, num_tokens, self._since)

    def release(self) -> None:
        """All that is left. Idempotent."""
        self.release_part(self.num_choices, self.num_tokens)


class Admission:
    """Belongs to one event loop. `others` gives what the other front ends hold; `on_change` hears every new count."""

    def __init__(
        self,
        config: AdmissionConfig,
        *,
        others: Callable[[], tuple[int, int]] | None = None,
        on_change: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.num_choices = 0
        self.num_tokens = 0
        self.num_rejected = 0
        self._max_choices = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._others = others
        self._on_change = on_change
        self._mean_wait_s = 0.0  # of those who left the queue lately: what a refused one may expect

    def admit(self, num_choices: int, num_tokens: int) -> Permit:
        """All or none. Raises QueueFull, or InvalidRequest for what not even an empty queue could take."""
        if num_choices > self._max_choices:
            raise InvalidRequest(
                f"prompts x n make {num_choices} choices; --max-queued-requests allows {self._max_choices}",
                param="n",
            )
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens in all; --max-queued-tokens allows {self._max_tokens}",
                param="prompt",
            )
        other_choices, other_tokens = self._others() if self._others is not None else (0, 0)
        waiting, tokens = self.num_choices + other_choices, self.num_tokens + other_tokens
        if waiting + num_choices > self._max_choices:
            self._refuse(f"{waiting} requests wait already; {num_choices} more would pass {self._max_choices}")
        if tokens + num_tokens > self._max_tokens:
            self._refuse(f"{tokens} prompt tokens wait already; {num_tokens} more would pass {self._max_tokens}")
        self._change(num_choices, num_tokens)
        return Permit(self, num_choices, num_tokens)

    def released(self, num_choices: int, num_tokens: int, since: float) -> None:
        """Called by a permit alone."""
        self._change(-num_choices, -num_tokens)
        assert self.num_choices >= 0, "a choice was released twice"
        assert self.num_tokens >= 0, "a prompt was released twice"
        self._mean_wait_s += _WAIT_SMOOTHING * (self.clock() - since - self._mean_wait_s)

    @property
    def retry_after_s(self) -> int:
        """A guess, from how long those who were let in have waited."""
        return min(max(1, math.ceil(self._mean_wait_s)), _MAX_RETRY_AFTER_S)

    def _refuse(self, why: str) -> None:
        self.num_rejected += 1
        raise QueueFull(f"the queue is full: {why}", retry_after_s=self.retry_after_s)

    def _change(self, num_choices: int, num_tokens: int) -> None:
        self.num_choices += num_choices
        self.num_tokens += num_tokens
        if self._on_change is not None:
            self._on_change(self.num_choices, self.num_tokens)
