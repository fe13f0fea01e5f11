"""When an engine counts as hung."""

from __future__ import annotations

from headrace.control.hang import HangWatch


def looks(watch: HangWatch, *looks: tuple[int, float]) -> list[bool]:
    return [watch.is_hung(heartbeat_ns, now_s) for heartbeat_ns, now_s in looks]


def test_the_same_heartbeat_for_too_long_is_a_hang() -> None:
    ticks = [(7, 100.0 + 0.5 * tick) for tick in range(8)]
    assert looks(HangWatch(3.0), *ticks) == [False] * 6 + [True] * 2


def test_every_heartbeat_begins_anew() -> None:
    watch = HangWatch(2.0)
    assert not any(looks(watch, *[(1, 100.0 + tick) for tick in range(2)]))
    assert not any(looks(watch, *[(2, 102.0 + tick) for tick in range(2)]))
    assert looks(watch, (2, 104.0)) == [True]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """All processes of a frozen container stop, and none of them hangs."""
    watch = HangWatch(5.0)
    assert looks(watch, (1, 100.0), (1, 3700.0), (1, 3701.0), (2, 3702.0)) == [False] * 4
