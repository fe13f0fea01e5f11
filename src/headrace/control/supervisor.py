"""`headrace serve` itself: starts the engine and the front ends, watches them, drains and stops them. Serves nothing.

Called by `cli/serve.py` in the main thread. Exit codes of `serve`: 0 after a drain (SIGTERM or SIGINT once), 1 when the
engine died, 128 + signal when a second signal forced the end; what keeps the server from starting is a StartupError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from headrace.config.launch import Launch
from headrace.config.options import ServeConfig
from headrace.control.announce import ready_lines
from headrace.control.children import explain_exit, start_engine
from headrace.control.front_ends import FrontEnds
from headrace.control.hang import HangWatch
from headrace.control.listen import open_listeners, url_of
from headrace.control.runtime_dir import RuntimeDir
from headrace.control.wakeup import SignalWakeup
from headrace.errors import StartupError
from headrace.observability.logs import configure_logging, set_level
from headrace.transport.board import EngineState, StatusBoard, SupervisorRecord, SupervisorState
from headrace.transport.log_level import LogLevelFollower
from headrace.transport.sockets import ipc_endpoint

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_STARTING_TICK_S: Final = 0.02  # until it is ready
# How long each part of the end may take. Their sum stays under the 10 s within which everything is gone.
_STACKS_S: Final = 0.5  # a hung engine writes its stacks
_FLUSH_S: Final = 3.0  # front ends write the error of a dead engine to every open stream
_MIN_FLUSH_S: Final = 0.3  # until then they may not have noticed
_FRONT_ENDS_STOP_S: Final = 3.5
_ENGINE_STOP_S: Final = 2.0
_DRAIN_SLACK_S: Final = 5.0  # after --drain-timeout the front ends themselves end what still runs


def serve(config: ServeConfig, model_path: Path | None) -> int:
    """Runs the server until it ends, and returns the exit code. Raises StartupError when it cannot start."""
    started_s = time.monotonic()
    configure_logging(config.observability.log_level, "supervisor", config.observability.log_format)
    listeners = open_listeners(config.server.host, config.server.port, config.server.api_servers)
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        wakeup = stack.enter_context(SignalWakeup())
        runtime_dir = stack.enter_context(RuntimeDir())
        launch = Launch(
            config=config,
            model_path=str(model_path) if model_path is not None else None,
            runtime_dir=str(runtime_dir),
            endpoint=ipc_endpoint(runtime_dir),
            listen_fds=tuple(listener.fileno() for listener in listeners),
        )
        launch_path = runtime_dir / "launch.json"
        launch.write(launch_path)
        board = StatusBoard.create(
            launch.board_path, len(listeners), launch.config.engine.parallel.tensor_parallel_size
        )
        front_ends = FrontEnds(launch_path, board, listeners)
        return Supervisor(launch, launch_path, board, front_ends, wakeup, url_of(listeners[0]), started_s).run()


class Supervisor:
    """One run of the server, from the first child to the last."""

    def __init__(
        self,
        launch: Launch,
        launch_path: Path,
        board: StatusBoard,
        front_ends: FrontEnds,
        wakeup: SignalWakeup,
        url: str,
        started_s: float,
    ) -> None:
        self._launch = launch
        self._server = launch.config.server
        self._board = board
        self._record = SupervisorRecord(pid=os.getpid())
        self._front_ends = front_ends
        self._wakeup = wakeup
        self._log_level = LogLevelFollower(board, set_level)
        self._hang = HangWatch(self._server.hang_timeout)
        self._url = url
        self._started_s = started_s
        self._is_ready = False
        self._drain_from_s = 0.0  # the front ends have seen the word by then
        self._drain_until: float | None = None
        self._engine = start_engine(launch_path)

    def run(self) -> int:
        self._write(state=SupervisorState.RUNNING)
        try:
            return self._supervise()
        finally:
            self._stop_all()

    # ------------------------------------------------------------------ while it serves

    def _supervise(self) -> int:
        while True:
            if self._has_engine_ended():
                return self._end_with_engine()
            if self._is_ready and self._has_engine_hung():
                self._show_and_kill_engine()
                continue
            self._tend_front_ends()
            self._log_level.look()
            signals = self._wakeup.stop_signals
            if len(signals) > 1:
                return 128 + signals[1]
            if signals and not self._is_ready:
                return 0
            if signals and self._drain_until is None:
                self._begin_drain()
            if self._drain_until is not None and self._is_drained(self._drain_until):
                return 0
            if not self._is_ready:
                self._check_ready()
            self._wakeup.sleep(_TICK_S if self._is_ready else _STARTING_TICK_S)

    def _has_engine_ended(self) -> bool:
        return not self._engine.is_running or self._board.read_engine().state == EngineState.DEAD

    def _has_engine_hung(self) -> bool:
        return self._hang.is_hung(self._board.read_engine().heartbeat_ns, time.monotonic())

    def _show_and_kill_engine(self) -> None:
        """What a step waits for will not come any more; a process that is gone can be started again."""
        num_ranks = self._launch.config.engine.parallel.tensor_parallel_size
        ages = [self._board.read_engine().heartbeat_age_s]
        ages += [self._board.read_worker(rank).heartbeat_age_s for rank in range(1, num_ranks)]
        told = ", ".join(f"rank {rank} {age_s:.0f} s" for rank, age_s in enumerate(ages))
        logger.error("the engine hangs (last heartbeats: %s ago); its stacks follow, then it is killed", told)
        self._engine.show_stacks()
        self._wait(lambda: not self._engine.is_running, _STACKS_S)
        self._engine.kill()
        self._engine.reap()

    def _end_with_engine(self) -> int:
        self._write(engine_is_dead=1)
        cause = explain_exit(self._engine.exit_code)
        if not self._is_ready:
            raise StartupError(self._failure() or f"the engine ended while it started ({cause}); its log says why")
        logger.error("the engine died (%s): ending every request and the server", cause)
        flush_from = time.monotonic() + _MIN_FLUSH_S
        self._wait(lambda: time.monotonic() >= flush_from and self._front_ends.num_open == 0, _FLUSH_S)
        return 1

    def _tend_front_ends(self) -> None:
        if self._drain_until is not None:
            return
        try:
            self._front_ends.note_deaths()
        except StartupError as error:
            raise StartupError(self._failure() or str(error)) from None
        if failure := self._failure():
            raise StartupError(failure)
        self._front_ends.start_missing()

    def _failure(self) -> str | None:
        """The line that a child left when it could not start."""
        with contextlib.suppress(FileNotFoundError):
            return self._launch.failure_path.read_text(encoding="utf-8") or None
        return None

    def _check_ready(self) -> None:
        seconds = time.monotonic() - self._started_s
        if self._board.read_engine().state == EngineState.READY and self._front_ends.are_ready:
            self._is_ready = True
            lines = ready_lines(
                self._url,
                self._launch.served_names[0],
                has_chat_template=self._front_ends.has_chat_template,
                needs_key=bool(self._server.api_key),
                seconds=seconds,
            )
            print("\n".join(lines), flush=True)
        elif seconds > self._server.startup_timeout:
            raise StartupError(f"not ready after {self._server.startup_timeout:g} s (--startup-timeout)")

    # ------------------------------------------------------------------ the end

    def _begin_drain(self) -> None:
        self._drain_until = time.monotonic() + self._server.drain_timeout + _DRAIN_SLACK_S
        self._write(state=SupervisorState.DRAINING)
        self._drain_from_s = time.monotonic() + _MIN_FLUSH_S
        logger.info("draining for at most %g s; a second signal stops at once", self._server.drain_timeout)

    def _is_drained(self, until: float) -> bool:
        now = time.monotonic()
        return now >= until or (now >= self._drain_from_s and self._front_ends.num_open == 0)

    def _stop_all(self) -> None:
        """Nothing of the server is left when it returns."""
        self._write(state=SupervisorState.STOPPING)
        front_ends = self._front_ends.children
        for child in front_ends:
            child.ask_to_stop()
        self._wait(lambda: not any(child.is_running for child in front_ends), _FRONT_ENDS_STOP_S)
        self._engine.ask_to_stop()
        self._wait(lambda: not self._engine.is_running, _ENGINE_STOP_S)
        children = [self._engine, *front_ends]
        for child in children:
            if child.is_running and len(self._wakeup.stop_signals) < 2:
                logger.warning("%s did not stop in time: killed", child.name)
            child.kill()
        for child in children:
            child.reap()

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Until it is done, the time is over, or a second signal says at once."""
        until = time.monotonic() + seconds
        while not is_done() and time.monotonic() < until and len(self._wakeup.stop_signals) < 2:
            self._wakeup.sleep(min(_TICK_S, max(0.0, until - time.monotonic())))

    def _write(self, **changes: int) -> None:
        self._record = msgspec.structs.replace(self._record, **changes)
        self._board.write_supervisor(self._record)
