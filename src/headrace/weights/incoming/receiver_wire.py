"""What a `TransferGroup` and its receiver process say to each other, over a socket pair. Private to the two.

A message is a frame of msgspec JSON. Numbers do not travel in it: a `Receive` brings the descriptor of an
anonymous file along, both sides map it, and the broadcasts land there. Each side sends only when it is its turn.

    | bytes of broadcast 0 | broadcast 1 | ... | 8 bytes: number of broadcasts that are complete, little-endian |
"""

from __future__ import annotations

import socket

import msgspec

from headrace.transport.frames import receive_frame, send_frame

GLOO, NCCL = "gloo", "nccl"
COUNTER_BYTES = 8

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
    send_frame(channel, msgspec.json.encode(message), descriptor)


def receive_message(channel: socket.socket, deadline: float | None = None) -> tuple[Message, int | None]:
    """As `receive_frame`: EOFError when the other side is gone, TimeoutError at `deadline`."""
    data, descriptor = receive_frame(channel, deadline)
    return _decoder.decode(data), descriptor
