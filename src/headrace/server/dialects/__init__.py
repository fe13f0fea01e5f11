"""The routes of other servers, so that trainers written for them work here: thin doors to one control plane, and to the
same generation as the OpenAI routes (`generate.py`, `trl_generate.py`, `vllm_generate.py`).

A dialect parses its bodies, calls `context.client` and answers in its own JSON. `refresh.py` holds what a weight
update needs in all of them.
"""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.dialects import (
    areal,
    collective_rpc,
    eplb,
    fastdeploy,
    generate,
    sglang,
    sglang_experts,
    sglang_weights,
    trl,
    trl_generate,
    vllm,
    vllm_generate,
)

__all__ = ["dialect_routers", "generation_routers"]


def dialect_routers() -> tuple[APIRouter, ...]:
    """Those of operators and trainers, and a few probes."""
    return (
        sglang_weights.router,
        sglang.router,
        sglang_experts.router,
        sglang.numbers,
        vllm.router,
        collective_rpc.router,
        trl.router,
        trl.probes,
        areal.router,
        fastdeploy.router,
        fastdeploy.legacy,
        eplb.router,
    )


def generation_routers() -> tuple[APIRouter, ...]:
    """Those that a user may call."""
    return generate.router, trl_generate.router, vllm_generate.router
