"""Notices that a client has gone while its request is tokenised, queued, or being answered, streaming or not.

A watcher waits for ASGI's disconnect message; the handler runs its parts under `run`. On a disconnect the engine is
told first (`on_gone`), then the handler's part is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


class DisconnectWatch:
    """One per request, made once the body has been read; `stop()` it at the end."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None] | None = None) -> None:
        self.on_gone = on_gone
        self._watcher = asyncio.create_task(_watch(receive))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or ClientGone if the client went first. If it is cancelled, so is `work`."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.on_gone is not None:
                self.on_gone()
            raise ClientGone
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def stop(self) -> None:
        self._watcher.cancel()
        self.on_gone = None  # whose it is has this watch


async def _watch(receive: Receive) -> None:
    """No method: a task that was cancelled keeps its frame, and with it `self`, which has the task."""
    while (await receive())["type"] != "http.disconnect":
        pass
