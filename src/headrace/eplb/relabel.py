"""A new plan brought close to the map in force: the same balance, as few weights to move as possible.

A planner's ranks and slots are mere names: within a node they may be exchanged. `pack_in_place` packs a plan's copies
once more and lets an expert stay where that costs little balance, `spread_copies` swaps away copies that share a rank,
and `relabel` gives each rank of the plan the number of the rank that holds most of its experts already and leaves these
in their slots. All of it is exact arithmetic or has one order, so that every rank comes to the same map.

Shapes: L layers, E logical experts, P slots, R ranks, S slots of a rank, N nodes, X problems, K items of one problem.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.eplb.layout import ExpertMap, count_replicas
from headrace.eplb.placement import Cluster, Slots, Strategy, checked_weights, normalised, plan, planned_nodes

Ints = NDArray[np.int64]
Scores = NDArray[np.int16]  # small, because searching them is most of the time
Floats = NDArray[np.float64]


DEFAULT_SLACK = 0.02


def replan(
    current: ExpertMap,
    weight_LE: ArrayLike,
    cluster: Cluster,
    strategy: Strategy = Strategy.HIERARCHICAL,
    slack: float = DEFAULT_SLACK,
) -> ExpertMap:
    """A new map for these loads, close to `current`.

    `slack`: how much more than the published plan's fullest rank one may carry for the sake of fewer moves, as a share
    of a rank's mean load. 0 keeps to the published packing.

    Raises as `plan` does, and InvalidRequest if the loads are not those of the map's layers and experts.
    """
    assert cluster.num_ranks == current.num_ranks
    weights = normalised(checked_weights(weight_LE, shape=(current.num_layers, current.num_experts)))
    num_nodes = planned_nodes(cluster, strategy)
    slots_LP = _match_nodes(current, plan(weights, current.num_slots, cluster, strategy), num_nodes)
    if slack > 0:
        slots_LP = pack_in_place(current, slots_LP, weights, num_nodes=num_nodes, slack=slack)
    return relabel(current, spread_copies(slots_LP, weights, current.num_ranks, num_nodes), num_nodes)


def pack_in_place(
    current: ExpertMap, slots_LP: Slots, weight_LE: Floats, *, num_nodes: int = 1, slack: float = DEFAULT_SLACK
) -> Slots:
    """Each node's slots of a plan, packed onto its ranks once more, with a preference for where their experts are.

    The heaviest first, each onto the rank that carries least; one that holds the expert counts as `slack` of the mean
    load lighter, one that has just got a copy as so much heavier. A layer whose fullest rank would exceed the plan's by
    more than that keeps the plan.
    """
    num_layers, num_ranks, per_rank = current.slots_LRS.shape
    shape = (num_layers * num_nodes, num_ranks // num_nodes, per_rank)
    num_rows, rows_X = shape[0], np.arange(shape[0])
    allowance_L = slack * weight_LE.sum(axis=1) / num_ranks
    allowance_X1 = np.repeat(allowance_L, num_nodes)[:, None]
    # How a rank is liked for an expert: 1 it holds it, 0 it does not, -1 it has got a copy by now.
    liking_XEK = _held(current.slots_LP.reshape(shape), current.num_experts).transpose(0, 2, 1).copy()
    weight_XQ = _slot_weights(slots_LP, weight_LE).reshape(num_rows, -1)
    order_XQ = np.argsort(-weight_XQ, axis=1, kind="stable")
    expert_XQ = np.take_along_axis(slots_LP.reshape(num_rows, -1), order_XQ, axis=1)
    weight_XQ = np.take_along_axis(weight_XQ, order_XQ, axis=1)
    load_XK, used_XK = np.zeros(shape[:2]), np.zeros(shape[:2], dtype=np.int64)
    packed_XKS = np.empty(shape, dtype=np.int32)
    for item in range(expert_XQ.shape[1]):
        expert_X = expert_XQ[:, item]
        score_XK = load_XK - allowance_X1 * liking_XEK[rows_X, expert_X]
        score_XK[used_XK == per_rank] = np.inf
        rank_X = score_XK.argmin(axis=1)
        packed_XKS[rows_X, rank_X, used_XK[rows_X, rank_X]] = expert_X
        used_XK[rows_X, rank_X] += 1
        load_XK[rows_X, rank_X] += weight_XQ[:, item]
        liking_XEK[rows_X, expert_X, rank_X] = -1
    planned_L, packed_L = (
        _slot_weights(each_LP, weight_LE).reshape(current.slots_LRS.shape).sum(axis=2).max(axis=1)
        for each_LP in (slots_LP, packed_XKS.reshape(slots_LP.shape))
    )
    is_even_L1 = (packed_L <= planned_L + allowance_L)[:, None]
    return np.where(is_even_L1, packed_XKS.reshape(slots_LP.shape), slots_LP)


def relabel(current: ExpertMap, slots_LP: Slots, num_nodes: int = 1) -> ExpertMap:
    """The plan `slots_LP` with nodes, ranks and slots renumbered to overlap with `current`.

    Ranks stay with their node (`num_nodes` divides the ranks): a plan's nodes are renumbered as wholes.
    """
    num_layers, num_ranks, num_slots = current.slots_LRS.shape
    per_node = (num_layers * num_nodes, num_ranks // num_nodes, num_slots)
    current_XKS = current.slots_LP.reshape(per_node)
    planned_XKS = _match_nodes(current, slots_LP, num_nodes).reshape(per_node)
    rank_XK = assign(_overlap(current_XKS, planned_XKS, current.num_experts))
    planned_XKS = np.take_along_axis(planned_XKS, rank_XK[:, :, None], axis=1)
    kept = _keep_slots(current.slots_LRS, planned_XKS.reshape(current.slots_LRS.shape))
    return ExpertMap(kept.reshape(slots_LP.shape), current.num_experts, current.num_ranks)


def spread_copies(slots_LP: Slots, weight_LE: Floats, num_ranks: int, num_nodes: int = 1) -> Slots:
    """Swaps a second copy of an expert on one rank with a slot of another rank of its node that has none.

    Only where neither rank then carries more than the layer's fullest rank did before.
    """
    spread_LP = slots_LP.copy()
    num_slots = slots_LP.shape[1]
    rank_P = np.arange(num_slots) * num_ranks // num_slots
    node_P = rank_P * num_nodes // num_ranks
    weight_LP = _slot_weights(slots_LP, weight_LE)
    has_swapped = True
    while has_swapped:  # each swap leaves fewer second copies; it may make room for another
        has_swapped = False
        for layer, slot in second_copies(spread_LP, num_ranks):
            slots_P, weight_P = spread_LP[layer], weight_LP[layer]
            other = _swap_for(slot, slots_P, weight_P, rank_P, node_P)
            if other is not None:
                slots_P[[slot, other]] = slots_P[[other, slot]]
                weight_P[[slot, other]] = weight_P[[other, slot]]
                has_swapped = True
    return spread_LP


def second_copies(slots_LP: Slots, num_ranks: int) -> list[tuple[int, int]]:
    """(layer, slot) of every slot whose expert has a slot of the same rank before it."""
    slots_LRS = slots_LP.reshape(len(slots_LP), num_ranks, -1)
    order_LRS = np.argsort(slots_LRS, axis=2, kind="stable")
    ordered_LRS = np.take_along_axis(slots_LRS, order_LRS, axis=2)
    layer, rank, place = np.nonzero(ordered_LRS[:, :, 1:] == ordered_LRS[:, :, :-1])
    slot = rank * slots_LRS.shape[2] + order_LRS[layer, rank, place + 1]
    return list(zip(layer.tolist(), slot.tolist(), strict=True))


def assign(score_XKK: Scores) -> Ints:
    """For each problem a permutation p, [X, K], with a large sum of score[k, p[k]].

    Greedy, then swaps of two as long as one gains; or none at all, where that is as good. Not always the best, but
    within 3% of it on plans for 64 ranks.
    """
    num_problems, size, _ = score_XKK.shape
    rows_X = np.arange(num_problems)
    chosen_XK = np.empty((num_problems, size), dtype=np.int64)
    open_XKK = score_XKK.copy()
    for _ in range(size):
        row_X, column_X = np.divmod(open_XKK.reshape(num_problems, -1).argmax(axis=1), size)
        chosen_XK[rows_X, row_X] = column_X
        open_XKK[rows_X, row_X] = open_XKK[rows_X, :, column_X] = -1
    chosen_XK = _improve(score_XKK, chosen_XK)
    found_X = np.take_along_axis(score_XKK, chosen_XK[:, :, None], axis=2).sum(axis=(1, 2))
    stays_X = np.trace(score_XKK, axis1=1, axis2=2) >= found_X
    chosen_XK[stays_X] = np.arange(size)
    return chosen_XK


def _improve(score_XKK: Scores, chosen_XK: Ints) -> Ints:
    """The best swap of two in each problem, again and again until none helps: the sum grows each time, so it ends."""
    rows_X = np.arange(len(score_XKK))
    size = score_XKK.shape[1]
    while len(rows_X):
        permuted = np.take_along_axis(score_XKK[rows_X], chosen_XK[rows_X][:, None, :], axis=2)
        diagonal = np.diagonal(permuted, axis1=1, axis2=2)
        gain = permuted + permuted.transpose(0, 2, 1) - diagonal[:, :, None] - diagonal[:, None, :]
        flat = gain.reshape(len(rows_X), -1)
        best = flat.argmax(axis=1)
        helps = flat[np.arange(len(rows_X)), best] > 0
        rows_X, (first, second) = rows_X[helps], np.divmod(best[helps], size)
        chosen_XK[rows_X, first], chosen_XK[rows_X, second] = chosen_XK[rows_X, second], chosen_XK[rows_X, first]
    return chosen_XK


def _match_nodes(current: ExpertMap, slots_LP: Slots, num_nodes: int) -> Slots:
    """The plan with its nodes renumbered."""
    if num_nodes == 1:
        return slots_LP
    by_node = (current.num_layers, num_nodes, -1)
    planned_LNQ = slots_LP.reshape(by_node)
    node_LN = assign(_overlap(current.slots_LP.reshape(by_node), planned_LNQ, current.num_experts))
    matched_LNQ = np.take_along_axis(planned_LNQ, node_LN[:, :, None], axis=1)
    return matched_LNQ.reshape(slots_LP.shape)


def _slot_weights(slots_LP: Slots, weight_LE: Floats) -> Floats:
    """Each slot's equal share of its expert's load."""
    per_copy_LE = weight_LE / count_replicas(slots_LP, weight_LE.shape[1])
    weight_LP: Floats = np.take_along_axis(per_copy_LE, slots_LP.astype(np.int64), axis=1)
    return weight_LP


def _overlap(current_XKS: Slots, planned_XKS: Slots, num_experts: int) -> Scores:
    """How many experts current rank k and planned rank j have in common, [X, K, K]."""
    held_XKE = _held(current_XKS, num_experts)
    wanted_XKE = _held(planned_XKS, num_experts)
    common_XKK: Scores = np.rint(held_XKE @ wanted_XKE.transpose(0, 2, 1)).astype(np.int16)
    return common_XKK


def _held(slots_XKS: Slots, num_experts: int) -> NDArray[np.float32]:
    held_XKE = np.zeros((*slots_XKS.shape[:2], num_experts), dtype=np.float32)
    np.put_along_axis(held_XKE, slots_XKS.astype(np.int64), 1.0, axis=2)
    return held_XKE


def _keep_slots(current_LRS: Slots, planned_LRS: Slots) -> Slots:
    """The planned experts of each rank, in an order that leaves those that it has already in their slots."""
    num_slots = current_LRS.shape[2]
    kept_LRS = np.full_like(planned_LRS, -1)
    waiting_LRS = np.ones(planned_LRS.shape, dtype=bool)
    for slot in range(num_slots):
        matches = waiting_LRS & (planned_LRS == current_LRS[:, :, slot, None])
        found = matches.any(axis=2)
        kept_LRS[:, :, slot][found] = current_LRS[:, :, slot][found]
        layer, rank = np.nonzero(found)
        waiting_LRS[layer, rank, matches[found].argmax(axis=1)] = False
    # The rest in the order of the plan: a rank has as many free slots as waiting experts, and both masks run by rank.
    kept_LRS[kept_LRS < 0] = planned_LRS[waiting_LRS]
    return kept_LRS


def _swap_for(slot: int, slots_P: Slots, weight_P: Floats, rank_P: Any, node_P: Any) -> int | None:
    """The slot to exchange with, or None: the one after which the fuller of the two ranks carries least."""
    rank, expert = rank_P[slot], slots_P[slot]
    if np.count_nonzero((rank_P == rank) & (slots_P == expert)) < 2:
        return None  # an earlier swap has changed this slot
    loads_R = np.bincount(rank_P, weights=weight_P)
    has_it_R = np.bincount(rank_P[slots_P == expert], minlength=len(loads_R)) > 0
    is_here_P = np.isin(slots_P, slots_P[rank_P == rank])
    allowed_P = (node_P == node_P[slot]) & ~has_it_R[rank_P] & ~is_here_P
    moved_P = weight_P[slot] - weight_P
    fuller_P = np.maximum(loads_R[rank] - moved_P, loads_R[rank_P] + moved_P)
    fuller_P[~allowed_P] = np.inf
    best = int(fuller_P.argmin())
    return best if fuller_P[best] <= loads_R.max() else None
