"""What has to be copied, and from where, to get from one map to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from headrace.eplb.layout import ExpertMap


class Move(msgspec.Struct, frozen=True):
    """One expert that a slot has to be filled with."""

    layer: int
    expert: int
    target_slot: int
    target_rank: int
    source_rank: int
    """Who holds it under the old map; the target rank itself copies from another of its slots.

    Several slots of a rank that wait for one expert name the same source: it needs to be sent once.
    """

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank


def moves(old: ExpertMap, new: ExpertMap, *, num_nodes: int = 1) -> list[Move]:
    """Every slot whose expert changes, by layer and slot. Both maps have the same sizes.

    A source is taken on the target's node where there is one, then the rank that sends least so far, in this layer and
    then in all. There always is one: in a map every expert has a slot.
    """
    assert (old.slots_LP.shape, old.num_ranks) == (new.slots_LP.shape, new.num_ranks)
    ranks_per_node = max(old.num_ranks // num_nodes, 1)
    sent_in_all: Counter[int] = Counter()
    found: list[Move] = []
    for layer in range(old.num_layers):
        old_P, new_P = old.slots_LP[layer], new.slots_LP[layer]
        changed = np.nonzero(old_P != new_P)[0].tolist()
        if not changed:
            continue
        holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(old_P.tolist()):
            holders.setdefault(expert, []).append(slot // old.slots_per_rank)
        sent_in_layer: Counter[int] = Counter()
        sources: dict[tuple[int, int], int] = {}
        for slot in changed:
            expert, rank = int(new_P[slot]), slot // old.slots_per_rank
            if (rank, expert) not in sources:
                source = _source(
                    holders[expert], rank, ranks_per_node, sent_in_layer=sent_in_layer, sent_in_all=sent_in_all
                )
                sources[rank, expert] = source
                if source != rank:
                    sent_in_layer[source] += 1
                    sent_in_all[source] += 1
            found.append(Move(layer, expert, slot, rank, sources[rank, expert]))
    return found


def fetches(all_moves: Iterable[Move]) -> list[Move]:
    """Those that cross ranks, once for each expert and rank: what has to be sent."""
    first = {(move.layer, move.target_rank, move.expert): move for move in all_moves if not move.is_local}
    return list(first.values())


def busiest_rank(all_moves: Iterable[Move]) -> int:
    """The most experts that any one rank sends, or that any one receives: how long the moves take."""
    wanted = fetches(all_moves)
    received = Counter(move.target_rank for move in wanted)
    sent = Counter(move.source_rank for move in wanted)
    return max([*received.values(), *sent.values()], default=0)


def _source(
    holders: list[int], rank: int, ranks_per_node: int, *, sent_in_layer: Counter[int], sent_in_all: Counter[int]
) -> int:
    if rank in holders:
        return rank
    node = rank // ranks_per_node
    return min(holders, key=lambda one: (one // ranks_per_node != node, sent_in_layer[one], sent_in_all[one], one))
