"""Where the requests of `headrace run-batch` go with `--url`. It imports nothing of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpx

from headrace.cli.sources import api_base, raise_status
from headrace.errors import StartupError

CONNECT_TIMEOUT_S: Final = 10.0


@asynccontextmanager
async def server_target(url: str, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A server that speaks OpenAI's API. Raises StartupError when none is there."""
    base = api_base(url).removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits) as http:
        try:
            response = await http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StartupError(f"cannot reach {base}: {error}") from error
        raise_status(response)
        yield http
