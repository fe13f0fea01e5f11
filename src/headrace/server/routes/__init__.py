"""One module per group of routes; `all_routers` is what the application includes."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.dialects import dialect_routers
from headrace.server.routes import chat, completions, control, health, metrics, models, tokenize

__all__ = ["all_routers"]


def all_routers() -> tuple[APIRouter, ...]:
    modules = (chat, completions, models, tokenize, health, metrics, control)
    return (*(module.router for module in modules), *dialect_routers())
