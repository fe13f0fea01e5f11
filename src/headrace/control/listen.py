"""The listening sockets, made by the supervisor and inherited by the front ends.

The supervisor keeps them open: while a front end is being restarted, connections wait in the kernel instead of being
refused. With several front ends the kernel spreads connections over their sockets (SO_REUSEPORT).
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from headrace.errors import ConfigError, StartupError

_BACKLOG: Final = 2048
_MAX_PORT: Final = 65535


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` listening sockets on one port; port 0 picks a free one for all. Raises StartupError in one line."""
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(f"--port must be from 0 to {_MAX_PORT}, got {port}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error}") from None
    family, _, _, _, address = found[0]
    sockets: list[socket.socket] = []
    try:
        # Bound alone first: with SO_REUSEPORT a second server on a used port would start and take half the connections.
        sockets.append(_bind(family, address, is_shared=False))
        if count > 1:
            shared_address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.pop().close()
            for _ in range(count):
                sockets.append(_bind(family, shared_address, is_shared=True))
        for listener in sockets:
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {_explain(error)}") from None
    return sockets


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(family: int, address: tuple[object, ...], *, is_shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _explain(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is in use (choose another with --port, or 0 for any free one)"
        case errno.EACCES:
            return "no permission (ports below 1024 need privileges)"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address (see --host)"
        case _:
            return str(error)
