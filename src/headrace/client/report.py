"""This front end's slot of the status board: the last record, written again whenever one of its fields changes."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from headrace.transport.board import FrontEndRecord, StatusBoard


class FrontEndReport:
    """One per process. A new one wipes what a dead predecessor had left in the slot, but for the log level."""

    def __init__(self, board: StatusBoard, index: int) -> None:
        self._board = board
        self._index = index
        left = board.read_front_end(index)
        self._record = FrontEndRecord(pid=os.getpid(), log_level=left.log_level, log_level_ns=left.log_level_ns)
        board.write_front_end(index, self._record)

    def update(self, **changes: Any) -> None:
        record = msgspec.structs.replace(self._record, **changes)
        if record != self._record:
            self._record = record
            self._board.write_front_end(self._index, record)

    def set_queued(self, num_queued: int, num_queued_tokens: int) -> None:
        self.update(num_queued=num_queued, num_queued_tokens=num_queued_tokens)
