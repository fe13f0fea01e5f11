"""Where copies of experts should live: DeepSeek's published algorithm (github.com/deepseek-ai/EPLB, MIT), in numpy.

Pure functions over measured loads, vectorised over layers, with one order for ties (the lowest index first), so that
every rank that plans from the same loads gets the same placement. They know nothing of the placement that is in force:
`relabel.py` brings a plan close to it afterwards.

Shapes: L layers, E logical experts, P slots, R ranks, N nodes, G groups of experts, X rows of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import ConfigError, InvalidRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Slots = NDArray[np.int32]


class Strategy(StrEnum):
    """How much of a cluster's shape a plan respects."""

    HIERARCHICAL = "hierarchical"  # groups of experts stay within a node; then replicas; then ranks of the node
    GLOBAL = "global"  # one pool of ranks: the best balance, and traffic between nodes does not matter
    INTRA_NODE = "intra_node"  # FastDeploy's balance_intra_node: replicas over all, each node packs its own slots


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks that share the experts. Raises ConfigError for sizes that cannot be."""

    num_ranks: int
    num_nodes: int = 1
    num_groups: int | None = None
    """Groups that the router chooses from before it chooses experts. None: it has none, so nothing ties experts to one
    node, and the hierarchical strategy is the global one."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_nodes", "num_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    @property
    def whole_nodes(self) -> int:
        """The number of nodes, or 1 where the ranks do not divide among them."""
        return self.num_nodes if self.num_ranks % self.num_nodes == 0 else 1


def plan(weight_LE: ArrayLike, num_slots: int, cluster: Cluster, strategy: Strategy = Strategy.HIERARCHICAL) -> Slots:
    """The logical expert of each slot, [L, P]; slot s lives on rank s // (P / R).

    `weight_LE`: measured or predicted tokens of each expert, in any unit. A layer without any is planned as if all
    experts were equal. Hierarchical is global where there are no groups, or where they do not divide among the nodes.

    Raises InvalidRequest for weights that are no loads, ConfigError for sizes that do not fit together.
    """
    weight_LE = normalised(checked_weights(weight_LE))
    num_experts = weight_LE.shape[1]
    num_groups = _check_sizes(num_experts, num_slots, cluster)
    num_nodes = planned_nodes(cluster, strategy)
    if strategy is Strategy.INTRA_NODE:
        return _intra_node(weight_LE, num_slots, cluster.num_ranks, num_nodes)
    return _hierarchical(weight_LE, num_slots, cluster.num_ranks, num_nodes, num_groups if num_nodes > 1 else 1)


def planned_nodes(cluster: Cluster, strategy: Strategy) -> int:
    """The nodes that `plan` tells apart: 1 if it is global, or where ranks or groups do not divide among them."""
    has_groups = cluster.num_groups is not None and cluster.num_groups % cluster.whole_nodes == 0
    keeps_nodes = strategy is Strategy.INTRA_NODE or (strategy is Strategy.HIERARCHICAL and has_groups)
    return cluster.whole_nodes if keeps_nodes else 1


def replicate(weight_XE: Floats, num_slots: int) -> tuple[Ints, Ints]:
    """(expert of each slot [X, P], copies of each expert [X, E]): each further slot to the largest load per copy."""
    num_rows, num_experts = weight_XE.shape
    expert_XP = np.empty((num_rows, num_slots), dtype=np.int64)
    expert_XP[:, :num_experts] = np.arange(num_experts)
    copies_XE = np.ones((num_rows, num_experts), dtype=np.int64)
    per_copy_XE = weight_XE.copy()
    rows_X = np.arange(num_rows)
    for slot in range(num_experts, num_slots):
        expert_X = per_copy_XE.argmax(axis=1)
        expert_XP[:, slot] = expert_X
        copies_XE[rows_X, expert_X] += 1
        per_copy_XE[rows_X, expert_X] = weight_XE[rows_X, expert_X] / copies_XE[rows_X, expert_X]
    return expert_XP, copies_XE


def pack(weight_XI: Floats, num_bins: int) -> Ints:
    """Where each of I items goes, [X, I], as bin * (I / num_bins) + its place there: equally many items in each bin.

    The heaviest item first, each into the lightest bin that still has room. `num_bins` divides I.
    """
    num_rows, num_items = weight_XI.shape
    per_bin = num_items // num_bins
    if per_bin == 1:
        return np.tile(np.arange(num_items), (num_rows, 1))
    order_XI = np.argsort(-weight_XI, axis=1, kind="stable")
    sorted_XI = np.take_along_axis(weight_XI, order_XI, axis=1)
    place_XI = np.empty((num_rows, num_items), dtype=np.int64)
    load_XB = np.zeros((num_rows, num_bins))
    used_XB = np.zeros((num_rows, num_bins), dtype=np.int64)
    rows_X = np.arange(num_rows)
    for item in range(num_items):
        bin_X = load_XB.argmin(axis=1)
        used_X = used_XB[rows_X, bin_X]
        place_XI[rows_X, order_XI[:, item]] = bin_X * per_bin + used_X
        used_XB[rows_X, bin_X] = used_X + 1
        load_X = load_XB[rows_X, bin_X] + sorted_XI[:, item]
        load_XB[rows_X, bin_X] = np.where(used_X + 1 == per_bin, np.inf, load_X)  # a full bin is never the lightest
    return place_XI


