"""Taking step messages apart: every token once, in order, to the right choice; every choice ends once; readers wake."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.admission import Admission
from headrace.client.base import Delta
from headrace.client.streams import WAKES_PER_TURN, ClientStream, StreamTable
from headrace.config.options import AdmissionConfig
from headrace.errors import ErrorInfo
from headrace.transport.messages import RowDetail, StepOutputs, Submit
from headrace.types import FinishReason, LogprobRows, RequestId, SamplingParams

ERROR = ErrorInfo(503, "unavailable", "engine_dead", "gone")


class Bench:
    """A table whose aborts are kept in a list, and its admission."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.aborts: list[tuple[int, int | None, str]] = []
        self.admission = Admission(AdmissionConfig(max_queued_requests=2000))
        self.table = StreamTable(loop, lambda *abort: self.aborts.append(abort))

    def open(self, request_id: int, *, num_prompts: int = 1, n: int = 1) -> ClientStream:
        request = Submit(
            request_id=RequestId(request_id),
            public_id="x",
            prompts=((1, 2, 3),) * num_prompts,
            params=SamplingParams(n=n),
        )
        return self.table.open(request, self.admission.admit(num_prompts * n, 3 * num_prompts))


def outputs(*rows: tuple[int, int, list[int], int], details: list[RowDetail] | None = None) -> StepOutputs:
    return StepOutputs(
        request_ids=[row[0] for row in rows],
        choices=[row[1] for row in rows],
        num_tokens=[len(row[2]) for row in rows],
        token_ids=[token for row in rows for token in row[2]],
        finished=[row[3] for row in rows],
        details=details or [],
    )


