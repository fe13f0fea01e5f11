"""Requests whose grammar is still being compiled: they wait while others run, and end exactly once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from headrace.grammar import GrammarError
from headrace.testing.harness import EngineHarness
from headrace.types import FinishReason, GrammarSpec

SPEC = GrammarSpec("regex", "a")


class Compiling:
    """Takes the place of the executor's compiler."""

    def __init__(self, harness: EngineHarness) -> None:
        self.futures: list[Future[Any]] = []
        self.num_wakes = 0
        harness.executor.prepare_grammar = self.prepare  # type: ignore[method-assign]
        harness.core.wake = self.wake

    def prepare(self, spec: GrammarSpec) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def wake(self) -> None:
        self.num_wakes += 1


@pytest.fixture
def harness() -> EngineHarness:
    return EngineHarness()


@pytest.fixture
def compiling(harness: EngineHarness) -> Compiling:
    return Compiling(harness)


def test_it_waits_and_the_others_do_not(harness: EngineHarness, compiling: Compiling) -> None:
    waiting = harness.submit([1, 2], grammar=SPEC, n=2)
    free = harness.submit([3, 4])
    harness.run()
    assert harness.choice(free).finish is FinishReason.LENGTH
    assert harness.choice(waiting).finish is None
    assert not harness.core.has_work, "nothing to do until it is compiled"
    compiling.futures[0].set_result(None)
    assert compiling.num_wakes == 1
    assert harness.core.has_work
    harness.run()
    assert {harness.choice(waiting, n).finish for n in (0, 1)} == {FinishReason.LENGTH}
    harness.assert_idle()


def test_one_that_is_ready_at_once_does_not_wait(harness: EngineHarness, compiling: Compiling) -> None:
    future: Future[Any] = Future()
    future.set_result(None)
    harness.executor.prepare_grammar = lambda spec: future  # type: ignore[method-assign]
    request = harness.submit([1, 2], grammar=SPEC)
    harness.run()
    assert harness.choice(request).finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(GrammarError("no such rule"), 400, "invalid_grammar"), (RuntimeError("oh"), 500, "internal_error")],
)
def test_one_that_cannot_be_compiled_ends_alone(
    harness: EngineHarness, compiling: Compiling, error: Exception, status: int, code: str
) -> None:
    bad, good = harness.submit([1, 2], grammar=SPEC, n=2), harness.submit([1, 2], grammar=SPEC)
    compiling.futures[0].set_exception(error)
    compiling.futures[1].set_result(None)
    harness.run()
    for choice in (0, 1):
        record = harness.choice(bad, choice)
        assert record.finish is FinishReason.ERROR
        assert (record.error_status, record.error_code) == (status, code)
    assert harness.choice(good).finish is FinishReason.LENGTH
    harness.assert_idle()


def test_abort_and_deadline_reach_it_while_it_waits(harness: EngineHarness, compiling: Compiling) -> None:
    aborted, expired = harness.submit([1], grammar=SPEC), harness.submit([2], grammar=SPEC, timeout_s=5)
    assert harness.abort(aborted) == 1
    harness.clock.advance(6)
    harness.step()
    assert harness.choice(aborted).finish is FinishReason.ABORT
    assert harness.choice(expired).error_status == 504
    for future in compiling.futures:
        future.set_result(None)
    harness.run()
    harness.assert_idle()


def test_a_pause_keeps_it_after_it_is_compiled(harness: EngineHarness, compiling: Compiling) -> None:
    request = harness.submit([1, 2], grammar=SPEC)
    harness.control("pause", mode="keep")
    compiling.futures[0].set_result(None)
    assert not harness.core.has_work
    harness.control("resume")
    harness.run()
    assert harness.choice(request).finish is FinishReason.LENGTH


def test_it_still_waits_after_a_pause(harness: EngineHarness, compiling: Compiling) -> None:
    harness.control("pause", mode="keep")
    request, free = harness.submit([1, 2], grammar=SPEC), harness.submit([1, 2])
    harness.control("resume")
    harness.run()
    assert harness.choice(free).finish is FinishReason.LENGTH
    assert harness.choice(request).finish is None
    compiling.futures[0].set_result(None)
    harness.run()
    assert harness.choice(request).finish is FinishReason.LENGTH


def test_the_mock_engine_refuses_grammars(harness: EngineHarness) -> None:
    request = harness.submit([1, 2], grammar=SPEC)
    harness.run()
    assert harness.choice(request).error_status == 400
    harness.assert_idle()


def test_an_end_token_ends_a_constrained_choice_before_min_tokens(harness: EngineHarness, compiling: Compiling) -> None:
    """The runner lets it come so early only where the grammar has nothing else."""
    for grammar in (None, SPEC):
        request = harness.submit([1, 2], grammar=grammar, max_tokens=60, min_tokens=59, stop_token_ids=(54,))
        if grammar is not None:
            compiling.futures[0].set_result(None)
        harness.run()
        record = harness.choice(request)
        assert (len(record.token_ids) < 59) == (grammar is not None)
