"""Runs control operations, one at a time, between the engine's steps.

An operation is a generator (operations.py, refresh.py): it yields while it waits (for requests to end, for a thread)
and is resumed at the next turn of the engine's loop, so it reads as a plain sequence and every effect falls on a step
boundary. A deadline or a cancellation is raised inside it, where it leaves a defined state. Queries and the aborts of
requests do not pass through here and are answered at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from headrace.engine.control.experts import balancer_of
from headrace.engine.control.operation import Cancelled, Operation
from headrace.engine.control.operations import AUTOMATIC, OPERATIONS, Run
from headrace.engine.control.sources import discard
from headrace.engine.control.state import EngineState
from headrace.errors import Conflict, DeadlineExceeded, InternalError, InvalidRequest, NotFound, RequestError
from headrace.observability.tracing import trace_id_of
from headrace.transport.messages import Control, ControlDone

logger = logging.getLogger(__name__)

MAX_KEPT = 100
DEFAULT_TIMEOUT_S = 600.0
QUERIES = ("status", "operations", "cancel", "experts", "expert_tokens")


class _Running:
    """The operation under way, and who waits for it."""

    def __init__(
        self,
        operation: Operation,
        arguments: msgspec.Struct,
        steps: Generator[None, None, dict[str, Any]],
        deadline_s: float,
    ) -> None:
        self.operation = operation
        self.arguments = arguments
        self.steps = steps
        self.deadline_s = deadline_s
        self.waiters: list[tuple[int, int]] = []  # (client, call id)


class ControlPlane:
    """All methods belong to the engine's thread. `emit(client, message)` sends an answer."""

    def __init__(
        self,
        state: EngineState,
        emit: Callable[[int, ControlDone], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._emit = emit
        self._clock = clock
        self._running: _Running | None = None
        self._kept: deque[Operation] = deque(maxlen=MAX_KEPT)

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def handle(self, client: int, message: Control) -> None:
        """Answers a query, or starts an operation, whose answer follows at its end."""
        try:
            arguments = dict(message.arguments)
            if message.operation in QUERIES:
                self._emit(client, ControlDone(message.call_id, result=self._query(message.operation, arguments)))
                return
            wait = arguments.pop("wait", True)
            running = self._start(message.operation, arguments, message.trace_parent)
            if wait:
                running.waiters.append((client, message.call_id))
        except RequestError as error:
            self._emit(client, ControlDone(message.call_id, error=error.info()))
            return
        self.advance()
        if not wait:  # what it does at once is done when its sender hears of it
            self._emit(client, ControlDone(message.call_id, result=running.operation.as_object()))

    def advance(self) -> None:
        """Lets the running operation go on as far as it can. Called at least once between two steps."""
        self._observe_experts()
        running = self._running
        if running is None:
            self._state.expire(self._clock())  # not while one runs: it may be the sender's
            return
        try:
            if self._clock() >= running.deadline_s:
                running.deadline_s = float("inf")  # once: what it does about it may take a turn more
                running.steps.throw(DeadlineExceeded(f"{running.operation.kind} did not end in time"))
            else:
                next(running.steps)
        except StopIteration as stop:
            self._finish(running, "succeeded", result=stop.value)
        except Cancelled as error:
            self._finish(running, "cancelled", error=error)
        except RequestError as error:
            self._finish(running, "failed", error=error)
        except Exception as error:
            logger.exception("control operation %s failed", running.operation.kind)
            message = f"{running.operation.kind} failed: {type(error).__name__}: {error}"
            self._finish(running, "failed", error=InternalError(message))

    def _observe_experts(self) -> None:
        balancer, state = self._state.balancer, self._state
        if balancer is None:
            return
        balancer.observe(state.core.counts.num_steps)
        balancer.expire()
        if self._running is None and state.refresh is None and state.has_weights and balancer.takes_turn():
            self._start(AUTOMATIC, {}, None)

    # --------------------------------------------------------------------------------------------------------- starting

    def _start(self, kind: str, arguments: dict[str, Any], trace_parent: str | None) -> _Running:
        entry = OPERATIONS.get(kind)
        if entry is None:
            raise NotFound(
                f"There is no control operation {kind[:40]!r}; there are: {', '.join((*OPERATIONS, *QUERIES))}.",
                param="operation",
            )
        if self._running is not None and self._running.operation.kind in (entry.cancels, AUTOMATIC):
            self._cancel(self._running.operation.id)
        if self._running is not None:
            other = self._running.operation
            age_s = time.time() - other.started
            raise Conflict(
                f"{kind} has to wait: {other.kind} ({other.id}) has been running for {age_s:.1f} s.",
                code="operation_running",
            )
        parsed = _parse(kind, arguments, entry.arguments)
        timeout_s = getattr(parsed, "timeout_s", None)
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        operation = Operation(kind=kind, deadline=time.time() + timeout_s, trace_id=trace_id_of(trace_parent))
        steps = _as_steps(entry.run, self._state, parsed)
        self._running = _Running(operation, parsed, steps, self._clock() + timeout_s + entry.grace_s)
        self._kept.append(operation)
        logger.info("control: %s (%s)", kind, operation.id)
        return self._running

    def _finish(
        self,
        running: _Running,
        state: str,
        result: dict[str, Any] | None = None,
        error: RequestError | None = None,
    ) -> None:
        self._running = None
        discard(getattr(running.arguments, "source", None))
        operation = running.operation
        operation.end(state, result, None if error is None else error.info())
        duration_s = (operation.ended or 0) - operation.started
        logger.info("control: %s (%s) %s after %.3f s%s", operation.kind, operation.id, state, duration_s,
                    f": {error.message}" if error else "")  # fmt: skip
        for client, call_id in running.waiters:
            self._emit(client, ControlDone(call_id, operation.as_object(), None if error is None else error.info()))
        if running.waiters and OPERATIONS[operation.kind].has_large_result:
            operation.result = []  # a hundred of them are kept

    # ---------------------------------------------------------------------------------------------------------- queries

    def _query(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if kind == "status":
            operation = self._running.operation.brief() if self._running is not None else None
            return {**self._state.status(), "operation": operation}
        if kind in ("experts", "expert_tokens"):
            clear, run = arguments.pop("clear", False), arguments.pop("run", "")
            if arguments or not isinstance(clear, bool) or not isinstance(run, str):
                raise InvalidRequest(f"{kind} takes clear, a boolean, and run, a string.", param="clear")
            balancer = balancer_of(self._state)
            balancer.observe(self._state.core.counts.num_steps)
            balancer.hear(run)
            if kind == "experts":
                return balancer.report(clear=clear)
            return {"tokens": balancer.tokens_by_rank(clear=clear).tolist()}
        wanted = arguments.pop("id", None)
        if arguments or not (wanted is None or isinstance(wanted, str)):
            raise InvalidRequest(f"{kind} takes id, a string, and nothing else.", param="id")
        if kind == "cancel":
            return self._cancel(wanted)
        found = [operation for operation in reversed(self._kept) if wanted in (None, operation.id)]
        if wanted is not None and not found:
            raise NotFound(f"There is no operation {wanted[:80]!r}; the last {MAX_KEPT} are kept.", param="id")
        return {"operations": [operation.as_object() for operation in found]}

    def _cancel(self, wanted: str | None) -> dict[str, Any]:
        running = self._running
        if running is None or wanted not in (None, running.operation.id):
            known = [operation for operation in self._kept if operation.id == wanted]
            if not known:
                raise NotFound("No such operation is running.", param="id")
            return known[0].as_object()  # it has ended
        try:
            running.steps.throw(Cancelled(f"{running.operation.kind} was cancelled"))
        except RequestError as error:
            self._finish(running, "cancelled" if isinstance(error, Cancelled) else "failed", error=error)
        except StopIteration as stop:
            self._finish(running, "succeeded", result=stop.value)
        return running.operation.as_object()


def _as_steps(run: Run, state: EngineState, arguments: msgspec.Struct) -> Generator[None, None, dict[str, Any]]:
    """An operation that never waits is a plain function."""
    outcome = run(state, arguments)
    return (yield from outcome) if isinstance(outcome, Generator) else outcome


def _parse(kind: str, arguments: dict[str, Any], into: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.convert(arguments, into)
    except msgspec.ValidationError as error:
        text = str(error)
        path = text.partition("`$.")[2].partition("`")[0]
        raise InvalidRequest(f"{kind}: {text}", param=path or None) from None
