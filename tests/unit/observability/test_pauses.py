"""Pauses of the garbage collector, as a front end notices them."""

from __future__ import annotations

import gc
import time

from headrace.observability.pauses import CollectorPauses


def test_each_collection_is_noticed_once_until_it_is_closed() -> None:
    pauses = CollectorPauses()
    try:
        list(pauses.take())  # of a collection that happened by itself
        began_s = time.perf_counter()
        gc.collect()
        whole_s = time.perf_counter() - began_s
        seconds = list(pauses.take())
        assert 0 < max(seconds) <= whole_s
        assert list(pauses.take()) == []
    finally:
        pauses.close()
    pauses.close()
    gc.collect()
    assert list(pauses.take()) == []
