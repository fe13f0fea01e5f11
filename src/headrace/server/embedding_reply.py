"""The JSON of /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ErrorInfo, Unavailable
from headrace.processing.embedding import finished
from headrace.processing.outputs import TextDelta
from headrace.server.shape import ChoiceParts, weight_version
from headrace.types import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingReply:
    """`Reply` of a route that never streams."""

    id: str
    created: int
    model: str
    dimensions: int | None
    is_normalised: bool
    is_base64: bool

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._vector(parts.embedding)}
                for index, parts in enumerate(choices)
            ],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
            **weight_version(choices),
        }

    def _vector(self, pooled: bytes | None) -> str | list[float]:
        if pooled is None:
            raise Unavailable("the request was aborted before its embedding was computed", code="aborted")
        vector = finished(pooled, self.dimensions, is_normalised=self.is_normalised)
        if self.is_base64:
            return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        raise AssertionError("an embedding has no stream")

    def end(self, usage: Usage) -> bytes:
        raise AssertionError("an embedding has no stream")

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        raise AssertionError("an embedding has no stream")
