"""What balancing would bring, without a cluster: planned on one window of loads, judged on the next.

Loads are recorded ones, or Zipf's with drift. A plan that is judged on the window that it was made from looks better
than it will ever be in service, so that figure stands apart (`planned_mean`). Called by `headrace experts simulate`.

Shapes: T steps, L layers, E logical experts, W windows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.eplb.layout import ExpertMap, check_redundant, initial_map
from headrace.eplb.moves import fetches, moves
from headrace.eplb.placement import Cluster, Strategy, plan
from headrace.eplb.relabel import DEFAULT_SLACK, replan
from headrace.eplb.stats import balance, rank_loads
from headrace.errors import ConfigError

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ZipfLoads:
    """Synthetic loads: the n-th most popular expert of a layer gets n ** -exponent; who is popular changes slowly."""

    num_steps: int = 400
    num_layers: int = 61
    num_experts: int = 256
    window_steps: int = 100
    tokens_per_step: int = 4096
    top_k: int = 8
    exponent: float = 0.5
    drift: float = 0.03  # how much of an expert's popularity is new after a window: 0 nothing, 1 all
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_layers", "num_experts", "window_steps", "tokens_per_step", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; it must be 1 to the number of experts, {self.num_experts}")
        if not 0 <= self.exponent <= 10:
            raise ConfigError(f"zipf_exponent is {self.exponent}; it must be 0 to 10")
        if not 0 <= self.drift <= 1:
            raise ConfigError(f"drift is {self.drift}; it must be 0 to 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0")

    def generate(self) -> Counts:
        """Tokens per step, layer and expert, [T, L, E]; the same ones for the same seed."""
        random = np.random.default_rng(self.seed)
        shape = (self.num_layers, self.num_experts)
        share_E = _capped(np.arange(1.0, self.num_experts + 1) ** -self.exponent, 1 / self.top_k)
        kept = (1 - self.drift) ** (1 / self.window_steps)  # correlation of popularity from one step to the next
        popularity_LE = random.standard_normal(shape)
        loads_TLE = np.empty((self.num_steps, *shape), dtype=np.int64)
        for step in range(self.num_steps):
            place_LE = np.argsort(np.argsort(-popularity_LE, axis=1, kind="stable"), axis=1, kind="stable")
            loads_TLE[step] = random.multinomial(self.tokens_per_step * self.top_k, share_E[place_LE])
            popularity_LE = kept * popularity_LE + np.sqrt(1 - kept**2) * random.standard_normal(shape)
        return loads_TLE


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. Means are over layers and windows, `worst` is the worst layer of any window."""

    num_ranks: int
    num_redundant: int
    slots_per_rank: int
    plain_mean: float  # experts in order, redundant ones round robin, never moved
    plain_worst: float
    mean: float  # planned on one window, judged on the next
    worst: float
    planned_mean: float  # judged on the window that it was planned on
    moved_share: float  # slots that are filled from another rank, from one plan to the next
    plan_s: float  # to plan all layers once


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Balance of the two layers of the published example, here and as it was published."""

    name: str
    computed: list[float]
    published: list[float]


def simulate(
    window_WLE: Counts, num_redundant: int, cluster: Cluster, strategy: Strategy, slack: float = DEFAULT_SLACK
) -> Row:
    """One row of the table from at least two windows of loads. Raises ConfigError for sizes that do not fit."""
    num_windows, num_layers, num_experts = window_WLE.shape
    if num_windows < 2:
        raise ConfigError(f"there is {num_windows} window of loads; at least 2 are needed, to plan on and to judge")
    start = current = initial_map(num_layers, num_experts, num_redundant, cluster.num_ranks)
    plain, judged, planned = [], [], []
    moved: list[float] = []
    plan_s = 0.0
    for window in range(num_windows - 1):
        began = time.perf_counter()
        target = replan(current, window_WLE[window], cluster, strategy, slack)
        plan_s += time.perf_counter() - began
        if window > 0:  # the first plan has nothing worth keeping
            num_sent = len(fetches(moves(current, target)))
            moved.append(num_sent / (num_layers * target.num_slots))
        current = target
        planned.append(_balance(window_WLE[window], target))
        judged.append(_balance(window_WLE[window + 1], target))
        plain.append(_balance(window_WLE[window + 1], start))
    return Row(
        num_ranks=cluster.num_ranks,
        num_redundant=num_redundant,
        slots_per_rank=current.slots_per_rank,
        plain_mean=float(np.mean(plain)),
        plain_worst=float(np.min(plain)),
        mean=float(np.mean(judged)),
        worst=float(np.min(judged)),
        planned_mean=float(np.mean(planned)),
        moved_share=float(np.mean(moved)) if moved else 0.0,
        plan_s=plan_s / (num_windows - 1),
    )


def windows_of(loads_TLE: Counts, window_steps: int) -> Counts:
    """Sums of so many steps each, [W, L, E]; what is left at the end is dropped. Raises ConfigError."""
    num_steps = len(loads_TLE)
    if not 1 <= window_steps <= num_steps // 2:
        raise ConfigError(f"window is {window_steps} steps; it must be 1 to {num_steps // 2}, half of the loads' steps")
    num_windows = num_steps // window_steps
    used_TLE = loads_TLE[: num_windows * window_steps]
    sums: Counts = used_TLE.reshape(num_windows, window_steps, *loads_TLE.shape[1:]).sum(axis=1)
    return sums


def possible_counts(num_experts: int, wanted: Iterable[int], num_ranks: int) -> tuple[list[int], str | None]:
    """(the redundant counts that work, why the first of the others does not)."""
    possible: list[int] = []
    why: str | None = None
    for num_redundant in wanted:
        try:
            check_redundant(num_experts, num_redundant, num_ranks)
            possible.append(num_redundant)
        except ConfigError as error:
            why = why or str(error)
    return possible, why


def published_example() -> list[Example]:
    """The example of DeepSeek's README: two layers of 12 experts."""
    weight_LE = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    eight = Cluster(num_ranks=8, num_nodes=2, num_groups=4)
    four = Cluster(num_ranks=4)

    def example(name: str, slots_LP: NDArray[np.int32], num_ranks: int, published: list[float]) -> Example:
        computed = _balance(weight_LE, ExpertMap(slots_LP, 12, num_ranks))
        return Example(name=name, computed=computed.tolist(), published=published)

    return [
        example("4 ranks, 12 slots, in order", initial_map(2, 12, 0, 4).slots_LP, 4, [0.783, 0.560]),
        example("4 ranks, 12 slots, packed", plan(weight_LE, 12, four, Strategy.GLOBAL), 4, [0.932, 0.990]),
        example("8 ranks, 16 slots, hierarchical", plan(weight_LE, 16, eight), 8, [0.828, 0.805]),
        example("8 ranks, 16 slots, global", plan(weight_LE, 16, eight, Strategy.GLOBAL), 8, [0.932, 0.840]),
    ]


def _balance(tokens_LE: Counts, expert_map: ExpertMap) -> Floats:
    return balance(rank_loads(tokens_LE, expert_map))


def _capped(weight_E: NDArray[np.floating], most: float) -> Floats:
    """Shares that add up to 1, none above `most`: a token goes to an expert at most once."""
    share_E: Floats = weight_E / weight_E.sum()
    capped = share_E > most
    while (share_E > most * (1 + 1e-12)).any():
        capped |= share_E > most
        rest = weight_E[~capped].sum()
        left = 1 - most * capped.sum()
        share_E = np.where(capped, most, weight_E * (left / rest if rest else 0.0))
    return share_E
