"""What was measured: tokens per expert over a window of steps, and how evenly a map spreads them over ranks.

Loads are counted by logical expert, so that they mean the same under any map. A token counts once for each expert that
it was sent to.

Shapes: L layers, E logical experts, P slots, R ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.eplb.layout import ExpertMap
from headrace.eplb.placement import checked_weights
from headrace.errors import ConfigError, InvalidRequest

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WindowLoad:
    """What a window held when it was read."""

    tokens_LE: Counts
    num_steps: int
    start: float | None  # time of the first and of the last step; None if there was none
    end: float | None

    @property
    def num_tokens(self) -> int:
        """Tokens that went through the layer that saw most of them."""
        return int(self.tokens_LE.sum(axis=1).max())

    @property
    def duration_s(self) -> float:
        return 0.0 if self.start is None or self.end is None else self.end - self.start


class Balance(msgspec.Struct, frozen=True):
    """How evenly ranks are loaded: mean / max over ranks of each layer (1 is even), their mean and their minimum."""

    mean: float
    worst: float
    per_layer: list[float]


@dataclass
class _Bucket:
    tokens_LE: Counts
    num_steps: int
    start: float
    end: float


class LoadWindow:
    """Tokens per layer and expert over the last `num_steps` steps. Any thread may add, any may read.

    Steps are summed in buckets, so memory does not grow with the window: when the next step would be one too many, the
    oldest bucket goes. The window therefore spans between `num_steps` less one bucket and `num_steps` steps.
    """

    def __init__(self, num_layers: int, num_experts: int, num_steps: int = 1000, num_buckets: int = 10) -> None:
        sizes = {"num_layers": num_layers, "num_experts": num_experts, "window_steps": num_steps}
        for name, value in {**sizes, "num_buckets": num_buckets}.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self._shape = (num_layers, num_experts)
        self._max_steps = num_steps
        self._bucket_steps = -(-num_steps // num_buckets)
        self._buckets: deque[_Bucket] = deque()
        self._num_steps = 0
        self._total_LE: Counts = np.zeros(self._shape, dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, counts_LE: NDArray[np.integer], time: float, num_steps: int = 1) -> None:
        """The tokens of one step, or of several at once, which then stay together; a step without any is one of zeros.
        Raises InvalidRequest for another shape."""
        if counts_LE.shape != self._shape or counts_LE.dtype.kind not in "iu":
            raise InvalidRequest(
                f"counts are {counts_LE.dtype} of the shape {list(counts_LE.shape)}; "
                f"they must be integers of the shape {list(self._shape)}",
                param="counts",
            )
        with self._lock:
            while self._buckets and self._num_steps + num_steps > self._max_steps:
                self._drop_oldest()
            if not self._buckets or self._buckets[-1].num_steps + num_steps > self._bucket_steps:
                self._buckets.append(_Bucket(np.zeros(self._shape, dtype=np.int64), 0, time, time))
            bucket = self._buckets[-1]
            bucket.tokens_LE += counts_LE.astype(np.int64, copy=False)
            bucket.num_steps += num_steps
            bucket.end = time
            self._total_LE += counts_LE.astype(np.int64, copy=False)
            self._num_steps += num_steps

    def read(self, clear: bool = False) -> WindowLoad:
        """The window; with `clear` it starts anew, and no step is lost or read twice."""
        with self._lock:
            start, end = (self._buckets[0].start, self._buckets[-1].end) if self._buckets else (None, None)
            load = WindowLoad(self._total_LE.copy(), self._num_steps, start, end)
            if clear:
                self._buckets.clear()
                self._num_steps = 0
                self._total_LE[...] = 0
        return load

    def _drop_oldest(self) -> None:
        oldest = self._buckets.popleft()
        self._total_LE -= oldest.tokens_LE
        self._num_steps -= oldest.num_steps


def rank_loads(counts_LE: ArrayLike, expert_map: ExpertMap) -> Floats:
    """Tokens of each rank [L, R], if dispatch deals an expert's tokens out to its replicas in turn: equal shares.

    Raises InvalidRequest if the counts are no loads, or not those of the map's layers and experts.
    """
    counts = checked_weights(counts_LE, "counts", shape=(expert_map.num_layers, expert_map.num_experts))
    per_copy_LE = counts / expert_map.num_replicas_LE
    per_slot_LP = np.take_along_axis(per_copy_LE, expert_map.slots_LP.astype(np.int64), axis=1)
    loads: Floats = per_slot_LP.reshape(*expert_map.slots_LRS.shape).sum(axis=2)
    return loads


def balance(loads_LR: ArrayLike) -> Floats:
    """Mean over ranks / max over ranks, [L]: 1 is even, 1 / R is all on one; 1 for a layer without load."""
    loads = checked_weights(loads_LR, "loads")
    most_L = loads.max(axis=1)
    ones_L = np.ones_like(most_L)
    even: Floats = np.divide(loads.mean(axis=1), most_L, out=ones_L, where=most_L > 0)
    return even


def summarise(balance_L: Floats) -> Balance:
    """Over layers."""
    return Balance(float(balance_L.mean()), float(balance_L.min()), balance_L.tolist())
