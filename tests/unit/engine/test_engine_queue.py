"""The heap that lets items leave from the middle, against a plain sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.scheduler.queue import KeyedHeap

moves = st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "discard"]), st.integers(0, 30)), max_size=400)


@given(moves)
def test_it_behaves_like_a_sorted_list(script: list[tuple[str, int]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    model: list[tuple[int, int, int]] = []  # key, order, item
    for order, (move, item) in enumerate(script):
        inside = any(entry[2] == item for entry in model)
        if move == "push" and not inside:
            heap.push(item % 5, item)
            model.append((item % 5, order, item))
            model.sort()
        elif move == "pop" and model:
            assert heap.peek() == model[0][2]
            assert heap.peek_key() == model[0][0]
            assert heap.pop() == model.pop(0)[2]
        elif move == "discard":
            assert heap.discard(item) == inside
            model = [entry for entry in model if entry[2] != item]
        assert len(heap) == len(model)
        assert sorted(heap) == sorted(entry[2] for entry in model)
    assert heap.peek() == (model[0][2] if model else None)


def test_discarded_items_do_not_pile_up() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.push(0, -1)
    for item in range(10_000):
        heap.push(1, item)
        heap.discard(item)
    assert len(heap._heap) < 200


def test_an_item_is_queued_once() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.push(1, 5)
    with pytest.raises(AssertionError, match="queued twice"):
        heap.push(2, 5)
    heap.discard(5)
    heap.push(2, 5)
    assert heap.pop() == 5
