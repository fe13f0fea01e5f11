"""What all trainers' clients have: a connection, and calls that must succeed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from headrace.weights.incoming.raw import Manifest

TIMEOUT_S = 60.0


class Trainer:
    """`with Slime(url) as trainer: ...`"""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> Any:
        """The reply's JSON; None for an empty one. Without a body there is none, not even `{}`."""
        response = self.http.post(path, **({} if body is None else {"json": body}), **kwargs)
        response.raise_for_status()
        return response.json() if response.content else None

    def get(self, path: str, **kwargs: Any) -> Any:
        response = self.http.get(path, **kwargs)
        response.raise_for_status()
        return response.json() if response.content else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()


def lists(manifest: Manifest) -> dict[str, Any]:
    """As SGLang's dialect has them."""
    return {
        "names": list(manifest.names),
        "dtypes": list(manifest.dtypes),
        "shapes": [list(shape) for shape in manifest.shapes],
    }