async def drain(stream: ClientStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


async def test_tokens_of_several_requests_and_choices() -> None:
    bench = Bench(asyncio.get_running_loop())
    one, two = bench.open(1), bench.open(2, n=2)
    bench.table.deliver(outputs((2, 1, [5, 6], 0), (1, 0, [], 0), (9, 0, [1, 2], 0), (2, 0, [7], 1)))
    bench.table.deliver(outputs((1, 0, [8], 2), (2, 1, [9], 3)))
    assert [(d.choice, d.token_ids, d.finish_reason) for d in await drain(one)] == [(0, [8], FinishReason.LENGTH)]
    assert {d.choice: (d.token_ids, d.finish_reason) for d in await drain(two)} == {
        0: ([7], FinishReason.STOP),
        1: ([5, 6, 9], FinishReason.ABORT),
    }
    assert len(bench.table) == 0


async def test_details_merge() -> None:
    bench = Bench(asyncio.get_running_loop())
    stream = bench.open(1)
    rows = [LogprobRows.from_arrays(np.array([[i]]), np.array([[-i]]), np.array([i])) for i in range(3)]
    first = RowDetail(
        row=0, logprobs=rows[0], prompt_logprobs=rows[2], num_cached_tokens=16, queue_s=0.5, prefill_s=1.0
    )
    bench.table.deliver(outputs((1, 0, [0], 0), details=[first]))
    last = RowDetail(row=0, logprobs=rows[1], stop_token_id=1, error=ERROR, num_preemptions=2)
    bench.table.deliver(outputs((1, 0, [1], 4), details=[last]))
    (delta,) = await drain(stream)
    assert delta == Delta(
        choice=0,
        token_ids=[0, 1],
        logprobs=rows[0] + rows[1],
        prompt_logprobs=rows[2],
        finish_reason=FinishReason.ERROR,
        stop_token_id=1,
        error=ERROR,
        num_cached_tokens=16,
        queue_s=0.5,
        prefill_s=1.0,
        num_preemptions=2,
    )


async def test_a_waiting_reader_wakes_once_per_step() -> None:
    bench = Bench(asyncio.get_running_loop())
    stream = bench.open(1, n=8)
    reads: list[list[Delta]] = []

    async def read() -> None:
        async for deltas in stream:
            reads.append(deltas)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    bench.table.deliver(outputs(*[(1, choice, [choice], 0) for choice in range(8)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.table.deliver(outputs(*[(1, choice, [choice], 2) for choice in range(8)]))
    await reader
    assert [len(deltas) for deltas in reads] == [8, 8]


async def test_a_thousand_readers_take_turns_and_merge_what_they_miss() -> None:
    """Deltas merge when the loop is behind, and nothing else on the loop waits for all readers."""
    loop = asyncio.get_running_loop()
    bench = Bench(loop)
    streams = [bench.open(request_id) for request_id in range(1000)]
    got: list[list[list[int]]] = [[] for _ in streams]
    most = 0

    async def read(number: int) -> None:
        async for deltas in streams[number]:
            got[number].append(deltas[0].token_ids)

    readers = [asyncio.create_task(read(number)) for number in range(1000)]
    await asyncio.sleep(0)
    for step in range(4):
        bench.table.deliver(outputs(*[(request_id, 0, [step], 2 * (step == 3)) for request_id in range(1000)]))
        before = sum(map(len, got))
        await asyncio.sleep(0)  # one turn of everybody else
        most = max(most, sum(map(len, got)) - before)
    await asyncio.gather(*readers)
    assert 0 < most <= WAKES_PER_TURN
    assert all([token for read in reads for token in read] == [0, 1, 2, 3] for reads in got)
    assert [1, 2, 3] in got[0], "the first one was woken at once, and again when all the others had been"
    assert got[-1] == [[0, 1, 2, 3]]


async def test_a_stalled_reader_keeps_one_delta_and_slows_nobody() -> None:
    bench = Bench(asyncio.get_running_loop())
    stalled, *others = [bench.open(request_id) for request_id in range(2000)]
    num_got = 0

    async def read(stream: ClientStream) -> None:
        nonlocal num_got
        async for deltas in stream:
            num_got += len(deltas[0].token_ids)

    readers = [asyncio.create_task(read(stream)) for stream in others]
    for step in range(20):
        bench.table.deliver(outputs(*[(request_id, 0, [7], 0) for request_id in range(2000)]))
        async with asyncio.timeout(5):
            while True:
                if num_got == (step + 1) * len(others):
                    break
                await asyncio.sleep(0)
    assert await anext(stalled) == [Delta(0, [7] * 20)]
    for stream in (stalled, *others):
        stream.close()
    await asyncio.gather(*readers)
    assert len(bench.table) == 0


async def test_a_reader_that_is_cancelled_in_the_queue_of_wakes_keeps_nobody_waiting() -> None:
    bench = Bench(asyncio.get_running_loop())
    streams = [bench.open(request_id) for request_id in range(3 * WAKES_PER_TURN)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    bench.table.deliver(outputs(*[(request_id, 0, [7], 2) for request_id in range(len(streams))]))
    for reader in readers[WAKES_PER_TURN : 2 * WAKES_PER_TURN]:
        reader.cancel()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*readers, return_exceptions=True)
    cancelled = [isinstance(result, asyncio.CancelledError) for result in results]
    assert cancelled == [False] * WAKES_PER_TURN + [True] * WAKES_PER_TURN + [False] * WAKES_PER_TURN


async def test_the_permit_is_released_at_first_outputs_and_ends() -> None:
    bench = Bench(asyncio.get_running_loop())
    stream = bench.open(1, num_prompts=2, n=2)

    def held() -> tuple[int, int]:
        return bench.admission.num_choices, bench.admission.num_tokens

    assert held() == (4, 6)
    bench.table.deliver(outputs((1, 3, [5], 0)))
    assert held() == (3, 3)  # the second prompt has left the queue with its first choice
    bench.table.deliver(outputs((1, 2, [5], 0), (1, 3, [5], 1)))
    assert held() == (2, 3)
    stream.close()
    assert held() == (0, 0)


async def test_close_tells_the_engine_first_and_swallows_late_rows() -> None:
    bench = Bench(asyncio.get_running_loop())
    stream = bench.open(1, n=2)
    bench.table.deliver(outputs((1, 0, [5], 1)))
    stream.close("disconnect")
    stream.close()
    assert bench.aborts == [(1, None, "disconnect")]
    bench.table.deliver(outputs((1, 1, [6], 0), (1, 1, [], 3)))
    assert {d.choice: (d.token_ids, d.finish_reason) for d in await drain(stream)} == {
        0: ([5], FinishReason.STOP),
        1: ([], FinishReason.ABORT),
    }


async def test_abort_choice_is_silent_for_one_that_has_ended() -> None:
    bench = Bench(asyncio.get_running_loop())
    stream = bench.open(1, n=2)
    bench.table.deliver(outputs((1, 0, [5], 1)))
    stream.abort_choice(0)
    stream.abort_choice(1)
    assert bench.aborts == [(1, 1, "stop_string")]


async def test_end_all_gives_each_open_choice_its_error() -> None:
    bench = Bench(asyncio.get_running_loop())
    streams = [bench.open(request_id, n=2) for request_id in range(1, 4)]
    bench.table.deliver(outputs((1, 0, [5], 1)))
    assert bench.table.end_all(ERROR) == 3
    ends = [delta for stream in streams for delta in await drain(stream)]
    assert sorted(delta.finish_reason or 0 for delta in ends) == [FinishReason.STOP] + [FinishReason.ERROR] * 5
    assert all(delta.error == ERROR for delta in ends if delta.finish_reason is FinishReason.ERROR)
    assert (bench.admission.num_choices, bench.admission.num_tokens, len(bench.table)) == (0, 0, 0)


actions = st.lists(
    st.tuples(st.sampled_from(["token", "finish", "read", "close", "abort"]), st.integers(0, 2), st.integers(0, 1)),
    max_size=60,
)


@given(actions)
def test_every_choice_ends_once_with_all_its_tokens(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(_every_choice_ends_once(steps))


async def _every_choice_ends_once(steps: list[tuple[str, int, int]]) -> None:
    bench = Bench(asyncio.get_running_loop())
    streams = [bench.open(request_id, n=2) for request_id in range(3)]
    alive = {(request, choice) for request in range(3) for choice in range(2)}
    sent: dict[tuple[int, int], list[int]] = {pair: [] for pair in alive}
    got: dict[tuple[int, int], list[int]] = {pair: [] for pair in alive}
    ends: list[tuple[int, int]] = []

    async def read(request: int) -> None:
        for delta in await anext(streams[request]):
            got[request, delta.choice] += delta.token_ids
            ends.extend([(request, delta.choice)] if delta.finish_reason else [])

    for number, (action, request, choice) in enumerate(steps):
        pair = (request, choice)
        if action in ("token", "finish"):  # also for choices that have ended: late rows must change nothing
            finished = 2 if action == "finish" else 0
            bench.table.deliver(outputs((request, choice, [number], finished)))
            if pair in alive:
                sent[pair].append(number)
            alive -= {pair} if finished else set()
        elif action == "read" and any(sent[request, c] != got[request, c] for c in range(2)):
            await read(request)  # there is something, so it does not wait
        elif action == "close":
            streams[request].close()
            alive -= {(request, 0), (request, 1)}
    bench.table.end_all(ERROR)
    for request in range(3):
        while any(pair not in ends for pair in ((request, 0), (request, 1))):
            await read(request)
        with pytest.raises(StopAsyncIteration):
            await read(request)
    assert sorted(ends) == [(request, choice) for request in range(3) for choice in range(2)]
    assert got == sent
    assert (bench.admission.num_choices, bench.admission.num_tokens) == (0, 0)
