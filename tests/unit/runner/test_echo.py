"""The mock executor: the same plan semantics as the real runner, and cheap enough for front-end benchmarks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from headrace.config.options import ModelConfig
from headrace.executor import create_executor, create_mock_executor
from headrace.testing.echo import EchoExecutor
from headrace.transport.plan import NewSequence, StepPlan
from headrace.types import SamplingParams


def enter(
    slot: int, token_ids: list[int], num_prompt: int, params: SamplingParams | None = None, **changes: int
) -> NewSequence:
    return NewSequence(
        slot=slot,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=changes.get("computed", 0),
        block_ids=[slot],
        params=params or SamplingParams(),
        seed=0,
        num_prompt_logprobs=changes.get("delivered", 0),
    )


def plan(rows: dict[int, tuple[int, bool]], **changes: list) -> StepPlan:  # type: ignore[type-arg]
    return StepPlan(
        step=0,
        slots=list(rows),
        num_tokens=[n for n, _ in rows.values()],
        samples=[s for _, s in rows.values()],
        new_block_ids=[[] for _ in rows],
        **changes,
    )


def make(**options: object) -> EchoExecutor:
    executor = EchoExecutor(vocab_size=100, check_plans=True, **options)  # type: ignore[arg-type]
    executor.allocate(8, 16, 4)
    return executor


def test_repeats_the_prompt_and_goes_on_there_after_a_preemption() -> None:
    executor = make()
    executor.execute(plan({1: (2, False)}, new=[enter(1, [5, 6, 7], 3)]))
    said = [executor.execute(plan({1: (1, True)})).token_ids[0] for _ in range(5)]
    assert said == [5, 6, 7, 5, 6]
    back = plan({3: (8, True)}, released=[1], new=[enter(3, [5, 6, 7, *said], 3)])
    result = executor.execute(back)
    assert (result.slots, result.token_ids) == ([3], [7])
    assert executor.execute(plan({3: (1, True)})).token_ids == [5]


def test_a_free_slot_is_an_error() -> None:
    executor = make()
    with pytest.raises(TypeError):
        executor.execute(plan({0: (1, True)}))
    with pytest.raises(AssertionError):
        executor.execute(plan({}, released=[0]))


def test_logprobs_have_the_asked_shape_and_follow_the_chunks() -> None:
    executor = make()
    params = SamplingParams(logprobs=2, prompt_logprobs=-1)
    first = executor.execute(plan({0: (3, False)}, new=[enter(0, [5, 6, 7, 8, 9], 5, params)]))
    second = executor.execute(plan({0: (2, True)}))
    assert first.prompt_logprobs[0].arrays()[0][:, 0].tolist() == [6, 7, 8]
    assert second.prompt_logprobs[0].arrays()[0].shape == (1, 101)
    ids, values, ranks = second.logprobs[0].arrays()
    assert ids.tolist() == [[5, 5, 6]]
    assert values.tolist() == [[-0.5, -0.5, -1.5]]
    assert ranks.tolist() == [1]
    again = plan({1: (5, True)}, released=[0], new=[enter(1, [5, 6, 7, 8, 9], 5, params, delivered=3)])
    assert executor.execute(again).prompt_logprobs[1].arrays()[0][:, 0].tolist() == [9]


def test_faults_are_injected_where_asked() -> None:
    executor = make(fail_at_step=3, fail_token_id=9)
    first = executor.execute(plan({0: (2, True), 1: (1, True)}, new=[enter(0, [9, 1], 2), enter(1, [4], 1)]))
    assert first.errors == {0: "injected failure"}
    assert (first.slots, first.token_ids) == ([1], [4])
    executor.execute(plan({1: (1, True)}, released=[0]))
    with pytest.raises(RuntimeError, match="step 3"):
        executor.execute(plan({1: (1, True)}))


def test_the_gate_holds_a_step() -> None:
    gate = threading.Event()
    executor = make(gate=gate)
    results: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: results.append(executor.execute(plan({0: (1, True)}, new=[enter(0, [4], 1)])).token_ids)
    )
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    gate.set()
    thread.join(5)
    assert results == [[4]]


def test_a_step_of_1024_sequences_costs_well_under_two_milliseconds() -> None:
    executor = EchoExecutor()
    executor.allocate(4096, 16, 1024)
    rows = dict.fromkeys(range(1024), (1, True))
    executor.execute(plan(rows, new=[enter(slot, [slot], 1) for slot in range(1024)]))
    decode = plan(rows)
    best = min(_timed(executor, decode) for _ in range(20))
    assert best < 0.002


def _timed(executor: EchoExecutor, step: StepPlan) -> float:
    start = time.perf_counter()
    executor.execute(step)
    return time.perf_counter() - start


def test_factory() -> None:
    mock = create_mock_executor(ModelConfig(served_model_name=("mine",)))
    assert (mock.info.backend, mock.info.name) == ("echo", "mine")


def test_factory_loads_a_model(tiny_model: Path) -> None:
    executor = create_executor(ModelConfig(backend="reference-exact"), tiny_model)
    info = executor.info
    assert info.vocab_size >= 260
    assert info.kv_bytes_per_token > 0
    executor.allocate(8, 16, 4)
    step = plan({0: (3, True)}, new=[enter(0, [1, 2, 3], 3)])
    result = executor.execute(step)
    assert result.slots == [0]
    assert 0 <= result.token_ids[0] < info.vocab_size
    executor.close()
