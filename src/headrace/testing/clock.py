"""A clock for tests that moves only when it is told to; stands in wherever a component takes `clock`."""

from __future__ import annotations


class FakeClock:
    """Callable like `time.monotonic`. Not thread-safe: the test that owns it moves it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self.now_s += seconds
