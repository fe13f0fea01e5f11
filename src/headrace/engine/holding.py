"""Accepted requests that may not run yet: behind a pause, or while the grammar of their output is compiled.

The core asks at receipt, and before each step for those that may go. Whoever closed it knows why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from headrace.engine.sequence import Request
from headrace.errors import ErrorInfo, InternalError, InvalidRequest
from headrace.grammar import GrammarError

logger = logging.getLogger(__name__)


class Holding:
    """In the order of receipt. Used by one thread."""

    def __init__(self) -> None:
        self.is_closed = False
        self._requests: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def has_ready(self) -> bool:
        """Whether any may go."""
        return not self.is_closed and any(request.is_prepared for request in self._requests)

    def keep(self, request: Request) -> None:
        """Holds a new request, if it must wait, or to look at how its preparation went."""
        if self.is_closed or request.preparation is not None:
            self._requests[request] = None

    def ready(self) -> list[Request]:
        """Those that may go now."""
        return [] if self.is_closed else [request for request in self._requests if request.is_prepared]

    def drop(self, request: Request) -> None:
        """It goes, or has ended. Idempotent."""
        self._requests.pop(request, None)


def preparation_error(request: Request) -> ErrorInfo | None:
    """Why a prepared request cannot run after all."""
    error = None if request.preparation is None else request.preparation.exception()
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return InvalidRequest(f"grammar cannot be followed: {error}.", param="grammar", code="invalid_grammar").info()
    logger.error("a grammar could not be compiled: %r", error)
    return InternalError("the grammar could not be compiled", param="grammar").info()
