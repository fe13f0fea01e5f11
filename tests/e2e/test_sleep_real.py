"""Sleeping and refreshing a real model: memory is given back, the state shows, and the same answers come afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.testing.server import RunningServer

pytestmark = pytest.mark.real_model
WEIGHTS_BYTES = 90 * 1024 * 1024
PROMPT = "The river ran past the mill, and"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    with RunningServer([str(smollm2), "--kv-cache-memory", "512MiB"]) as server:
        yield server


def answer(server: RunningServer, prompt: str = PROMPT, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0} | fields
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def control(server: RunningServer, operation: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/control/{operation}", json=fields, timeout=60)
    response.raise_for_status()
    result: dict[str, Any] = response.json()["result"][0]
    return result


def engine_bytes(server: RunningServer) -> int:
    (engine,) = server.children("headrace.engine.process")
    return int(engine.memory_full_info().uss)


def test_sleep_gives_the_memory_back(server: RunningServer) -> None:
    """The reply comes after the effect, and says what was freed."""
    before = answer(server)
    answer(server, "7 " * 1500, max_tokens=1)  # touches KV memory
    awake = engine_bytes(server)
    freed = control(server, "sleep")["freed_bytes"]
    asleep = engine_bytes(server)
    assert awake - asleep > WEIGHTS_BYTES + 50_000_000, (awake, asleep)
    assert freed > WEIGHTS_BYTES

    readyz = server.get("/readyz")
    assert (readyz.status_code, readyz.json()["reasons"]) == (503, ["asleep"])
    assert server.get("/livez").status_code == 200
    assert server.get("/v1/control/status").json()["asleep"] == ["weights", "kv_cache"]
    refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert int(refused.headers["retry-after"]) > 0

    control(server, "wake", tags=["weights"])
    assert server.get("/readyz").json()["reasons"] == ["asleep"]
    control(server, "wake")
    assert server.get("/readyz").status_code == 200
    assert answer(server) == before


def test_refreshes_leave_no_memory_behind(server: RunningServer, smollm2: Path) -> None:
    before = answer(server)
    sizes = []
    for number in range(6):
        staged = "always" if number % 2 else "never"
        source = {"kind": "path", "path": str(smollm2)}
        result = control(server, "refresh_weights", source=source, staged=staged, version=f"v{number}")
        assert result["staged"] is (staged == "always")
        assert answer(server) == before
        sizes.append(engine_bytes(server))
    assert max(sizes[2:]) < sizes[1] + 20_000_000, sizes
