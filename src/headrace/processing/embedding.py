"""The last of an embedding's arithmetic: cut to the length that was asked for, then scaled to length 1.

For the route and `LLM.embed`; the engine gives the pooled hidden state as the model made it.
"""

from __future__ import annotations

import numpy as np

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.transport.messages import EngineInfo


def check_dimensions(dimensions: int | None, info: EngineInfo) -> None:
    """Raises InvalidRequest unless a vector can be cut to that length, or if there are no vectors."""
    if not info.embedding_size:
        raise InvalidRequest("The served model gives no embeddings.", param="model", code="no_embeddings")
    if dimensions is not None and not 1 <= dimensions <= info.embedding_size:
        raise refusal("dimensions", dimensions, f"an integer from 1 to {info.embedding_size}, the model's size")


def finished(pooled: bytes, dimensions: int | None, *, is_normalised: bool) -> np.ndarray:
    """float32, read-only or new. `pooled`: float32 in the same order. A vector of zeros stays one."""
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if not is_normalised:
        return vector
    exact = vector.astype(np.float64)
    length = float(np.sqrt(np.square(exact).sum()))
    return (exact / length).astype(np.float32) if length > 0 else vector
