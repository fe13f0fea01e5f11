"""One writer's record of integers in shared memory, read by any process without a lock.

    slot = | copy 0 | copy 1 |        copy = | counter u64 | fields i64 ... | crc32 u64 |   little-endian

A write goes to the older copy and carries the next counter; a reader takes the copy with a right checksum and the
higher counter. So a reader never sees half a record, whatever the machine's memory order, and a writer that dies in the
middle of a write leaves the last record intact (a plain sequence lock would leave it locked for ever).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

_READ_TRIES = 8


class Slot:
    """`write` belongs to one process and one thread at a time; `read` to anybody."""

    def __init__(self, memory: memoryview, num_fields: int) -> None:
        assert len(memory) == self.size(num_fields)
        self._memory = memory
        self._body = struct.Struct(f"<Q{num_fields}q")
        self._copy_bytes = self._body.size + 8
        self._last: tuple[int, ...] = (0,) * (num_fields + 1)  # counter and fields of the newest record seen
        self._last = self._newest()

    @staticmethod
    def size(num_fields: int) -> int:
        return 2 * (8 + 8 * num_fields + 8)

    def write(self, values: Sequence[int]) -> None:
        counter = self._last[0] + 1
        self._last = (counter, *values)
        body = self._body.pack(*self._last)
        start = (counter & 1) * self._copy_bytes
        self._memory[start : start + self._copy_bytes] = body + zlib.crc32(body).to_bytes(8, "little")

    def read(self) -> tuple[int, ...]:
        """The fields of the newest record; all zero before the first. Never waits for the writer."""
        newest = self._newest()
        if newest[0] >= self._last[0]:
            self._last = newest
        return self._last[1:]

    def _newest(self) -> tuple[int, ...]:
        for _ in range(_READ_TRIES):
            copies = [copy for copy in (self._copy(0), self._copy(1)) if copy is not None]
            if copies:
                return max(copies)
        return self._last  # both copies were being written whenever we looked, or nothing was ever written

    def _copy(self, index: int) -> tuple[int, ...] | None:
        start = index * self._copy_bytes
        raw = bytes(self._memory[start : start + self._copy_bytes])
        body = raw[:-8]
        if zlib.crc32(body) != int.from_bytes(raw[-8:], "little"):
            return None
        return self._body.unpack(body)
