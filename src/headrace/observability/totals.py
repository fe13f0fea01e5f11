"""What one front end has counted, in memory that every front end of the server can read: `/metrics` adds it all up.

    page = | histogram: counts of its buckets, sum | ... | counter: names of label values | their counts | ...

One file per front end in the private runtime directory, mapped by all. Its owner alone writes, a number at a time, and
a restarted front end goes on where its predecessor ended: no counter ever goes back, and a kill loses nothing. Numbers
are float64 in the machine's order.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from headrace.errors import StartupError

_CELL_BYTES: Final = 8
_MAX_VALUES: Final = 24  # label values of one counter
_NAME_BYTES: Final = 48
_OTHER: Final = "other"  # the last place, for values beyond that number


class Buckets:
    """A histogram: one bisect per observation, which may stand for several equal ones."""

    __slots__ = ("_cells", "bounds")

    def __init__(self, bounds: Sequence[float], cells: memoryview[float] | None = None) -> None:
        """`cells`: one per bound, one for what is above, and the sum; its own if none are given."""
        self.bounds = bounds
        self._cells = memoryview(bytearray(self.size(bounds))).cast("d") if cells is None else cells

    @staticmethod
    def size(bounds: Sequence[float]) -> int:
        """In bytes."""
        return (len(bounds) + 2) * _CELL_BYTES

    def observe(self, value: float, weight: int = 1) -> None:
        cells = self._cells
        cells[bisect_left(self.bounds, value)] += weight
        cells[-1] += value * weight

    def add(self, other: Buckets) -> None:
        for index, value in enumerate(other._cells):
            self._cells[index] += value

    @property
    def total(self) -> float:
        return self._cells[-1]

    def cumulative(self) -> list[tuple[str, float]]:
        pairs, seen = [], 0.0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._cells, strict=False):  # but the sum
            seen += count
            pairs.append((bound, seen))
        return pairs


class LabelledCounter:
    """A counter per value of one label. Values that find no place are counted together, as `other`."""

    __slots__ = ("_cells", "_names", "_places")

    SIZE: Final = _MAX_VALUES * (_NAME_BYTES + _CELL_BYTES)

    def __init__(self, memory: memoryview) -> None:
        split = _MAX_VALUES * _NAME_BYTES
        self._names = memory[:split]
        self._cells = memory[split:].cast("d")
        self._places = {value: place for place, value in self._entries()}

    def add(self, value: str, count: float = 1) -> None:
        """Shows the value from now on, even with a count of zero."""
        place = self._places.get(value)
        if place is None:
            place = self._places[value] = self._enter(value)
        self._cells[place] += count

    def items(self) -> Iterator[tuple[str, float]]:
        """What stands there now, whoever wrote it."""
        for place, value in self._entries():
            yield value, self._cells[place]

    def _enter(self, value: str) -> int:
        place = sum(1 for _ in self._entries())
        if place >= _MAX_VALUES - 1:
            place, value = _MAX_VALUES - 1, _OTHER
        name = value.encode()[:_NAME_BYTES]
        start = place * _NAME_BYTES
        self._names[start + 1 : start + len(name)] = name[1:]
        self._names[start] = name[0]  # last: until then a reader finds nothing here
        return place

    def _entries(self) -> Iterator[tuple[int, str]]:
        for place in range(_MAX_VALUES):
            name = bytes(self._names[place * _NAME_BYTES : (place + 1) * _NAME_BYTES])
            if not name[0]:
                return
            yield place, name.rstrip(b"\0").decode()


class Page:
    """The totals of one front end. Its owner writes; to all others it is for reading."""

    def __init__(self, histograms: Mapping[str, Sequence[float]], counters: Sequence[str], path: Path | None) -> None:
        """`histograms`: their bounds by name. Without a path nobody else sees the page. Raises StartupError."""
        size = sum(map(Buckets.size, histograms.values())) + LabelledCounter.SIZE * len(counters)
        memory = memoryview(bytearray(size) if path is None else _mapped(path, size))
        self.histograms: dict[str, Buckets] = {}
        self.counters: dict[str, LabelledCounter] = {}
        for name, bounds in histograms.items():
            self.histograms[name] = Buckets(bounds, memory[: Buckets.size(bounds)].cast("d"))
            memory = memory[Buckets.size(bounds) :]
        for name in counters:
            self.counters[name] = LabelledCounter(memory[: LabelledCounter.SIZE])
            memory = memory[LabelledCounter.SIZE :]


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Made by whoever comes first, full of zeros; with all its room, for a write without any would end the process."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise StartupError(f"cannot make {path}: {error.strerror}") from error
