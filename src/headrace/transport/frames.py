"""Framed messages over a socket pair, between a process and a child that it has started itself.

A frame is eight bytes of length and the message; descriptors may ride along. Who sends when is the callers' business.
"""

from __future__ import annotations

import os
import socket
import time

_LENGTH_BYTES = 8


def send_frame(channel: socket.socket, data: bytes, descriptor: int | None = None) -> None:
    """Blocks until all is on its way."""
    descriptors = [] if descriptor is None else [descriptor]
    socket.send_fds(channel, [len(data).to_bytes(_LENGTH_BYTES, "little")], descriptors)
    channel.sendall(data)


def receive_frame(channel: socket.socket, deadline: float | None = None) -> tuple[bytes, int | None]:
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
        return data, descriptors[0] if descriptors else None
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
