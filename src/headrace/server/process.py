"""A front-end process: `python -m headrace.server.process <launch file> <index>`, started by the supervisor.

Serves HTTP on a listening socket that it inherits, so connections outlive it in the kernel's queue. It answers from the
start (503 until the engine is ready), drains when the status board says so, and leaves when the board says STOPPING or
the supervisor's pipe closes. It reports its open requests on the board, which is how the supervisor knows it is done.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # importing leaves little to collect; `FrontEnd` turns it on again once all is there

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
import uvloop

from headrace.client.lifecycle import Lifecycle
from headrace.client.zmq import ZmqClient
from headrace.config.launch import Launch
from headrace.errors import ErrorInfo, StartupError
from headrace.observability.logs import configure_logging, set_level
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.server.app import create_app
from headrace.server.middleware import past_middleware
from headrace.transport.board import EngineState, FrontEndState, StatusBoard, SupervisorState
from headrace.transport.log_level import LogLevelFollower
from headrace.transport.messages import EngineInfo
from headrace.transport.parent_watch import ParentWatch, leave_signals_to_supervisor, show_stacks_on_request

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S: Final = 0.05
_STARTING_INTERVAL_S: Final = 0.01  # until it is ready
_HANDSHAKE_S: Final = 5.0
_GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Of Python's 700, 10, 10: a step of a thousand streams alone makes thousands of short-lived objects."""
_LAST_WRITES_S: Final = 2  # what the open responses get to be written out once their requests have ended
_DRAINED: Final = ErrorInfo(
    503, "unavailable", "draining", "the server shut down before the request was finished (--drain-timeout)"
)


def main(argv: list[str]) -> int:
    leave_signals_to_supervisor()
    show_stacks_on_request()
    watch = ParentWatch()
    launch, index = Launch.read(Path(argv[1])), int(argv[2])
    observability = launch.config.observability
    configure_logging(observability.log_level, f"front-end-{index}", observability.log_format)
    try:
        tokenizer = _load_tokenizer(launch)
    except StartupError as error:
        launch.fail(str(error))
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            front_end = FrontEnd(launch, index, tokenizer, watch)
        except StartupError as error:  # a parser or plugin that does not load
            launch.fail(str(error))
            return 1
        return runner.run(front_end.run())


class FrontEnd:
    """One incarnation of one front end."""

    def __init__(self, launch: Launch, index: int, tokenizer: Tokenizer, watch: ParentWatch) -> None:
        self._launch = launch
        self._server_config = launch.config.server
        self._listen_fd = launch.listen_fds[index]
        self._board = StatusBoard.open(launch.board_path)
        self._client = ZmqClient(
            launch.endpoint,
            index,
            launch.config.admission,
            self._board,
            heartbeat_timeout_s=self._server_config.heartbeat_timeout,
        )
        self._client.report.update(has_chat_template=int(tokenizer.chat_template is not None))
        self._watch = watch
        self._log_level = LogLevelFollower(self._board, set_level)
        app = create_app(
            self._client,
            tokenizer,
            launch.config,
            served_names=launch.served_names,
            lifecycle=Lifecycle(lambda: self._board.is_draining),
            front_end=index,
            runtime_dir=Path(launch.runtime_dir),
            set_log_level=self._set_log_level,
        )
        self._server = _Server(
            uvicorn.Config(
                past_middleware(app),
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=_LAST_WRITES_S,
            )
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()

        def stop_from_thread() -> None:
            loop.call_soon_threadsafe(self._stop)

        self._watch.on_stop = stop_from_thread
        ready = asyncio.create_task(self._client.wait_ready())
        tasks = [ready, asyncio.create_task(self._follow_supervisor(ready))]
        if self._board.read_engine().state == EngineState.READY:
            # Restarted beside a running engine: who connected meanwhile waits for the handshake instead of getting 503.
            await asyncio.wait([ready], timeout=_HANDSHAKE_S)
        try:
            await self._server.serve([socket.socket(fileno=self._listen_fd)])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()
        return 0

    async def _follow_supervisor(self, ready: asyncio.Task[EngineInfo]) -> None:
        """Reports to the board, and does what it says. `ready` ends with the engine's ready message."""
        is_ready = False
        drain_until: float | None = None
        while True:
            if not is_ready and self._server.started and ready.done() and ready.exception() is None:
                is_ready = True
                gc.collect()
                gc.freeze()  # modules, routes, tokenizer: no collection walks them again
                gc.set_threshold(*_GC_THRESHOLDS)
                gc.enable()
                self._client.report.update(state=FrontEndState.READY)
            self._client.report.update(num_open=len(self._server.server_state.tasks))
            self._log_level.look()
            state = self._board.read_supervisor().state
            if state == SupervisorState.STOPPING:
                self._stop()
            elif state == SupervisorState.DRAINING and drain_until is None:
                drain_until = time.monotonic() + self._server_config.drain_timeout
                logger.info("draining: %d requests are running", len(self._server.server_state.tasks))
            if drain_until is not None and time.monotonic() >= drain_until:
                self._client.end_streams(_DRAINED)
            await asyncio.sleep(_WATCH_INTERVAL_S if is_ready else _STARTING_INTERVAL_S)

    def _set_log_level(self, level: int) -> None:
        """Here at once; the other processes see it on the board."""
        self._client.report.update(log_level=level, log_level_ns=time.monotonic_ns())
        self._log_level.look()

    def _stop(self) -> None:
        self._client.end_streams(_DRAINED)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _load_tokenizer(launch: Launch) -> Tokenizer:
    model = launch.config.engine.model
    if launch.model_path is None:
        if model.tokenizer is not None:
            return load_tokenizer(Path(model.tokenizer), None, model.chat_template)
        from headrace.testing.bytes import byte_tokenizer  # only the mock engine needs it

        return byte_tokenizer()
    return load_tokenizer(Path(launch.model_path), model.tokenizer, model.chat_template)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
