"""How every process of a server comes to the log level that one front end was told: each looks at the status board.

The engine looks at each heartbeat, the supervisor and the front ends in their watching loops. What to do with the level
is the caller's, so that nothing here knows about logs.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.transport.board import StatusBoard


class LogLevelFollower:
    """One per process."""

    def __init__(self, board: StatusBoard, apply: Callable[[int], None]) -> None:
        self._board = board
        self._apply = apply
        self._seen_ns = 0

    def look(self) -> None:
        """Applies the level that was asked for last, once."""
        asked_ns, level = self._board.newest_log_level()
        if asked_ns > self._seen_ns:
            self._seen_ns = asked_ns
            self._apply(level)
