"""What a worker answers when it cannot do what rank 0 says: always something, or rank 0 would wait for ever."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.errors import InvalidRequest
from headrace.kernels import has_native
from headrace.transport import worker as wire

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")


class FakeRank:
    """Gives or raises what it is told."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def answer(self, call: wire.Call, descriptor: int | None) -> wire.Reply:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return cast(wire.Reply, self.outcome)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (wire.Done(num_bytes=3), wire.Done(num_bytes=3)),
        (InvalidRequest("no"), wire.Failed("InvalidRequest", "no")),
        (KeyError("layers.0"), wire.Failed("", "KeyError: 'layers.0'")),
    ],
    ids=["success", "refusal", "failure"],
)
def test_every_call_has_an_answer(outcome: Any, expected: wire.Reply) -> None:
    from headrace.executor.worker_process import Rank, _answer

    rank = cast(Rank, FakeRank(outcome))
    assert wire.decode_reply(_answer(rank, wire.encode(wire.FreeKV()), None)) == expected
    assert isinstance(wire.decode_reply(_answer(rank, b"nonsense", None)), wire.Failed)


def test_an_answer_that_cannot_be_encoded_has_failed() -> None:
    from headrace.executor.worker_process import Rank, _answer

    rank = cast(Rank, FakeRank(wire.Done(num_bytes=1 << 64)))  # quicker than a tensor of 4 GiB
    reply = wire.decode_reply(_answer(rank, wire.encode(wire.FreeKV()), None))
    assert isinstance(reply, wire.Failed)
    assert "OverflowError" in reply.message
