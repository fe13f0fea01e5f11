"""The loop on a real thread: greetings, answers, heartbeats, death and stopping. No sleeps: all waits are on events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace.engine.loop as loop_module
from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.loop import EngineLoop
from headrace.testing.strict import StrictExecutor
from headrace.transport.messages import (
    Abort,
    AbortDone,
    Control,
    EngineDead,
    EngineReady,
    FromEngine,
    Goodbye,
    Hello,
    StepOutputs,
    Submit,
)
from headrace.transport.plan import StepPlan, StepResult
from headrace.transport.stats import EngineStats
from headrace.types import FinishReason, RequestId, SamplingParams

WAIT_S = 20.0


class HeldExecutor(StrictExecutor):
    """Each step waits for the gate; `fail` makes the next one raise."""

    def __init__(self) -> None:
        super().__init__(max_model_len=1000)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.fail:
            raise RuntimeError("the machine is on fire")
        return super().execute(plan)


class RunningLoop:
    """A loop in its thread; what it emits lands in one queue per client."""

    def __init__(self) -> None:
        self.executor = HeldExecutor()
        core = EngineCore(self.executor, CacheConfig(block_size=4, num_kv_blocks=300), SchedulerConfig(max_num_seqs=4))
        self.emitted: dict[int, queue.Queue[FromEngine]] = {0: queue.Queue(), 1: queue.Queue()}
        self.published: queue.Queue[EngineStats] = queue.Queue()
        self.loop = EngineLoop(core, lambda client, message: self.emitted[client].put(message), self.published.put)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except RuntimeError as error:
            self.error = error

    def next(self, client: int = 0) -> Any:
        return self.emitted[client].get(timeout=WAIT_S)

    def until(self, condition: Callable[[FromEngine], bool], client: int = 0) -> list[Any]:
        """All messages up to the first that fulfils the condition."""
        seen = [self.next(client)]
        while not condition(seen[-1]):
            seen.append(self.next(client))
        return seen

    def stop(self) -> None:
        self.executor.gate.set()
        self.loop.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[RunningLoop]:
    it = RunningLoop()
    yield it
    it.stop()


def submit(request_id: int, max_tokens: int = 3) -> Submit:
    return Submit(
        request_id=RequestId(request_id),
        public_id=f"r{request_id}",
        prompts=((1, 2, 3),),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
    )


def is_last(message: FromEngine) -> bool:
    return isinstance(message, StepOutputs) and any(message.finished)


def ends(messages: list[Any]) -> list[tuple[int, int]]:
    """(request id, finish reason) of all terminal rows."""
    outputs = [message for message in messages if isinstance(message, StepOutputs)]
    return [pair for rows in outputs for pair in zip(rows.request_ids, rows.finished, strict=True) if pair[1]]


def test_hello_submit_and_the_tokens_come(running: RunningLoop) -> None:
    running.loop.post(0, Hello(0, "first"))
    ready = running.next()
    assert isinstance(ready, EngineReady)
    assert ready.info.vocab_size == 64
    running.loop.post(0, submit(1))
    rows = running.until(is_last)
    assert sum(len(message.token_ids) for message in rows) == 3
    assert ends(rows) == [(1, FinishReason.LENGTH)]


def test_an_abort_is_answered_after_the_last_rows(running: RunningLoop) -> None:
    running.executor.gate.clear()
    running.loop.post(0, submit(1, 500))
    running.loop.post(0, submit(2, 500))
    assert running.executor.entered.wait(WAIT_S)
    running.loop.post(1, Abort(call_id=9, names=("r1", "r2", "r3"), reason="operator"))
    running.loop.post(0, Abort(call_id=10, request_ids=(RequestId(1),)))
    running.executor.gate.set()
    seen = running.until(lambda message: isinstance(message, AbortDone))
    assert seen[-1] == AbortDone(10, 0)
    assert ends(seen) == [(1, FinishReason.ABORT), (2, FinishReason.ABORT)]
    assert running.next(1) == AbortDone(9, 2)


def test_control_is_answered_with_result_or_error(running: RunningLoop) -> None:
    running.loop.post(0, Control(call_id=1, operation="reset_prefix_cache"))
    answer = running.next()
    assert (answer.call_id, answer.error, answer.result["result"]) == (1, None, [{"rank": 0, "num_blocks": 0}])
    running.loop.post(0, Control(call_id=2, operation="fly"))
    answer = running.next()
    assert (answer.call_id, answer.result, answer.error.status) == (2, None, 404)


def test_a_restarted_front_end_starts_clean(running: RunningLoop) -> None:
    running.loop.post(0, Hello(0, "first"))
    assert isinstance(running.next(), EngineReady)
    running.executor.gate.clear()
    running.loop.post(0, submit(1, 500))
    assert running.executor.entered.wait(WAIT_S)
    running.loop.post(0, Hello(0, "second"))
    running.loop.post(0, submit(1, 2))
    running.executor.gate.set()
    seen = running.until(lambda message: isinstance(message, EngineReady))
    assert ends(seen) == []
    fresh = running.until(is_last)
    assert ends(fresh) == [(1, FinishReason.LENGTH)]
    assert sum(len(message.token_ids) for message in fresh) == 2


def test_the_same_hello_again_aborts_nothing(running: RunningLoop) -> None:
    running.loop.post(0, Hello(0, "first"))
    running.executor.gate.clear()
    running.loop.post(0, submit(1, 3))
    running.loop.post(0, Hello(0, "first"))
    running.executor.gate.set()
    assert ends(running.until(is_last)) == [(1, FinishReason.LENGTH)]


def test_goodbye_ends_what_the_front_end_had(running: RunningLoop) -> None:
    running.executor.gate.clear()
    running.loop.post(0, submit(1, 900))
    assert running.executor.entered.wait(WAIT_S)
    running.loop.post(0, Goodbye())
    running.loop.post(1, Abort(call_id=1))
    running.executor.gate.set()
    assert running.next(1) == AbortDone(1, 0)


def test_it_publishes_while_idle(running: RunningLoop) -> None:
    for _ in range(2):
        assert running.published.get(timeout=WAIT_S).step == 0


def test_it_publishes_at_once_when_the_work_ends(monkeypatch: pytest.MonkeyPatch, running: RunningLoop) -> None:
    monkeypatch.setattr(loop_module, "HEARTBEAT_S", 3600.0)  # so that no heartbeat brings the news instead
    running.loop.post(0, submit(1, 5))
    stats = running.published.get(timeout=WAIT_S)
    while stats.num_generated_tokens < 5:
        stats = running.published.get(timeout=WAIT_S)
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 300)


def test_a_dead_engine_tells_every_client_and_raises(running: RunningLoop) -> None:
    running.loop.post(0, Hello(0, "a"))
    running.loop.post(1, Hello(1, "b"))
    running.executor.fail = True
    running.loop.post(0, submit(1))
    for client in (0, 1):
        dead = running.until(lambda message: isinstance(message, EngineDead), client)[-1]
        assert "the machine is on fire" in dead.reason
    running.thread.join(WAIT_S)
    assert isinstance(running.error, RuntimeError)


def test_stop_ends_what_is_alive_and_what_was_posted_before(running: RunningLoop) -> None:
    running.executor.gate.clear()
    running.loop.post(0, submit(1, 900))
    assert running.executor.entered.wait(WAIT_S)
    running.loop.post(0, submit(2, 900))
    running.loop.stop()
    running.loop.post(0, submit(3, 900))
    running.executor.gate.set()
    running.thread.join(WAIT_S)
    messages = list(running.emitted[0].queue)
    assert sorted(ends(messages)) == [(request, FinishReason.ABORT) for request in (1, 2, 3)]
    errors = {detail.error.code for message in messages for detail in message.details if detail.error is not None}
    assert errors == {"aborted"}
