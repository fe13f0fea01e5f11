"""Slow work of an operation, in a thread: the engine goes on with its steps and looks in between whether it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `work` at once; `on_done` is called in its thread at the end. Nobody stops it: whoever no longer wants the
    result drops it."""

    def __init__(self, work: Callable[[], T], on_done: Callable[[], None]) -> None:
        self._work = work
        self._on_done = on_done
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._is_done = threading.Event()
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """What the work itself has raised."""
        return self._error

    def wait(self) -> Generator[None, None, T]:
        """For an operation: `result = yield from background.wait()`. Raises what the work raised."""
        while not self._is_done.is_set():
            yield
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set where there is no error

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._is_done.set()
            self._on_done()
