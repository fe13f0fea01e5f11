"""A client with a mock engine behind it, of either kind, for tests of the channel.

"inproc": `InprocClient`. "zmq": `ZmqClient`, a real socket and board, and the engine in a thread of this process in
place of a process, so that a test can hold its steps and look into its core.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from headrace.client.inproc import InprocClient
from headrace.client.zmq import ZmqClient
from headrace.config.options import AdmissionConfig, CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.endpoint import EngineEndpoint
from headrace.engine.loop import EngineLoop
from headrace.testing.echo import EchoExecutor
from headrace.transport.board import EngineState, StatusBoard
from headrace.transport.messages import Submit
from headrace.transport.sockets import ipc_endpoint
from headrace.transport.stats import EngineStats
from headrace.types import SamplingParams

KINDS = ("inproc", "zmq")


@dataclass(kw_only=True)
class Rig:
    """`gate` holds the engine's steps while it is clear; `core` may be looked at while nothing runs."""

    client: InprocClient | ZmqClient
    gate: threading.Event
    core: EngineCore
    board: StatusBoard | None = None

    def request(self, prompt: list[int] | None = None, *, name: str = "", **params: int | None) -> Submit:
        """One prompt; the keywords are those of SamplingParams."""
        request_id = self.client.next_request_id()
        return Submit(
            request_id=request_id,
            public_id=name or f"test-{request_id}",
            prompts=(tuple(prompt if prompt is not None else [1, 2, 3]),),
            params=SamplingParams(**{"max_tokens": 5, "seed": 0, **params}),  # type: ignore[arg-type]
        )


@contextlib.asynccontextmanager
async def open_rig(
    kind: str,
    *,
    admission: AdmissionConfig | None = None,
    fail_at_step: int | None = None,
    heartbeat_timeout_s: float = 10.0,
    num_blocks: int = 4096,
) -> AsyncIterator[Rig]:
    """A ready client; closes everything at the end."""
    gate = threading.Event()
    gate.set()
    # Steps take a little, so that a long request is still running when a test gets at it.
    executor = EchoExecutor(max_model_len=60_000, gate=gate, fail_at_step=fail_at_step, step_delay_s=0.0005)
    core = EngineCore(executor, CacheConfig(num_kv_blocks=num_blocks), SchedulerConfig(max_num_seqs=64))
    admission = admission or AdmissionConfig()
    async with contextlib.AsyncExitStack() as stack:
        if kind == "inproc":
            rig = Rig(client=InprocClient(lambda: core, admission), gate=gate, core=core)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))
            board = StatusBoard.create(Path(folder) / "board", 1)
            endpoint = ipc_endpoint(Path(folder))
            await stack.enter_async_context(_engine_thread(core, endpoint, board))
            client = ZmqClient(endpoint, 0, admission, board, heartbeat_timeout_s=heartbeat_timeout_s)
            rig = Rig(client=client, gate=gate, core=core, board=board)
        stack.push_async_callback(rig.client.close)
        stack.callback(gate.set)  # a held engine could not stop
        await rig.client.wait_ready(10.0)
        yield rig


@contextlib.asynccontextmanager
async def _engine_thread(core: EngineCore, address: str, board: StatusBoard) -> AsyncIterator[None]:
    """What `engine/process.py` does, in a thread."""
    endpoint = EngineEndpoint(address)
    loop = EngineLoop(core, endpoint.emit, lambda stats: board.write_engine(EngineState.READY, stats))

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the injected failure
            loop.run()

    thread = threading.Thread(target=run, daemon=True)
    board.write_engine(EngineState.STARTING, EngineStats())
    endpoint.start(loop.post)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        await asyncio.to_thread(thread.join, 10.0)
        await asyncio.to_thread(endpoint.close)
