"""One module per group of routes; `all_routers` is what the application includes."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.routes import (
    chat,
    completions,
    control,
    embeddings,
    experts,
    health,
    messages,
    metrics,
    models,
    responses,
    tokenize,
)

__all__ = ["all_routers"]


def all_routers() -> tuple[APIRouter, ...]:
    # some dialects answer with these routes' own functions
    from headrace.server.dialects import dialect_routers, generation_routers

    modules = (chat, completions, responses, messages, embeddings, models, tokenize, health, metrics, control, experts)
    return (*(module.router for module in modules), *generation_routers(), *dialect_routers())
