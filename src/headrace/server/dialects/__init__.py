"""The control routes of other servers, so that trainers written for them work here: thin doors to one control plane.

A dialect parses its bodies, calls `context.client` and answers in its own JSON. `refresh.py` holds what a weight
update needs in all of them.
"""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.dialects import areal, collective_rpc, fastdeploy, sglang, sglang_weights, trl, vllm

__all__ = ["dialect_routers"]


def dialect_routers() -> tuple[APIRouter, ...]:
    return (
        sglang_weights.router,
        sglang.router,
        sglang.numbers,
        vllm.router,
        collective_rpc.router,
        trl.router,
        trl.probes,
        areal.router,
        fastdeploy.router,
        fastdeploy.legacy,
    )
