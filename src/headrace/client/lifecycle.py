"""Whether this front end still takes new requests; read by the HTTP layer before each request and by `/readyz`.

The process that owns the front end (`server/process.py`) decides; nothing here starts or stops anything.
"""

from __future__ import annotations

from collections.abc import Callable


class Lifecycle:
    """Serving until `drain()` is called or `is_told_to_drain` (the supervisor's word on the status board) says so."""

    def __init__(self, is_told_to_drain: Callable[[], bool] | None = None) -> None:
        self._is_told_to_drain = is_told_to_drain
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """New requests are refused with 503; running ones finish. Never turns back to False."""
        if not self._is_draining and self._is_told_to_drain is not None and self._is_told_to_drain():
            self._is_draining = True
        return self._is_draining

    def reasons(self) -> tuple[str, ...]:
        """Why this front end is not ready, as machine-readable words; empty when it is."""
        return ("draining",) if self.is_draining else ()

    def drain(self) -> None:
        self._is_draining = True
