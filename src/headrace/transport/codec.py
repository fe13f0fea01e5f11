"""Bytes <-> the messages of `messages.py`: typed msgpack, one decoder per direction. Thread-safe, holds no state.

Called by the engine's I/O thread and by `ZmqClient`. Bytes that are no message of the direction raise `CodecError`: the
receiver drops and counts them, and lives on.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.errors import HeadraceError
from headrace.transport.messages import FromEngine, ToEngine

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_ENGINE: Final[msgspec.msgpack.Decoder[ToEngine]] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: Final[msgspec.msgpack.Decoder[FromEngine]] = msgspec.msgpack.Decoder(FromEngine)


class CodecError(HeadraceError):
    """Bytes that are not a message of this direction. Never carries the bytes themselves."""


def encode(message: ToEngine | FromEngine) -> bytes:
    return _ENCODER.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    try:
        return _TO_ENGINE.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CodecError(f"{len(data)} bytes are no message to the engine: {error}") from None


def decode_from_engine(data: bytes | memoryview) -> FromEngine:
    try:
        return _FROM_ENGINE.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CodecError(f"{len(data)} bytes are no message from the engine: {error}") from None
