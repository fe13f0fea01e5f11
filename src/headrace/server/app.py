"""Makes the HTTP application of one front end: routes, middleware, error bodies, OpenAPI.

`process.py` serves it; tests call it in process. It starts no process and owns neither client nor lifecycle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from headrace.client.base import EngineClient
from headrace.client.lifecycle import Lifecycle
from headrace.config.generation import parse_defaults
from headrace.config.options import ServeConfig
from headrace.errors import ConfigError
from headrace.observability.logs import set_level
from headrace.observability.pauses import CollectorPauses
from headrace.observability.prometheus import Metrics
from headrace.observability.tracing import open_tracer
from headrace.processing.inputs import InputProcessor
from headrace.processing.parsing import load_parsing
from headrace.processing.tokenizer import Tokenizer
from headrace.server.body import UNKNOWN_FIELDS
from headrace.server.context import ServerContext
from headrace.server.errors import install_error_handlers
from headrace.server.keys import KeyRing
from headrace.server.middleware import REQUEST_ID, BodyLimitMiddleware, RequestMiddleware
from headrace.server.openapi import install_openapi
from headrace.server.response_store import ResponseStore
from headrace.server.routes import all_routers
from headrace.server.spool import remove_stale
from headrace.server.version import VERSION

LAG_INTERVAL_S = 0.02  # a gap shorter than that may go unseen, a longer one does not
LAST_SPANS_S = 1.0  # the supervisor waits a little more than that for a front end to go
DESCRIPTION = (
    "OpenAI-compatible inference. Errors are `{error: {message, type, param, code}}` on every route. "
    "The routes of SGLang, vLLM, TRL, AReaL and FastDeploy are not listed here: see docs/rl.md and docs/fastdeploy.md."
)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServeConfig,
    *,
    served_names: tuple[str, ...],
    lifecycle: Lifecycle | None = None,
    front_end: int = 0,
    runtime_dir: Path | None = None,
    set_log_level: Callable[[int], None] = set_level,
) -> FastAPI:
    """`served_names`: what requests may call the model, the default first. `front_end` labels metrics and traces.

    Raises ConfigError for parsers or plugins that do not load, and for half a login.
    """
    assert served_names, "a model has a name"
    if (config.eplb.eplb_user is None) != (config.eplb.eplb_password is None):
        raise ConfigError("--eplb-user and --eplb-password go together; one of them is missing")
    observability = config.observability
    context = ServerContext(
        client=client,
        tokenizer=tokenizer,
        config=config,
        served_names=served_names,
        lifecycle=lifecycle,
        inputs=InputProcessor(
            tokenizer, config.admission, seed=config.engine.model.seed, grammar=config.engine.grammar
        ),
        parsing=load_parsing(config.parsing, tokenizer),
        keys=KeyRing(config.server.api_key, config.server.admin_key),
        metrics=_metrics(client, config, served_names[0], runtime_dir, front_end),
        sampling_defaults=parse_defaults(config.engine.model.override_generation_config),
        runtime_dir=runtime_dir,
        responses=_response_store(config, runtime_dir, front_end),
        set_log_level=set_log_level,
        tracer=open_tracer(observability.otlp_traces_endpoint, version=VERSION, instance=f"front-end-{front_end}"),
    )
    app = FastAPI(
        title="Headrace", version=VERSION, description=DESCRIPTION, lifespan=_lifespan, redirect_slashes=False,
        docs_url=None, redoc_url=None,  # openapi.py has our own
    )  # fmt: skip
    app.state.context = context
    app.state.paths = _include_routes(app)
    install_error_handlers(app)
    install_openapi(app)
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=config.admission.max_body_bytes)
    app.add_middleware(RequestMiddleware)
    if config.server.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.server.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, UNKNOWN_FIELDS, "Retry-After"],
        )
    return app


def _include_routes(app: FastAPI) -> frozenset[str]:
    """Returns their paths; those with a parameter as they are written."""
    routers = all_routers()
    for router in routers:
        app.include_router(router)
    return frozenset(getattr(route, "path", "") for router in routers for route in router.routes)


def _metrics(
    client: EngineClient, config: ServeConfig, model_name: str, runtime_dir: Path | None, front_end: int
) -> Metrics:
    return Metrics(
        model_name,
        client.status,
        front_end=front_end,
        num_front_ends=config.server.api_servers,
        directory=runtime_dir,
        aliases=config.observability.metrics_alias,
    )


def _response_store(config: ServeConfig, runtime_dir: Path | None, front_end: int) -> ResponseStore:
    is_shared = config.server.api_servers > 1
    path = runtime_dir / "responses.db" if runtime_dir is not None and is_shared else None
    return ResponseStore(config.server.response_store_bytes, path, front_end)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServerContext = app.state.context
    await asyncio.to_thread(remove_stale)
    lag = asyncio.create_task(_observe_lag(context.metrics))
    try:
        yield
    finally:
        for task in (lag, *context.tasks):
            task.cancel()
        await asyncio.gather(lag, *context.tasks, return_exceptions=True)
        context.inputs.close()
        if context.tracer is not None:
            await asyncio.to_thread(context.tracer.close, LAST_SPANS_S)


async def _observe_lag(metrics: Metrics) -> None:
    """How late the loop wakes up says how long something else held it."""
    pauses = CollectorPauses()
    try:
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            metrics.observe("event_loop_lag_seconds", max(0.0, time.monotonic() - due))
            for seconds in pauses.take():
                metrics.observe("gc_pause_seconds", seconds)
    finally:
        pauses.close()
