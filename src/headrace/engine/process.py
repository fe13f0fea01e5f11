"""The engine process: `python -m headrace.engine.process <launch file>`, started and watched by the supervisor.

Loads the model, answers front ends through `EngineEndpoint`, writes its slot of the status board, and runs `EngineLoop`
in its main thread until the supervisor's pipe closes. Why it cannot start goes to the launch's failure file, in one
line.
"""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Final

from headrace.config.launch import Launch
from headrace.engine.core import EngineCore
from headrace.engine.endpoint import EngineEndpoint
from headrace.engine.loop import EngineLoop
from headrace.errors import StartupError
from headrace.executor import Executor, Grammars, create_executor, create_mock_executor
from headrace.grammar import Vocabulary
from headrace.kernels import describe
from headrace.observability.logs import configure_logging, set_level
from headrace.transport.board import EngineState, StatusBoard
from headrace.transport.log_level import LogLevelFollower
from headrace.transport.messages import EngineInfo
from headrace.transport.parent_watch import ParentWatch, leave_signals_to_supervisor, show_stacks_on_request
from headrace.transport.stats import EngineStats

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.0005
"""How long the step loop may keep the I/O thread waiting for the interpreter; Python's own 5 ms would delay tokens."""


def main(argv: list[str]) -> int:
    leave_signals_to_supervisor()
    show_stacks_on_request()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    watch = ParentWatch()
    launch = Launch.read(Path(argv[1]))
    observability = launch.config.observability
    configure_logging(observability.log_level, "engine", observability.log_format)
    board = StatusBoard.open(launch.board_path)
    board.write_engine(EngineState.STARTING, EngineStats())
    endpoint = EngineEndpoint(launch.endpoint)
    try:
        executor, core = build_core(launch)
    except StartupError as error:
        launch.fail(str(error))
        return 1
    log_start(core.info, launch.config.engine.model.backend, executor.info.num_ranks)
    try:
        return run(core, endpoint, board, watch, launch)
    finally:
        executor.close()


def build_core(launch: Launch) -> tuple[Executor, EngineCore]:
    config, server = launch.config.engine, launch.config.server
    if launch.model_path is None:
        assert server.mock_engine, "only the mock engine runs without a model"
        executor = create_mock_executor(config.model, server.mock_step_delay)
    else:
        path, tokenizer = Path(launch.model_path), config.model.tokenizer
        kept = config.grammar.num_grammars_kept
        executor = create_executor(
            config.model,
            path,
            Grammars(lambda: _load_vocabulary(path, tokenizer), kept),
            parallel=config.parallel,
            observability=launch.config.observability,
            board_path=launch.board_path,
        )
    core = EngineCore(
        executor,
        config.cache,
        config.scheduler,
        config.model.max_model_len,
        holds_while_asleep=config.control.requests_while_asleep == "wait",
    )
    return executor, core


def _load_vocabulary(path: Path, tokenizer: str | None) -> Vocabulary:
    """The one place where the engine's process reads a tokenizer, for grammars; loaded only then."""
    from headrace.processing.vocabulary import load_vocabulary

    return load_vocabulary(path, tokenizer)


def log_start(info: EngineInfo, asked_backend: str, num_ranks: int = 1) -> None:
    logger.info(
        "serving %s with %s kernels%s: context %d tokens, KV %d tokens in %d blocks, up to %d sequences",
        info.model,
        describe(info.backend),
        f" on {num_ranks} ranks" if num_ranks > 1 else "",
        info.max_model_len,
        info.max_kv_tokens,
        info.num_blocks,
        info.max_num_seqs,
    )
    if asked_backend == "auto" and info.backend == "reference":
        logger.warning(
            "the compiled kernels were not built, so the slow numpy ones serve: "
            "install a C++ compiler, then Headrace again"
        )


def run(core: EngineCore, endpoint: EngineEndpoint, board: StatusBoard, watch: ParentWatch, launch: Launch) -> int:
    """Serves until the watch says stop (0) or the engine fails (1)."""
    last = EngineStats()
    log_level = LogLevelFollower(board, set_level)

    def publish(stats: EngineStats) -> None:
        nonlocal last
        last = stats
        board.write_engine(EngineState.READY, stats)
        log_level.look()

    path = None if launch.model_path is None else Path(launch.model_path)
    loop = EngineLoop(core, endpoint.emit, publish, launch.config.engine.control, path, launch.config.engine.experts)
    watch.on_stop = loop.stop
    gc.collect()
    gc.freeze()  # the model and the modules live as long as the process: no collection walks them
    publish(core.stats())
    endpoint.start(loop.post)
    try:
        loop.run()
    except Exception:
        logger.exception("the engine failed")
        return 1
    finally:
        board.write_engine(EngineState.DEAD, last)
        endpoint.close()
        watch.on_stop = _nothing  # it would keep the engine alive
        gc.unfreeze()
    return 0


def _nothing() -> None:
    """All that could be stopped has stopped."""


if __name__ == "__main__":
    sys.exit(main(sys.argv))
