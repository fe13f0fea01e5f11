"""The front-end processes as the supervisor sees them: started, counted on the board, restarted when one dies."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.control.children import Child, explain_exit, start_front_end
from headrace.errors import StartupError
from headrace.transport.board import FrontEndRecord, FrontEndState, StatusBoard

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS: Final = 3
_SHORT_LIFE_S: Final = 5.0  # who died younger is restarted after a pause
_PAUSE_S: Final = 0.5


@dataclass(slots=True)
class _Place:
    """One front end's index, socket and present incarnation."""

    index: int
    listener: socket.socket
    child: Child | None = None
    started_s: float = 0.0
    restart_s: float = 0.0
    num_failed_starts: int = 0


class FrontEnds:
    """Belongs to the supervisor's thread."""

    def __init__(self, launch_path: Path, board: StatusBoard, listeners: list[socket.socket]) -> None:
        self._launch_path = launch_path
        self._board = board
        self._places = [_Place(index, listener) for index, listener in enumerate(listeners)]

    @property
    def children(self) -> list[Child]:
        return [place.child for place in self._places if place.child is not None]

    def start_missing(self) -> None:
        now = time.monotonic()
        for place in self._places:
            if place.child is None and now >= place.restart_s:
                place.child = start_front_end(self._launch_path, place.index, place.listener.fileno())
                place.started_s = now

    def note_deaths(self) -> None:
        """Raises StartupError when one of them cannot be brought up."""
        for place in self._places:
            if place.child is None or place.child.is_running:
                continue
            child, place.child = place.child, None
            was_ready = self._record(place, child.pid).state == FrontEndState.READY
            place.num_failed_starts = 0 if was_ready else place.num_failed_starts + 1
            cause = explain_exit(child.exit_code)
            child.kill()  # what it may have started
            if place.num_failed_starts >= _MAX_FAILED_STARTS:
                raise StartupError(f"{child.name} ended {_MAX_FAILED_STARTS} times while it started ({cause})")
            now = time.monotonic()
            is_hasty = not was_ready or now - place.started_s < _SHORT_LIFE_S
            place.restart_s = now + _PAUSE_S * 2**place.num_failed_starts if is_hasty else now
            logger.warning("%s ended (%s): starting it again", child.name, cause)

    @property
    def are_ready(self) -> bool:
        return all(
            place.child is not None and self._record(place, place.child.pid).state == FrontEndState.READY
            for place in self._places
        )

    @property
    def num_open(self) -> int:
        """HTTP requests in progress in the front ends that live."""
        places = [(place, place.child) for place in self._places if place.child is not None]
        return sum(self._record(place, child.pid).num_open for place, child in places)

    @property
    def has_chat_template(self) -> bool:
        return any(self._board.read_front_end(place.index).has_chat_template for place in self._places)

    def _record(self, place: _Place, pid: int) -> FrontEndRecord:
        """The slot of this incarnation; not what its predecessor had left there."""
        record = self._board.read_front_end(place.index)
        return record if record.pid == pid else FrontEndRecord()
