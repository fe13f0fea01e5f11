"""What only `ZmqClient` has: the board's word on drain, death and stalls, several front ends, bad bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from headrace.client.lifecycle import Lifecycle
from headrace.client.zmq import ZmqClient
from headrace.config.options import AdmissionConfig
from headrace.errors import QueueFull, Unavailable
from headrace.testing.channel import open_rig
from headrace.transport import codec
from headrace.transport.board import EngineState, StatusBoard, SupervisorRecord, SupervisorState, WorkerRecord
from headrace.transport.messages import EngineInfo, EngineReady, FromEngine, Hello, StepOutputs, Submit
from headrace.transport.sockets import bind_engine, ipc_endpoint
from headrace.transport.stats import EngineStats
from headrace.types import FinishReason, SamplingParams

INFO = EngineInfo(
    model="m", vocab_size=9, max_model_len=9, max_num_seqs=1, block_size=1, num_blocks=9, backend="reference"
)


class SilentEngine:
    """A socket that the test itself answers on: an engine that says just what it is told to."""

    def __init__(self, folder: Path, num_front_ends: int = 1, num_ranks: int = 1) -> None:
        self.board = StatusBoard.create(folder / "board", num_front_ends, num_ranks)
        self.endpoint = ipc_endpoint(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_engine(self._context, self.endpoint)
        self.identity = b""

    async def hear(self) -> bytes:
        until = time.monotonic() + 5
        while not self._socket.poll(0):
            assert time.monotonic() < until
            await asyncio.sleep(0.002)
        self.identity, data = self._socket.recv_multipart()
        return data

    def say(self, message: FromEngine | bytes) -> None:
        data = message if isinstance(message, bytes) else codec.encode(message)
        self._socket.send_multipart((self.identity, data))

    async def greet(self) -> None:
        assert isinstance(codec.decode_to_engine(await self.hear()), Hello)
        self.board.write_engine(EngineState.READY, EngineStats(step=7))
        self.say(EngineReady(INFO))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def engine() -> AsyncIterator[SilentEngine]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        engine = SilentEngine(Path(folder), num_front_ends=2)
        yield engine
        engine.close()


@pytest.fixture
async def several_ranks() -> AsyncIterator[SilentEngine]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        engine = SilentEngine(Path(folder), num_ranks=3)
        yield engine
        engine.close()


@contextlib.asynccontextmanager
async def client_of(
    engine: SilentEngine,
    index: int = 0,
    admission: AdmissionConfig | None = None,
    heartbeat_timeout_s: float = 30.0,
) -> AsyncIterator[ZmqClient]:
    admission = admission or AdmissionConfig()
    client = ZmqClient(engine.endpoint, index, admission, engine.board, heartbeat_timeout_s=heartbeat_timeout_s)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def request(client: ZmqClient, *, n: int = 1, timeout_s: float | None = None) -> Submit:
    return Submit(
        request_id=client.next_request_id(),
        public_id="x",
        prompts=((1, 2),),
        params=SamplingParams(n=n, max_tokens=3),
        timeout_s=timeout_s,
    )


async def test_before_the_handshake_it_is_starting(engine: SilentEngine) -> None:
    async with client_of(engine) as client:
        for call in (lambda: client.submit(request(client)), lambda: client.info):
            with pytest.raises(Unavailable) as caught:
                call()
            assert (caught.value.code, caught.value.status) == ("starting", 503)
            assert caught.value.retry_after_s is not None
        with pytest.raises(Unavailable, match=r"0\.01 s"):
            await client.wait_ready(0.01)
        assert client.status().reasons == ("starting",)
        await engine.greet()
        assert await client.wait_ready(5) == INFO
        assert client.status().step == 7


async def test_another_protocol_is_no_engine(engine: SilentEngine) -> None:
    async with client_of(engine) as client:
        await engine.hear()
        engine.say(EngineReady(INFO, protocol=99))
        with pytest.raises(Unavailable, match="protocol 99"):
            await client.wait_ready(5)


async def test_a_draining_server_takes_nothing_new(engine: SilentEngine) -> None:
    async with client_of(engine) as client:
        await engine.greet()
        await client.wait_ready(5)
        lifecycle = Lifecycle(lambda: engine.board.is_draining)
        stream = client.submit(request(client))
        assert lifecycle.reasons() == ()
        engine.board.write_supervisor(SupervisorRecord(state=SupervisorState.DRAINING))
        with pytest.raises(Unavailable) as caught:
            client.submit(request(client))
        assert caught.value.code == "draining"
        assert client.status().reasons == ("draining",)
        assert lifecycle.reasons() == ("draining",)
        stream.close()


async def test_a_stall_is_seen_and_gets_over(engine: SilentEngine) -> None:
    async with client_of(engine, heartbeat_timeout_s=0.5) as client:
        await engine.greet()
        await client.wait_ready(5)
        engine.board.write_engine(EngineState.READY, EngineStats(step=7))
        stream = client.submit(request(client))
        await asyncio.sleep(0.55)
        status = client.status()
        assert (status.is_ready, status.reasons) == (False, ("engine_stalled",))
        assert status.heartbeat_age_s > 0.5
        with pytest.raises(Unavailable) as caught:
            client.submit(request(client))
        assert caught.value.code == "engine_stalled"
        engine.board.write_engine(EngineState.READY, EngineStats(step=8))
        assert client.status().is_ready
        engine.say(StepOutputs(request_ids=[1], choices=[0], num_tokens=[1], token_ids=[5], finished=[1]))
        (delta,) = [delta async for deltas in stream for delta in deltas]
        assert (delta.token_ids, delta.finish_reason) == ([5], FinishReason.STOP)


async def test_heartbeats_of_all_ranks_that_have_started(several_ranks: SilentEngine) -> None:
    engine = several_ranks
    async with client_of(engine) as client:
        await engine.greet()
        await client.wait_ready(5)
        long_ago_ns = time.monotonic_ns() - 20 * 10**9
        engine.board.write_worker(2, WorkerRecord(pid=5, heartbeat_ns=long_ago_ns, num_steps=3))
        own, other = client.status().ranks
        assert (own.rank, own.pid, own.num_steps) == (0, os.getpid(), 7)
        assert (other.rank, other.pid, other.num_steps) == (2, 5, 3)
        assert own.heartbeat_age_s < 5 < 20 <= other.heartbeat_age_s
        assert client.status().is_ready, "how old is too old, the server says"


@pytest.mark.parametrize("teller", ["supervisor", "engine"])
async def test_death_on_the_board_ends_streams_and_calls(engine: SilentEngine, teller: str) -> None:
    async with client_of(engine) as client:
        await engine.greet()
        await client.wait_ready(5)
        stream = client.submit(request(client, n=2))
        call = asyncio.create_task(client.abort(names=["x"]))
        await asyncio.sleep(0)
        died_s = time.monotonic()
        if teller == "supervisor":
            engine.board.write_supervisor(SupervisorRecord(engine_is_dead=1))
        else:
            engine.board.write_engine(EngineState.DEAD, EngineStats())
        deltas = [delta async for deltas in stream for delta in deltas]
        assert time.monotonic() - died_s < 2
        assert [delta.error.code for delta in deltas if delta.error] == ["engine_dead"] * 2
        with pytest.raises(Unavailable):
            await call
        assert client.status().reasons == ("engine_dead",)


async def test_bytes_that_are_no_message_are_dropped(engine: SilentEngine) -> None:
    async with client_of(engine) as client:
        await engine.hear()
        engine.say(b"\xc1")
        engine.say(codec.encode(Hello(0, "wrong direction")))
        engine.say(EngineReady(INFO))
        await client.wait_ready(5)
        assert client.num_malformed == 2


async def test_the_bound_is_over_all_front_ends(engine: SilentEngine) -> None:
    limits = AdmissionConfig(max_queued_requests=5)
    async with client_of(engine, 0, limits) as one:
        await engine.greet()
        await one.wait_ready(5)
        async with client_of(engine, 1, limits) as two:
            while not isinstance(codec.decode_to_engine(await engine.hear()), Hello):
                pass
            engine.say(EngineReady(INFO))
            await two.wait_ready(5)
            engine.board.write_engine(EngineState.READY, EngineStats())
            held = one.submit(request(one, n=3))
            two.submit(request(two, n=2))
            with pytest.raises(QueueFull):
                two.submit(request(two))
            held.close()
            two.submit(request(two, n=3))
            assert engine.board.read_front_end(1).num_queued == 5
            with pytest.raises(QueueFull):
                one.submit(request(one))


async def test_a_hanging_engine_does_not_outlast_a_deadline() -> None:
    async with open_rig("zmq") as rig:
        rig.gate.clear()
        stream = rig.client.submit(msgspec.structs.replace(rig.request(n=2), timeout_s=0.05))
        deltas = [delta async for deltas in stream for delta in deltas]
        assert [delta.error.code for delta in deltas if delta.error] == ["deadline_exceeded"] * 2
        assert rig.client.admission.num_choices == 0


async def test_end_streams_keeps_the_client_usable() -> None:
    async with open_rig("zmq") as rig:
        assert isinstance(rig.client, ZmqClient)
        stream = rig.client.submit(rig.request(max_tokens=50_000))
        await anext(aiter(stream))
        rig.client.end_streams(Unavailable("bye", code="draining").info())
        (delta,) = [delta async for deltas in stream for delta in deltas][-1:]
        assert delta.error is not None
        assert delta.error.code == "draining"
        after = [delta async for deltas in rig.client.submit(rig.request()) for delta in deltas]
        assert after[-1].finish_reason is FinishReason.LENGTH
        assert rig.core.stats().num_running == 0
