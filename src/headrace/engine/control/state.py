"""What control operations act on: the core's requests, the executor's weights and memory, and the state of both.

    READY ──sleep──► ASLEEP(tags) ──wake──► READY
    READY ──begin in place──► UPDATING ──commit──► READY
                              UPDATING ──abort, silence──► POISONED ──full refresh──► READY

Every change is told to all front ends at once. While nothing can be computed (any state but READY, or paused),
requests that come are held, or refused by the core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from headrace.config.options import ControlConfig
from headrace.engine.balancer import ExpertBalancer
from headrace.engine.control.background import Background, T
from headrace.engine.core import EngineCore
from headrace.errors import Conflict, DeadlineExceeded
from headrace.executor.base import Executor, Stage
from headrace.transport.messages import Lifecycle
from headrace.weights.checkpoint import fingerprint
from headrace.weights.incoming.process_group import TransferGroup

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
Steps = Generator[None, None, T]
_MAX_SHOWN = 5


@dataclass
class OpenRefresh:
    """A refresh between begin and commit."""

    stage: Stage
    is_staged: bool  # the old weights serve on
    is_delta: bool
    started: float  # unix time
    last_heard_s: float  # infinity while an operation works on it
    silence_s: float
    apply_s: float = 0.0  # reading and packing
    path: Path | None = None  # where all of it came from, if from one place on disk
    sources: int = 0
    kinds: set[str] = field(default_factory=set)  # of the sources
    began_s: float = 0.0  # on the engine's clock


@dataclass
class EngineState:
    """Belongs to the engine's thread. `wake` makes the engine's loop take another turn, from any thread."""

    core: EngineCore
    config: ControlConfig
    path: Path | None  # where the weights in use can be read again
    wake: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    refresh: OpenRefresh | None = None
    mark: str = ""  # of the files at `path`, when they were read
    groups: dict[str, TransferGroup] = field(default_factory=dict)  # by name
    balancer: ExpertBalancer | None = None  # of a model with experts

    def __post_init__(self) -> None:
        self.remember(self.path)

    def remember(self, path: Path | None) -> None:
        """The weights in use were read from here; None: from nowhere that can be read again."""
        self.path = path
        self.mark = "" if path is None else fingerprint(path)

    def forget_staged_experts(self, reason: str) -> None:
        """They belong to weights that go."""
        if self.balancer is not None:
            self.balancer.forget_staged(reason)

    @property
    def executor(self) -> Executor:
        return self.core.executor

    @property
    def lifecycle(self) -> Lifecycle:
        return self.core.lifecycle

    @property
    def has_weights(self) -> bool:
        return "weights" not in self.lifecycle.asleep and self.lifecycle.state not in ("updating", "poisoned")

    def change(self, **changes: Any) -> None:
        """New facts; the core tells the front ends, and lets held requests go if it can serve."""
        self.core.change_lifecycle(**changes)

    def background(self, work: Callable[[], T]) -> Steps[T]:
        """Slow work that nobody else can see, in a thread beside the steps."""
        return Background(work, self.wake).wait()

    def on_stage(self, work: Callable[[], T]) -> Steps[T]:
        """Work on the open refresh. If the operation is broken off, the refresh goes: its thread may still write, or
        has just written what the sender is told has failed."""
        task = Background(work, self.wake)
        try:
            return (yield from task.wait())
        except BaseException as error:
            if error is not task.error:
                for group in self.groups.values():
                    group.abort_if_busy()  # else its thread would sit in it until its own time is over
                self.drop_refresh(f"a refresh was given up while it was read: {error}")
            raise

    # ------------------------------------------------------------------------------------------------- pausing requests

    def settle(self, mode: PauseMode) -> Steps[int]:
        """From here on new requests are held; then those that are alive are ended, awaited or left as they are.

        Returns how many were ended. If they do not end in time, the deadline names them and everything goes on. Those
        that are frozen never end, so nobody waits for them.
        """
        self.core.hold()
        if mode == "abort":
            return self.core.abort_all("control")
        try:
            while mode == "wait" and self.core.num_active:
                if not self.lifecycle.is_serving:
                    raise Conflict(f"{self.core.num_active} choices are frozen and cannot end: abort or keep them.")
                yield
        except DeadlineExceeded as error:
            left = self.left()
            self.core.release()
            raise DeadlineExceeded(f"{error.message}: {left}") from None
        except BaseException:
            self.core.release()
            raise
        return 0

    def left(self) -> str:
        """What still runs, in words."""
        names = ", ".join(self.core.active_names(_MAX_SHOWN))
        return f"{self.core.num_active} choices still run, of requests {names}"

    # ------------------------------------------------------------------------------------------------------ refreshing

    def expire(self, now_s: float) -> None:
        """Ends a refresh whose sender has gone silent."""
        refresh = self.refresh
        if refresh is not None and now_s - refresh.last_heard_s > refresh.silence_s:
            logger.error("the refresh was aborted: nothing was heard of it for %.0f s", refresh.silence_s)
            self.drop_refresh(f"a refresh was given up after {refresh.silence_s:g} s without a word from its sender")

    def drop_refresh(self, reason: str) -> None:
        """Ends the open refresh without its weights. Staged: the old ones serve on. In place: there are none."""
        refresh, self.refresh = self.refresh, None
        if refresh is None:
            return
        self.executor.close_stage(refresh.stage)
        if not refresh.is_staged and self.lifecycle.state == "updating":
            self.poison(reason)

    def poison(self, reason: str, **changes: Any) -> None:
        """There are no weights that could serve, and nobody is bringing any."""
        self.core.fail_all(f"there are no weights: {reason}", code="weights_poisoned")
        self.change(state="poisoned", reason=f"{reason}; refresh all weights", **changes)

    # ---------------------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, Any]:
        lifecycle, stats, refresh = self.lifecycle, self.core.stats(), self.refresh
        return {
            "state": lifecycle.state,
            "reason": lifecycle.reason,
            "asleep": list(lifecycle.asleep),
            "is_paused": lifecycle.is_paused,
            "pause_mode": lifecycle.pause_mode,
            "is_draining": lifecycle.is_draining,
            "version": lifecycle.version,
            "epoch": lifecycle.epoch,
            "refresh": None
            if refresh is None
            else {
                "staged": refresh.is_staged,
                "delta": refresh.is_delta,
                "num_tensors": refresh.stage.num_tensors,
                "num_bytes": refresh.stage.num_bytes,
                "started": refresh.started,
            },
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
        }


def resident_bytes() -> int:
    """Physical memory of this process, shared pages included."""
    return int(psutil.Process().memory_info().rss)
