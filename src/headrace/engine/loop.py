"""Drives an `EngineCore` on one thread: messages in, steps, outputs out, heartbeats.

The engine process and `InprocClient` both run it; they give it `emit` and `publish`, and call `post` from whatever
thread they receive on. It owns no socket and starts no thread. Messages are handled between two steps, in the order
they came.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.config.options import ControlConfig, ExpertsConfig
from headrace.engine.balancer import ExpertBalancer
from headrace.engine.control import ControlPlane
from headrace.engine.control.state import EngineState
from headrace.engine.core import EngineCore
from headrace.transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortDone,
    Control,
    ControlDone,
    EngineDead,
    EngineReady,
    FromEngine,
    Goodbye,
    Hello,
    Lifecycle,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.transport.stats import EngineStats

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # at least this often, even when idle
BALANCE_S = 1.0  # how old the balance of experts may be: it takes a look at every layer
MIN_PUBLISH_S = 0.2  # at most this often while it works: it costs a tenth of what else a step does in Python


class EngineLoop:
    """`post` and `stop` are for any thread; all else happens on the one that is inside `run`."""

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[int, FromEngine], None],
        publish: Callable[[EngineStats], None] | None = None,
        control: ControlConfig | None = None,
        weights_path: Path | None = None,
        experts: ExpertsConfig | None = None,
    ) -> None:
        """`weights_path` is where the weights were loaded from, and can be again after a sleep."""
        self._core = core
        core.on_lifecycle = self._tell_all
        core.wake = self.wake
        state = EngineState(core, control or ControlConfig(), weights_path, self.wake)
        if core.executor.expert_layers:
            state.balancer = ExpertBalancer(core.executor, experts or ExpertsConfig(), self.wake)
        self._balancer = state.balancer
        self._balance = (0.0, 0.0)  # mean over layers, the worst
        self._balanced_s = float("-inf")
        self._control = ControlPlane(state, self._emit_answer)
        self._emit = emit
        self._publish = publish
        self._inbox: queue.SimpleQueue[tuple[int, ToEngine] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._clients: dict[int, str | None] = {}  # front end -> its incarnation
        self._published_s = 0.0

    def post(self, client: int, message: ToEngine) -> None:
        """Hands a message to the engine; never blocks."""
        self._inbox.put((client, message))

    def wake(self) -> None:
        """Makes the engine look around: something that it waits for has happened. From any thread."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Makes `run` return after the step under way; what is alive then ends with ABORT. Idempotent."""
        self._stopping.set()
        self._inbox.put(None)

    def run(self) -> None:
        """Serves until `stop`. If the core fails, every client hears of it before the exception goes on."""
        try:
            self._publish_now()
            while True:
                self._receive()
                if self._stopping.is_set():
                    break
                self._core.executor.check()
                had_work = self._core.has_work
                if had_work:
                    self._emit_outputs(self._core.step())
                else:
                    self._core.expire()
                self._control.advance()  # after the step: it may have been the one that an operation waited for
                self._publish_if_due(had_work)
            while not self._inbox.empty():
                self._receive()
            self._core.abort(-1, Abort(call_id=0, reason="shutdown"))
            self._emit_outputs(self._core.take_outputs())
            self._publish_now()
        except BaseException as error:
            self._die(error)
            raise

    # ------------------------------------------------------------------------------------------------------------ inbox

    def _receive(self) -> None:
        """Handles all that has come. Sleeps on the inbox when there is nothing to compute, until the next heartbeat."""
        inbox = self._inbox
        try:
            if not (self._core.has_work or self._stopping.is_set()):
                item = inbox.get(timeout=max(0.0, self._published_s + HEARTBEAT_S - time.monotonic()))
                if item is not None:
                    self._handle(*item)
            for _ in range(inbox.qsize()):  # not for ever: whoever posts without end must not hold up the steps
                item = inbox.get_nowait()
                if item is not None:
                    self._handle(*item)
        except queue.Empty:
            return

    def _handle(self, client: int, message: ToEngine) -> None:
        self._clients.setdefault(client, None)
        if isinstance(message, Submit):
            self._core.submit(client, message)
        elif isinstance(message, Abort):
            num_aborted = self._core.abort(client, message)
            if num_aborted:
                self._published_s = 0.0  # what was freed shows at once
            self._emit_outputs(self._core.take_outputs())  # the choices' last rows, ahead of the answer
            self._emit(client, AbortDone(message.call_id, num_aborted))
        elif isinstance(message, Control):
            self._control.handle(client, message)
        elif isinstance(message, Hello):
            self._greet(client, message)
        elif isinstance(message, Goodbye):
            self._core.abort_client(client)
            del self._clients[client]

    def _greet(self, client: int, hello: Hello) -> None:
        known = self._clients[client]
        if known is not None and known != hello.incarnation:
            num_aborted = self._core.abort_client(client)
            logger.warning("front end %d was restarted; %d choices of the old one aborted", client, num_aborted)
        if hello.protocol != PROTOCOL_VERSION:
            logger.warning("front end %d speaks protocol %d, not %d", client, hello.protocol, PROTOCOL_VERSION)
        self._clients[client] = hello.incarnation
        self._emit(client, EngineReady(self._core.info, lifecycle=self._core.lifecycle))

    # --------------------------------------------------------------------------------------------------------- outwards

    def _emit_outputs(self, outputs: dict[int, StepOutputs]) -> None:
        for client, rows in outputs.items():
            self._emit(client, rows)

    def _emit_answer(self, client: int, answer: ControlDone) -> None:
        """After the rows that the operation has made: whoever was ended hears of it first."""
        self._emit_outputs(self._core.take_outputs())
        if client in self._clients:
            self._emit(client, answer)

    def _tell_all(self, lifecycle: Lifecycle) -> None:
        self._published_s = 0.0
        self._emit_outputs(self._core.take_outputs())
        for client in self._clients:
            self._emit(client, lifecycle)

    def _publish_if_due(self, had_work: bool) -> None:
        """Heartbeats while idle, more often while working, and at once when the work ends."""
        has_ended = had_work and not self._core.has_work
        age_s = time.monotonic() - self._published_s
        if has_ended or age_s >= (MIN_PUBLISH_S if had_work else HEARTBEAT_S):
            self._publish_now()

    def _publish_now(self) -> None:
        self._published_s = time.monotonic()
        if self._publish is not None:
            self._publish(self._stats())

    def _stats(self) -> EngineStats:
        stats, balancer = self._core.stats(), self._balancer
        if balancer is None:
            return stats
        if self._published_s - self._balanced_s >= BALANCE_S:
            self._balanced_s, self._balance = self._published_s, balancer.balance_now()
        mean, worst = self._balance
        return msgspec.structs.replace(
            stats,
            expert_balance_ppm=round(mean * 1e6),
            worst_expert_balance_ppm=round(worst * 1e6),
            num_expert_rebalances=balancer.counts.num_rebalances,
            num_expert_failures=balancer.counts.num_failures,
            num_expert_bytes=balancer.counts.num_bytes,
        )

    def _die(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        logger.error("the engine has died: %s", reason)
        for client in list(self._clients):
            try:
                self._emit(client, EngineDead(reason))
            except Exception:  # one client that cannot be reached must not keep the others from hearing
                logger.exception("could not tell client %d", client)
