"""The control routes of a server over HTTP, for `headrace ctl`. Nothing here prints.

An operation is started with `wait: false` and asked after until it has ended, so that no proxy's time limit matters and
its progress can be shown. An interrupt cancels it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from headrace.cli.sources import api_base, raise_status
from headrace.errors import HeadraceError, StartupError

CONNECT_TIMEOUT_S: Final = 10.0
QUERY_TIMEOUT_S: Final = 30.0
FIRST_POLL_S: Final = 0.05
SLOWEST_POLL_S: Final = 1.0
CHUNK_BYTES: Final = 4 * 1024 * 1024

Json = dict[str, Any]
OnPoll = Callable[[Json], None]
"""Called with the server's status while an operation runs."""


class ControlClient:
    """`with ControlClient(url, key) as client:`. Raises StartupError (no server) or RequestError (it refused)."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = api_base(url).removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=f"{self.url}/v1/control", headers=headers, timeout=QUERY_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Json:
        return self._send("GET", path)

    def post(self, path: str, body: Json) -> Json:
        return self._send("POST", path, json=body)

    def run(self, kind: str, body: Json, on_poll: OnPoll) -> Json:
        """The operation once it has ended, well or not."""
        return self._finish(self.post(f"/{kind}", {**body, "wait": False}), on_poll)

    def upload(
        self, kind: str, file: Path, query: Mapping[str, str], on_bytes: Callable[[int], None], on_poll: OnPoll
    ) -> Json:
        """The same for an operation that takes a safetensors file as its body. `on_bytes`: how many more were sent."""
        headers = {"Content-Type": "application/x-safetensors", "Content-Length": str(file.stat().st_size)}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        operation = self._send(
            "POST",
            f"/{kind}",
            params={**query, "wait": "false"},
            content=_chunks(file, on_bytes),
            headers=headers,
            timeout=timeout,
        )
        return self._finish(operation, on_poll)

    def _finish(self, operation: Json, on_poll: OnPoll) -> Json:
        pause_s = FIRST_POLL_S
        try:
            while operation["state"] in ("pending", "running"):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, SLOWEST_POLL_S)
                operation = self.get(f"/operations/{operation['id']}")
                on_poll(self.get("/status"))
        except KeyboardInterrupt:
            with suppress(HeadraceError):  # it may just have ended
                self.post(f"/operations/{operation['id']}/cancel", {})
            raise
        return operation

    def _send(self, method: str, path: str, **request: Any) -> Json:
        try:
            response = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise StartupError(f"cannot reach {self.url}: {error}") from error
        raise_status(response)
        try:
            reply = response.json()
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise StartupError(f"{response.url} answered no JSON object; is this a Headrace server?")
        return reply


def _chunks(file: Path, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            yield chunk
            on_bytes(len(chunk))
