"""The persistent batch: exact arrays by hand, and assertions that catch a wrong plan."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.runner.batch import PersistentBatch
from headrace.transport.plan import NewSequence, StepPlan
from headrace.types import SamplingParams


def make_batch() -> PersistentBatch:
    return PersistentBatch(max_num_seqs=4, max_tokens=16, num_blocks=12, block_size=4, vocab_size=50)


def new(slot: int, token_ids: list[int], **changes: Any) -> NewSequence:
    fields: dict[str, Any] = {
        "slot": slot,
        "token_ids": token_ids,
        "num_prompt_tokens": len(token_ids),
        "num_computed_tokens": 0,
        "block_ids": [],
        "params": SamplingParams(),
        "seed": 0,
    }
    return NewSequence(**(fields | changes))


def plan(slots: list[int], counts: list[int], samples: list[bool], **changes: Any) -> StepPlan:
    blocks = changes.pop("blocks", [[] for _ in slots])
    return StepPlan(step=0, slots=slots, num_tokens=counts, samples=samples, new_block_ids=blocks, **changes)


def run(batch: PersistentBatch, step: StepPlan, sampled: dict[int, int]) -> Any:
    batch.apply(step)
    rows = batch.rows(step)
    inputs, _, _ = batch.inputs(rows)
    batch.advance(rows)
    batch.append(list(sampled), list(sampled.values()))
    return inputs


def test_mixed_prefill_and_decode_step_by_hand() -> None:
    batch = make_batch()
    run(batch, plan([2], [3], [True], new=[new(2, [10, 11, 12], block_ids=[5])]), {2: 13})
    inputs = run(
        batch,
        plan(
            [2, 0],
            [1, 5],
            [True, False],
            new=[new(0, list(range(20, 30)), num_computed_tokens=4, block_ids=[7, 3])],
            blocks=[[], [9]],
        ),
        {2: 14},
    )
    assert inputs.token_ids_T.tolist() == [13, 24, 25, 26, 27, 28]
    assert inputs.positions_T.tolist() == [3, 4, 5, 6, 7, 8]
    assert inputs.kv_slots_T.tolist() == [23, 12, 13, 14, 15, 36]
    assert inputs.query_starts.tolist() == [0, 1, 6]
    assert inputs.context_lens_S.tolist() == [4, 9]
    assert inputs.block_tables_SB[:, :3].tolist() == [[5, 0, 0], [7, 3, 9]]
    assert inputs.logit_rows_R.tolist() == [0]
    inputs = run(batch, plan([0, 2], [1, 1], [True, True], blocks=[[], [1]]), {0: 40, 2: 15})
    assert inputs.token_ids_T.tolist() == [29, 14]
    assert inputs.kv_slots_T.tolist() == [37, 4]
    assert inputs.logit_rows_R.tolist() == [0, 1]
    assert {name: getattr(inputs, name).dtype.name for name in ("token_ids_T", "positions_T", "kv_slots_T")} == {
        "token_ids_T": "int32",
        "positions_T": "int32",
        "kv_slots_T": "int64",
    }
    assert batch.token_ids(0).tolist() == [*range(20, 30), 40]
    assert batch.token_ids(2).tolist() == [10, 11, 12, 13, 14, 15]


def test_a_slot_forgets_its_last_sequence() -> None:
    batch = make_batch()
    harsh = SamplingParams(presence_penalty=2.0, min_tokens=3, temperature=0.1, top_k=3, prompt_logprobs=1)
    run(batch, plan([1], [3], [True], new=[new(1, [1, 2, 3], block_ids=[4], params=harsh)]), {1: 4})
    assert batch.sampling_rows([1]).edits
    entered = plan([1], [2], [True], released=[1], new=[new(1, [7, 8], block_ids=[6])])
    inputs = run(batch, entered, {1: 9})
    assert inputs.logit_rows_R.tolist() == [1]
    assert inputs.block_tables_SB[:, :1].tolist() == [[6]]
    rows = batch.sampling_rows([1])
    assert not rows.edits
    assert (rows.params, rows.positions) == ([SamplingParams()], [3])


@pytest.mark.parametrize(
    "wrong",
    [
        plan([], [], [], released=[3]),  # free already
        plan([], [], [], new=[new(0, [1], block_ids=[1])]),  # in use
        plan([], [], [], new=[new(1, [1, 2], num_computed_tokens=2)]),  # nothing left to compute
        plan([], [], [], new=[new(1, [])]),
        plan([], [], [], new=[new(1, [50])]),  # not in the vocabulary
        plan([], [], [], new=[new(1, [-1])]),
        plan([], [], [], new=[new(1, [1] * 17)]),  # too long
        plan([], [], [], new=[new(1, [1], block_ids=[12])]),  # no such block
        plan([], [], [], new=[new(1, [1, 2], num_computed_tokens=1, params=SamplingParams(prompt_logprobs=0))]),
        plan([3], [1], [False]),  # free
        plan([0], [4], [False]),  # more than is known
        plan([0], [2], [True]),  # samples too early
        plan([0], [0], [False]),
        plan([0, 0], [1, 1], [False, False]),
        plan([1], [5], [True], new=[new(1, [1] * 5, block_ids=[1])]),  # no block for the fifth
    ],
)
def test_a_wrong_plan_is_caught(wrong: StepPlan) -> None:
    batch = make_batch()
    batch.apply(plan([], [], [], new=[new(0, [1, 2, 3], block_ids=[2])]))
    with pytest.raises(AssertionError):
        run(batch, wrong, {})


def test_the_longest_sequence_fits() -> None:
    batch = make_batch()
    run(batch, plan([0], [15], [True], new=[new(0, [1] * 15, block_ids=[0, 1, 2, 3])]), {0: 2})
    run(batch, plan([0], [1], [True]), {0: 3})
    assert batch.token_ids(0).shape == (17,)
