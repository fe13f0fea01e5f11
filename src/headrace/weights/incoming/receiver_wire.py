"""What a `TransferGroup` and its receiver process say to each other, over a socket pair. Private to the two.

A message is four bytes of length and msgspec JSON. Numbers do not travel in it: a `Receive` brings the descriptor of an
anonymous file along, both sides map it, and the broadcasts land there. Each side sends only when it is its turn.

    | bytes of broadcast 0 | broadcast 1 | ... | 8 bytes: number of broadcasts that are complete, little-endian |
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

GLOO, NCCL = "gloo", "nccl"
COUNTER_BYTES = 8
_LENGTH_BYTES = 4

# Codes of `Failed`.
NO_TORCH = "no_torch"
NO_GPU = "no_gpu"
SHORT = "short"
TORCH = "torch"


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Meet the other members; `timeout_s` is only the receiver's own backstop, the other side kills it before."""

    host: str
    port: int
    rank: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Take part in one broadcast per entry of `sizes` (bytes), from member `src`."""

    sizes: tuple[int, ...]
    src: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command was carried out."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It was not; `code` is one of those above."""

    code: str
    message: str


Command = Join | Receive
Reply = Done | Failed
Message = Command | Reply
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def send_message(channel: socket.socket, message: Message, descriptor: int | None = None) -> None:
    data = msgspec.json.encode(message)
    descriptors = [] if descriptor is None else [descriptor]
    socket.send_fds(channel, [len(data).to_bytes(_LENGTH_BYTES, "little")], descriptors)
    channel.sendall(data)


def receive_message(channel: socket.socket, deadline: float | None = None) -> tuple[Message, int | None]:
    """The next message, and the descriptor that came with it, which is now the caller's to close.

    Raises EOFError when the other side is gone, and TimeoutError at `deadline` (by time.monotonic()).
    """
    _limit(channel, deadline)
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, 1)
    try:
        head += _receive_exactly(channel, _LENGTH_BYTES - len(head), deadline) if head else b""
        data = _receive_exactly(channel, int.from_bytes(head, "little"), deadline) if head else b""
        if not data:
            raise EOFError
        return _decoder.decode(data), descriptors[0] if descriptors else None
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive_exactly(channel: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        _limit(channel, deadline)
        part = channel.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _limit(channel: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        channel.settimeout(None)
        return
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    channel.settimeout(left_s)
