"""`headrace serve`: options to one config, the model to a path (fetched if it is missing), then the supervisor."""

from __future__ import annotations

import argparse
import dataclasses

from headrace.config.cli import add_options, given_options
from headrace.config.generation import resolve_model_config
from headrace.config.load import load_config
from headrace.config.options import ServeConfig
from headrace.observability.tracing import check_tracing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace serve [MODEL] [options]"
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    config = load_config(ServeConfig, given_options(args), args.config)
    check_tracing(config.observability.otlp_traces_endpoint)
    # Imported late: `--help` and a wrong option need none of it.
    from headrace.control.supervisor import serve
    from headrace.weights.hub import resolve_model

    if config.server.mock_engine:
        return serve(config, None)
    model = config.engine.model
    resolved = resolve_model(model.model, model.revision)
    model = resolve_model_config(model, resolved.name, resolved.recommended_sampling)
    engine = dataclasses.replace(config.engine, model=model)
    return serve(dataclasses.replace(config, engine=engine), resolved.path)
