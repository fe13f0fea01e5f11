"""One module per group of routes; `all_routers` is what the application includes."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.routes import chat, completions, control, health, messages, metrics, models, responses, tokenize

__all__ = ["all_routers"]


def all_routers() -> tuple[APIRouter, ...]:
    from headrace.server.dialects import dialect_routers  # some of them answer with these routes' own functions

    modules = (chat, completions, responses, messages, models, tokenize, health, metrics, control)
    return (*(module.router for module in modules), *dialect_routers())
