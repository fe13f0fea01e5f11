"""One suite for both clients: whatever holds for `InprocClient` holds for `ZmqClient`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from headrace.client.base import Delta, EngineClient, OutputStream
from headrace.config.options import AdmissionConfig
from headrace.errors import Draining, FailedRequest, InvalidRequest, QueueFull, Unavailable
from headrace.testing.channel import KINDS, Rig, open_rig
from headrace.types import FinishReason

LONG = 50_000  # tokens: still running when the test gets at it, however slow the machine


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(kind: str) -> AsyncIterator[Rig]:
    async with open_rig(kind) as rig:
        yield rig


async def read(stream: OutputStream) -> dict[int, Delta]:
    """All of a stream, merged by choice; asserts that each choice ends once and says nothing afterwards."""
    merged: dict[int, Delta] = {}
    async for deltas in stream:
        assert len({delta.choice for delta in deltas}) == len(deltas), "at most one delta per choice"
        for delta in deltas:
            known = merged.setdefault(delta.choice, Delta(delta.choice))
            assert known.finish_reason is None, "a choice ends once, and nothing comes after"
            known.token_ids += delta.token_ids
            known.finish_reason = delta.finish_reason
            known.error = delta.error
    assert all(delta.finish_reason is not None for delta in merged.values())
    return merged


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come true in time"
        await asyncio.sleep(0.005)


def queued(rig: Rig) -> tuple[int, int]:
    return rig.client.admission.num_choices, rig.client.admission.num_tokens


async def test_a_stream_is_complete(rig: Rig) -> None:
    client: EngineClient = rig.client
    merged = await read(client.submit(rig.request([7, 8, 9], max_tokens=7)))
    assert merged[0].token_ids == [7, 8, 9, 7, 8, 9, 7]
    assert merged[0].finish_reason is FinishReason.LENGTH
    assert client.info.model == "echo"
    assert queued(rig) == (0, 0)


async def test_many_streams_at_once_do_not_mix(rig: Rig) -> None:
    prompts = [[i + 1, i + 2, i + 3] for i in range(100)]
    results = await asyncio.gather(*(read(rig.client.submit(rig.request(p, max_tokens=20))) for p in prompts))
    assert [merged[0].token_ids for merged in results] == [(p * 7)[:20] for p in prompts]


async def test_unread_deltas_merge(rig: Rig) -> None:
    stream = rig.client.submit(rig.request(max_tokens=200, logprobs=2))
    await eventually(lambda: queued(rig) == (0, 0))
    await read(rig.client.submit(rig.request(max_tokens=250)))  # in the same batch, so the first one has ended by now
    reads = [deltas async for deltas in stream]
    assert len(reads) == 1
    (delta,) = reads[0]
    assert len(delta.token_ids) == 200
    assert delta.logprobs is not None
    token_ids, _, _ = delta.logprobs.arrays()
    assert token_ids[:, 0].tolist() == delta.token_ids
    assert delta.num_cached_tokens is not None


async def test_choices_of_all_prompts(rig: Rig) -> None:
    request = msgspec.structs.replace(rig.request(n=3, max_tokens=4), prompts=((1, 2), (3, 4)))
    merged = await read(rig.client.submit(request))
    assert {choice: delta.token_ids for choice, delta in merged.items()} == {
        choice: [1, 2, 1, 2] if choice < 3 else [3, 4, 3, 4] for choice in range(6)
    }
    assert queued(rig) == (0, 0)


async def test_a_choice_can_be_aborted_alone(rig: Rig) -> None:
    stream = rig.client.submit(rig.request(n=2, max_tokens=LONG))
    await anext(aiter(stream))
    stream.abort_choice(1)
    stream.abort_choice(1)
    ends: list[tuple[int, FinishReason]] = []
    while not ends:
        ends += [(delta.choice, delta.finish_reason) for delta in await anext(aiter(stream)) if delta.finish_reason]
    assert ends == [(1, FinishReason.ABORT)]
    stream.abort_choice(0)
    merged = await read(stream)
    assert merged[0].finish_reason is FinishReason.ABORT
    assert 1 not in merged


async def test_abort_by_id_counts_choices_and_is_idempotent(rig: Rig) -> None:
    """The reply says how many were really alive."""
    stream = rig.client.submit(request := rig.request(n=3, max_tokens=LONG))
    await anext(aiter(stream))
    assert await rig.client.abort([request.request_id]) == 3
    assert await rig.client.abort([request.request_id]) == 0
    merged = await read(stream)
    assert {delta.finish_reason for delta in merged.values()} == {FinishReason.ABORT}


async def test_abort_by_name_and_all(rig: Rig) -> None:
    rig.gate.clear()
    named = rig.client.submit(rig.request(name="mine"))
    aliased = rig.client.submit(msgspec.structs.replace(rig.request(), aliases=("trace-1",)))
    others = [rig.client.submit(rig.request(n=2)) for _ in range(3)]
    by_name = asyncio.create_task(rig.client.abort(names=["mine", "trace-1", "nobody"]))
    everything = asyncio.create_task(rig.client.abort())
    await asyncio.sleep(0)
    rig.gate.set()
    assert await by_name == 2
    assert await everything == 6
    for stream in (named, aliased, *others):
        assert {delta.finish_reason for delta in (await read(stream)).values()} == {FinishReason.ABORT}
    assert queued(rig) == (0, 0)


async def test_closing_a_queued_and_a_running_request_frees_them(rig: Rig) -> None:
    """The engine is told first."""
    running = rig.client.submit(rig.request(max_tokens=LONG))
    await anext(aiter(running))
    rig.gate.clear()
    waiting = rig.client.submit(rig.request(max_tokens=LONG, n=2))
    assert queued(rig) == (2, 3)
    for stream in (waiting, running, waiting):
        stream.close()
    assert queued(rig) == (0, 0)
    assert {d.finish_reason for d in (await read(waiting)).values()} == {FinishReason.ABORT}
    rig.gate.set()
    await read(rig.client.submit(rig.request()))  # the engine has seen the aborts before this one
    assert rig.core.stats().num_running == rig.core.stats().num_waiting == 0
    running.close()
    assert (await read(running))[0].finish_reason is FinishReason.ABORT


async def test_a_reader_that_is_cancelled_can_come_back(rig: Rig) -> None:
    rig.gate.clear()
    stream = rig.client.submit(rig.request(max_tokens=3))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(aiter(stream)), 0.02)
    rig.gate.set()
    assert (await read(stream))[0].token_ids == [1, 2, 3]


async def test_admission_refuses_exactly_the_surplus(kind: str) -> None:
    async with open_rig(kind, admission=AdmissionConfig(max_queued_requests=8)) as rig:
        rig.gate.clear()
        streams, refusals = [], []
        for _ in range(100):
            try:
                streams.append(rig.client.submit(rig.request()))
            except QueueFull as error:
                refusals.append(error.retry_after_s)
        assert len(streams) == 8
        assert refusals == [1] * 92
        rig.gate.set()
        for stream in streams:
            assert (await read(stream))[0].finish_reason is FinishReason.LENGTH
        assert queued(rig) == (0, 0)


async def test_admission_is_all_or_none(kind: str) -> None:
    async with open_rig(kind, admission=AdmissionConfig(max_queued_requests=8, max_queued_tokens=20)) as rig:
        rig.gate.clear()
        rig.client.submit(rig.request(n=6))
        with pytest.raises(QueueFull):
            rig.client.submit(rig.request(n=3))
        assert queued(rig) == (6, 3)
        with pytest.raises(QueueFull, match="prompt tokens"):
            rig.client.submit(rig.request([1] * 18))
        with pytest.raises(InvalidRequest):
            rig.client.submit(rig.request(n=9))
        rig.client.submit(rig.request(n=2))


async def test_a_deadline_ends_a_waiting_request(rig: Rig) -> None:
    rig.gate.clear()
    stream = rig.client.submit(msgspec.structs.replace(rig.request(max_tokens=LONG), timeout_s=0.05))
    await asyncio.sleep(0.1)
    rig.gate.set()
    delta = (await read(stream))[0]
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error is not None
    assert (delta.error.status, delta.error.code) == (504, "deadline_exceeded")


async def test_a_drain_ends_what_runs_and_refuses_the_rest_before_it_is_sent(rig: Rig) -> None:
    rig.gate.clear()
    stream = rig.client.submit(rig.request([7, 8], max_tokens=4))
    call = asyncio.create_task(rig.client.control("drain"))
    await asyncio.sleep(0)
    rig.gate.set()
    assert (await read(stream))[0].token_ids == [7, 8, 7, 8]
    assert (await call)["result"] == [{"rank": 0, "num_awaited": 1}]
    status = rig.client.status()
    assert (status.is_ready, status.reasons) == (False, ("draining",))
    with pytest.raises(Draining):
        rig.client.submit(rig.request())
    assert queued(rig) == (0, 0)
    await rig.client.control("undrain")
    assert rig.client.status().is_ready
    assert (await read(rig.client.submit(rig.request())))[0].finish_reason is FinishReason.LENGTH


async def test_a_bad_request_ends_as_data(rig: Rig) -> None:
    for bad in (rig.request([1 << 30]), rig.request([]), rig.request(n=0)):
        merged = await read(rig.client.submit(bad))
        assert merged[0].finish_reason is FinishReason.ERROR
        assert merged[0].error is not None
        assert merged[0].error.status == 400
    assert queued(rig) == (0, 0)


async def test_engine_failure_ends_every_stream_once(kind: str) -> None:
    async with open_rig(kind, fail_at_step=4) as rig:
        rig.gate.clear()
        streams = [rig.client.submit(rig.request(max_tokens=100, n=2)) for _ in range(5)]
        call = asyncio.create_task(rig.client.abort(names=["nobody"]))
        rig.gate.set()
        for stream in streams:
            for delta in (await read(stream)).values():
                assert delta.finish_reason is FinishReason.ERROR
                assert delta.error is not None
                assert (delta.error.status, delta.error.code) == (503, "engine_dead")
        await asyncio.gather(call, return_exceptions=True)
        with pytest.raises(Unavailable) as caught:
            rig.client.submit(rig.request())
        assert caught.value.code == "engine_dead"
        assert rig.client.status().reasons == ("engine_dead",)
        assert queued(rig) == (0, 0)


async def test_control(rig: Rig) -> None:
    await read(rig.client.submit(rig.request(list(range(1, 100)))))
    result = await rig.client.control("reset_prefix_cache")
    assert (result["kind"], result["state"]) == ("reset_prefix_cache", "succeeded")
    assert result["result"][0]["num_blocks"] > 0
    with pytest.raises(FailedRequest) as caught:
        await rig.client.control("no_such_thing")
    assert caught.value.info().status == 404


async def test_status_counts(rig: Rig) -> None:
    await read(rig.client.submit(rig.request(max_tokens=9)))
    await eventually(lambda: rig.client.status().num_generated_tokens == 9)
    status = rig.client.status()
    assert status.is_ready
    assert status.reasons == ()
    assert status.num_prompt_tokens == 3
    assert status.num_blocks == 4096
    assert status.heartbeat_age_s < 5


async def test_close_ends_open_streams_and_calls(rig: Rig) -> None:
    rig.gate.clear()
    stream = rig.client.submit(rig.request())
    call = asyncio.create_task(rig.client.abort())
    await asyncio.sleep(0)
    closing = asyncio.create_task(rig.client.close())
    delta = (await read(stream))[0]
    assert delta.finish_reason is FinishReason.ERROR
    rig.gate.set()
    await closing
    await rig.client.close()
    with pytest.raises(Unavailable):
        await call
    with pytest.raises(Unavailable):
        rig.client.submit(rig.request())


async def test_two_thousand_random_aborts_leave_nothing(rig: Rig) -> None:
    rng = random.Random(7)

    async def one(index: int) -> None:
        request = rig.request(
            [rng.randrange(1, 200) for _ in range(rng.randrange(1, 60))], max_tokens=100, n=1 + index % 2
        )
        stream = rig.client.submit(request)
        await asyncio.sleep(rng.random() * 0.3)
        way = index % 3
        if way == 0:
            stream.close()
        elif way == 1:
            await rig.client.abort([request.request_id])
        await read(stream)

    for _ in range(4):
        await asyncio.gather(*(one(index) for index in range(500)))
    assert queued(rig) == (0, 0)
    await eventually(lambda: rig.client.status().num_running + rig.client.status().num_waiting == 0, 1.0)
    await rig.client.control("reset_prefix_cache")
    await rig.client.close()
    rig.core.check_invariants()
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
