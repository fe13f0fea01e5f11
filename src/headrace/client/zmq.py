"""`EngineClient` of a front-end process: one DEALER socket to the engine process, and the status board.

The socket is read from the event loop itself, without a task per message: its file descriptor says that something has
happened, then everything that is there is taken. `start` (or `wait_ready`, which calls it) must run in the event loop
that will use the client. It owns the front end's slot of the board, through its report.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any, Final

import zmq

from headrace.client.admission import Admission
from headrace.client.base import EngineStatus, RankStatus
from headrace.client.report import FrontEndReport
from headrace.client.session import Session, closed, engine_dead
from headrace.client.status import status_of
from headrace.client.streams import ClientStream
from headrace.config.options import AdmissionConfig
from headrace.errors import Draining, ErrorInfo, Unavailable
from headrace.transport import codec
from headrace.transport.board import EngineRecord, EngineState, StatusBoard
from headrace.transport.messages import EngineInfo, Goodbye, Hello, Lifecycle, Submit, ToEngine
from headrace.transport.sockets import connect_front_end
from headrace.types import RequestId

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S: Final = 0.1
_MAX_MESSAGES_PER_TURN: Final = 64  # then other callbacks of the event loop get their turn
_STALL_RETRY_S: Final = 5


class ZmqClient:
    """One per front-end process; `front_end` is its slot on the board."""

    def __init__(
        self,
        endpoint: str,
        front_end: int,
        admission: AdmissionConfig,
        board: StatusBoard,
        *,
        heartbeat_timeout_s: float = 10.0,
    ) -> None:
        self.report = FrontEndReport(board, front_end)
        self.admission = Admission(
            admission, others=lambda: board.queued_elsewhere(front_end), on_change=self.report.set_queued
        )
        self.num_malformed = 0
        self._endpoint = endpoint
        self._front_end = front_end
        self._board = board
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._incarnation = secrets.token_hex(8)
        self._next_id = 0
        self._session: Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects and says Hello; the engine answers when it is ready. Idempotent."""
        if self._session is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._session = Session(self._loop, self._send, self.admission)
        self._context = zmq.Context()
        identity = f"{self._front_end}-{self._incarnation}".encode()
        self._socket = connect_front_end(self._context, self._endpoint, identity)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._watch = self._loop.create_task(self._watch_board(), name="engine-watch")
        self._send(Hello(front_end=self._front_end, incarnation=self._incarnation))

    # ------------------------------------------------------------------ EngineClient

    @property
    def info(self) -> EngineInfo:
        return self._require_session().require_info()

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        self.start()
        return await self._require_session().wait_ready(timeout_s)

    def next_request_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id)

    def submit(self, request: Submit) -> ClientStream:
        session = self._require_session()
        session.require_info()
        if self._board.is_draining:
            raise Draining
        if self._is_stalled():
            raise Unavailable(
                f"the engine has given no sign of life for {self._board.read_engine().heartbeat_age_s:.0f} s",
                code="engine_stalled",
                retry_after_s=_STALL_RETRY_S,
            )
        return session.submit(request)

    async def abort(
        self,
        request_ids: Sequence[RequestId] | None = None,
        names: Sequence[str] | None = None,
        reason: str = "client",
    ) -> int:
        return await self._require_session().abort(request_ids, names, reason)

    async def control(self, operation: str, *, trace_parent: str | None = None, **arguments: Any) -> dict[str, Any]:
        return await self._require_session().control(operation, arguments, trace_parent)

    def status(self) -> EngineStatus:
        engine = self._board.read_engine()
        session = self._session
        reasons = []
        if session is not None and session.death is not None:
            reasons.append(session.death.code)
        elif session is None or session.info is None:
            reasons.append("starting")
        elif self._is_stalled():
            reasons.append("engine_stalled")
        if self._board.is_draining:
            reasons.append("draining")
        age_s = engine.heartbeat_age_s if engine.heartbeat_ns else 0.0
        lifecycle = session.lifecycle if session else Lifecycle()
        return status_of(engine.stats, lifecycle, tuple(reasons), age_s, self._ranks(engine))

    async def close(self) -> None:
        session = self._session
        if session is None or self._socket is None:
            return
        session.end_streams(closed(), "shutdown")
        if session.death is None:
            self._send(Goodbye())
        session.end(closed())
        socket, context, watch = self._socket, self._context, self._watch
        assert context is not None, "start made it"
        assert watch is not None, "start made it"
        session.loop.remove_reader(socket.fileno())
        self._socket = None
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        socket.close()
        await asyncio.to_thread(context.term)  # waits until the last words are out, at most the socket's linger

    def end_streams(self, error: ErrorInfo) -> None:
        """Ends every open request with `error`, here and in the engine; the client stays usable."""
        if self._session is not None:
            self._session.end_streams(error, "shutdown")

    # ------------------------------------------------------------------ socket and board

    def _require_session(self) -> Session:
        if self._session is None:
            raise Unavailable("the engine is starting", code="starting")
        return self._session

    def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            return
        assert self._loop is not None, "a socket has its loop"
        self._socket.send(codec.encode(message), zmq.NOBLOCK)
        # The descriptor tells of changes alone, and sending may have swallowed one: look again soon.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_TURN):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)
        assert self._loop is not None, "a socket has its loop"
        self._loop.call_soon(self._receive)

    def _handle(self, data: bytes) -> None:
        assert self._session is not None, "the socket opens after it"
        try:
            message = codec.decode_from_engine(data)
        except codec.CodecError as error:
            self.num_malformed += 1
            logger.error("dropped a message of the engine: %s", error)
            return
        self._session.handle(message)

    def _ranks(self, engine: EngineRecord) -> tuple[RankStatus, ...]:
        """Of a model on several; those alone that have started."""
        if self._board.num_ranks == 1:
            return ()
        records = {0: (engine.pid, engine.heartbeat_ns, engine.heartbeat_age_s, engine.stats.step)}
        for rank in range(1, self._board.num_ranks):
            worker = self._board.read_worker(rank)
            records[rank] = (worker.pid, worker.heartbeat_ns, worker.heartbeat_age_s, worker.num_steps)
        return tuple(
            RankStatus(rank, pid, age_s, num_steps)
            for rank, (pid, heartbeat_ns, age_s, num_steps) in records.items()
            if heartbeat_ns
        )

    def _is_stalled(self) -> bool:
        return self._board.read_engine().heartbeat_age_s > self._heartbeat_timeout_s

    async def _watch_board(self) -> None:
        """The engine's death is seen here when it could not say its last words, or when nobody heard them."""
        assert self._session is not None, "started after it"
        while self._session.death is None:
            if self._board.read_supervisor().engine_is_dead:
                self._session.end(engine_dead("its process has ended"))
            elif self._board.read_engine().state == EngineState.DEAD:
                self._session.end(engine_dead("it has stopped after an error"))
            await asyncio.sleep(_WATCH_INTERVAL_S)
