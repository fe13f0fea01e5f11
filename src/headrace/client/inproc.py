"""`EngineClient` with the engine in a thread of this process: the offline `LLM` class, `headrace chat`, and tests.

The engine thread hands each of its messages to the event loop in one call; nothing is encoded. `start` (or
`wait_ready`, which calls it) must run in the event loop that will use the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.client.admission import Admission
from headrace.client.base import EngineStatus
from headrace.client.session import Session, closed
from headrace.client.status import status_of
from headrace.client.streams import ClientStream
from headrace.config.options import AdmissionConfig, ControlConfig, ExpertsConfig
from headrace.engine.core import EngineCore
from headrace.engine.loop import EngineLoop
from headrace.errors import StartupError, Unavailable
from headrace.transport.messages import EngineDead, EngineInfo, FromEngine, Goodbye, Hello, Lifecycle, Submit, ToEngine
from headrace.transport.stats import EngineStats
from headrace.types import RequestId

logger = logging.getLogger(__name__)

_CLIENT = 0
_CLOSE_TIMEOUT_S = 30.0  # the engine stops at a step boundary
_LOOK_S = 0.005


class InprocClient:
    """Owns the engine thread and the core's executor. `core_factory` runs in that thread, so loading a model never
    blocks the event loop."""

    def __init__(
        self,
        core_factory: Callable[[], EngineCore],
        admission: AdmissionConfig,
        control: ControlConfig | None = None,
        weights_path: Path | None = None,
        experts: ExpertsConfig | None = None,
    ) -> None:
        """`weights_path` is where the model lies, if its weights may be read again after a sleep."""
        self.admission = Admission(admission)
        self._core_factory = core_factory
        self._control_config = control
        self._weights_path = weights_path
        self._experts_config = experts
        self._session: Session | None = None
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._engine: EngineLoop | None = None
        self._lock = threading.Lock()  # guards `_engine` and `_is_closed` between the two threads
        self._is_closed = False
        self._stats = EngineStats()
        self._startup_error: StartupError | None = None
        self._next_id = 0

    def start(self) -> None:
        """Starts the engine thread. Idempotent."""
        if self._session is None:
            self._session = Session(asyncio.get_running_loop(), self._send, self.admission)
            self._thread.start()

    # ------------------------------------------------------------------ EngineClient

    @property
    def info(self) -> EngineInfo:
        return self._require_session().require_info()

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """As EngineClient says, and raises StartupError when the model could not be loaded."""
        self.start()
        try:
            return await self._require_session().wait_ready(timeout_s)
        except Unavailable:
            if self._startup_error is not None:
                raise self._startup_error from None
            raise

    def next_request_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id)

    def submit(self, request: Submit) -> ClientStream:
        return self._require_session().submit(request)

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
        session = self._session
        info = session.info if session is not None else None
        reasons: tuple[str, ...] = ()
        if session is not None and session.death is not None:
            reasons = (session.death.code,)
        elif info is None:
            reasons = ("starting",)
        lifecycle = session.lifecycle if session is not None else Lifecycle()
        return status_of(self._stats, lifecycle, reasons, heartbeat_age_s=0.0)

    async def close(self) -> None:
        with self._lock:
            self._is_closed = True
            engine = self._engine
        if self._session is not None:
            self._session.end(closed())
        if engine is not None:
            engine.post(_CLIENT, Goodbye())
            engine.stop()
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        # No thread of a pool can wait for it: when a script ends without closing its LLM, the pools have gone already.
        while self._thread.is_alive() and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    # ------------------------------------------------------------------ between the threads

    def _require_session(self) -> Session:
        if self._session is None:
            raise Unavailable("the engine is starting", code="starting")
        return self._session

    def _send(self, message: ToEngine) -> None:
        assert self._engine is not None, "ready means that the engine is there"
        self._engine.post(_CLIENT, message)

    def _run_engine(self) -> None:
        core: EngineCore | None = None
        try:
            core = self._core_factory()
            engine = EngineLoop(
                core, self._emit, self._publish, self._control_config, self._weights_path, self._experts_config
            )
            with self._lock:
                if self._is_closed:
                    return
                self._engine = engine
            engine.post(_CLIENT, Hello(front_end=_CLIENT, incarnation="inproc"))
            engine.run()
        except StartupError as error:
            self._startup_error = error
            self._hand_over(EngineDead(str(error)))
        except Exception as error:
            logger.exception("the engine thread died")
            self._hand_over(EngineDead(f"{type(error).__name__}: {error}"))
        finally:
            if core is not None:
                core.executor.close()  # it may have processes

    def _emit(self, client: int, message: FromEngine) -> None:
        assert client == _CLIENT, "one client"
        self._hand_over(message)

    def _hand_over(self, message: FromEngine) -> None:
        session = self._session
        assert session is not None, "the thread starts after it"
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads any more
            session.loop.call_soon_threadsafe(session.handle, message)

    def _publish(self, stats: EngineStats) -> None:
        self._stats = stats