def checked_weights(weight_LE: ArrayLike, name: str = "weight", shape: tuple[int, int] | None = None) -> Floats:
    """Loads as floats [L, E]. Raises InvalidRequest for another shape, NaN, infinite or negative ones."""
    try:
        weights: Floats = np.asarray(weight_LE, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} must be layers x experts of numbers: {error}", param=name) from error
    if weights.ndim != 2 or 0 in weights.shape:
        raise InvalidRequest(
            f"{name} has the shape {list(weights.shape)}; it must be layers x experts, at least 1 x 1", param=name
        )
    if shape is not None and weights.shape != shape:
        raise InvalidRequest(
            f"{name} has the shape {list(weights.shape)}; the map's layers x experts are {list(shape)}", param=name
        )
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        layer, expert = np.argwhere(bad)[0].tolist()
        raise InvalidRequest(
            f"{name}[{layer}, {expert}] is {weights[layer, expert]:g}; it must be a finite number of at least 0",
            param=name,
        )
    return weights


def normalised(weight_LE: Floats) -> Floats:
    """Each layer scaled by a power of two, so that no sum overflows and no scale of the input changes a plan.

    A layer without any load gets ones.
    """
    largest_L1 = weight_LE.max(axis=1, keepdims=True)
    _, exponent_L1 = np.frexp(largest_L1)
    scaled: Floats = np.where(largest_L1 > 0, np.ldexp(weight_LE, -exponent_L1), 1.0)
    return scaled


def _check_sizes(num_experts: int, num_slots: int, cluster: Cluster) -> int:
    """The number of groups. Raises ConfigError."""
    num_groups = num_experts if cluster.num_groups is None else cluster.num_groups
    if num_slots < num_experts:
        raise ConfigError(f"num_slots is {num_slots}; it must be at least the number of experts, {num_experts}")
    if num_slots % cluster.num_ranks:
        raise ConfigError(f"num_slots is {num_slots}; it must be a multiple of num_ranks, {cluster.num_ranks}")
    if num_experts % num_groups:
        raise ConfigError(f"num_groups is {num_groups}; it must divide the number of experts, {num_experts}")
    return num_groups


def _hierarchical(weight_LE: Floats, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int) -> Slots:
    """Groups onto nodes, replicas within a node, slots onto its ranks. With one node and one group: the global plan."""
    num_layers, num_experts = weight_LE.shape
    group_size = num_experts // num_groups
    weight_LG = weight_LE.reshape(num_layers, num_groups, group_size).sum(axis=2)
    place_LG = pack(weight_LG, num_nodes)
    order_LE = (_inverse(place_LG)[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, num_experts)

    # From here on a row is one node of one layer, and F are the experts of a node.
    weight_XF = np.take_along_axis(weight_LE, order_LE, axis=1).reshape(num_layers * num_nodes, -1)
    slots_XQ = _place_slots(weight_XF, num_slots // num_nodes, num_ranks // num_nodes)
    first_X1 = np.tile(np.arange(num_nodes) * (num_experts // num_nodes), num_layers)[:, None]
    local_LP = (slots_XQ + first_X1).reshape(num_layers, num_slots)
    return np.take_along_axis(order_LE, local_LP, axis=1).astype(np.int32)


def _place_slots(weight_XF: Floats, num_slots: int, num_ranks: int) -> Ints:
    """Replicas of a node's experts packed onto its ranks: the expert of each of its slots."""
    expert_XQ, copies_XF = replicate(weight_XF, num_slots)
    per_slot_XQ = np.take_along_axis(weight_XF / copies_XF, expert_XQ, axis=1)
    return np.take_along_axis(expert_XQ, _inverse(pack(per_slot_XQ, num_ranks)), axis=1)


def _intra_node(weight_LE: Floats, num_slots: int, num_ranks: int, num_nodes: int) -> Slots:
    """Replicas as in the global plan, in their order; each node packs the slots that fall to it onto its ranks."""
    num_layers = len(weight_LE)
    expert_LP, copies_LE = replicate(weight_LE, num_slots)
    per_slot_LP = np.take_along_axis(weight_LE / copies_LE, expert_LP, axis=1)
    place_XQ = pack(per_slot_LP.reshape(num_layers * num_nodes, -1), num_ranks // num_nodes)
    slots_XQ = np.take_along_axis(expert_LP.reshape(num_layers * num_nodes, -1), _inverse(place_XQ), axis=1)
    return slots_XQ.reshape(num_layers, num_slots).astype(np.int32)


def _inverse(place_XI: Ints) -> Ints:
    """The item at each place, from the place of each item."""
    item_XI = np.empty_like(place_XI)
    np.put_along_axis(item_XI, place_XI, np.broadcast_to(np.arange(place_XI.shape[1]), place_XI.shape), axis=1)
    return item_XI
