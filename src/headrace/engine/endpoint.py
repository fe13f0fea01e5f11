"""The engine's side of the channel: one thread that owns the ROUTER socket, the codec and the list of front ends.

`EngineLoop` sees two queues only: what arrives goes to `post`, what it emits waits here until the thread has sent it.
So a slow or dead front end costs the engine nothing, and bytes that are no message end here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from headrace.transport import codec
from headrace.transport.messages import PROTOCOL_VERSION, EngineDead, FromEngine, Goodbye, Hello, ToEngine
from headrace.transport.sockets import Waker, bind_engine

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_TURN: Final = 256  # then what the engine emitted goes out
_STOP_TIMEOUT_S: Final = 5.0


class EngineEndpoint:
    """Binds in the constructor, so that front ends may connect while the model loads; `start` begins to read."""

    def __init__(self, endpoint: str) -> None:
        self.num_malformed = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_engine(self._context, endpoint)
        self._waker = Waker()
        self._outbox: deque[tuple[int, FromEngine]] = deque()
        self._stopping = threading.Event()
        self._post: Callable[[int, ToEngine], None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)
        # A client number names one incarnation of a front end, and is never used again.
        self._next_client = 1
        self._client_of_identity: dict[bytes, int] = {}
        self._identity_of_client: dict[int, bytes] = {}
        self._client_of_front_end: dict[int, int] = {}

    def start(self, post: Callable[[int, ToEngine], None]) -> None:
        self._post = post
        self._thread.start()

    def emit(self, client: int, message: FromEngine) -> None:
        """From any thread; never blocks."""
        self._outbox.append((client, message))
        self._waker.wake()

    def close(self) -> None:
        """Sends what was emitted, then lets go of the socket. Idempotent."""
        if self._socket.closed:
            return
        self._stopping.set()
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        self._socket.close()
        self._context.term()
        self._waker.close()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        while True:
            self._waker.clear()  # first: what is looked at below may change after it, and wakes again then
            is_last_turn = self._stopping.is_set()
            self._send_all()
            if is_last_turn:
                return
            if not self._receive_some():
                poller.poll()

    def _send_all(self) -> None:
        while self._outbox:
            client, message = self._outbox.popleft()
            identity = self._identity_of_client.get(client)
            if identity is not None:
                self._send(identity, message)

    def _send(self, identity: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart((identity, codec.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.error("could not send to front end %r: %s", identity, error)

    def _receive_some(self) -> bool:
        """True when there may be more."""
        for _ in range(_MAX_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._handle(frames)
        return True

    def _handle(self, frames: list[bytes]) -> None:
        assert self._post is not None, "the thread starts with it"
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise codec.CodecError(f"{len(frames)} frames, expected 2")
            message = codec.decode_to_engine(frames[1])
            if isinstance(message, Hello):
                self._welcome(identity, message)
                return
            client = self._client_of_identity.get(identity)
            if client is None:
                raise codec.CodecError(f"{type(message).__name__} from a front end that has not said Hello")
        except codec.CodecError as error:
            self.num_malformed += 1
            logger.warning("dropped a message of front end %r: %s", identity, error)
            return
        self._post(client, message)
        if isinstance(message, Goodbye):
            self._forget(client)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        assert self._post is not None, "the thread starts with it"
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"the front end speaks protocol {hello.protocol}, the engine {PROTOCOL_VERSION}"
            self._send(identity, EngineDead(reason))
            return
        predecessor = self._client_of_front_end.get(hello.front_end)
        if predecessor is not None and self._identity_of_client[predecessor] != identity:
            logger.info("front end %d came back: aborting what its predecessor had asked for", hello.front_end)
            self._post(predecessor, Goodbye())
            self._forget(predecessor)
        client = self._client_of_identity.get(identity)
        if client is None:
            client, self._next_client = self._next_client, self._next_client + 1
            self._client_of_identity[identity] = client
            self._identity_of_client[client] = identity
            self._client_of_front_end[hello.front_end] = client
        self._post(client, hello)

    def _forget(self, client: int) -> None:
        del self._client_of_identity[self._identity_of_client.pop(client)]
        for front_end, of_front_end in list(self._client_of_front_end.items()):
            if of_front_end == client:
                del self._client_of_front_end[front_end]
