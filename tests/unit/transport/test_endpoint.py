"""The engine's I/O thread against raw sockets: bad bytes, strangers, restarted front ends, slow readers, last words."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headrace.engine.endpoint import EngineEndpoint
from headrace.errors import StartupError
from headrace.transport import codec
from headrace.transport.messages import Abort, AbortDone, EngineDead, FromEngine, Goodbye, Hello, StepOutputs, ToEngine
from headrace.transport.sockets import connect_front_end, ipc_endpoint


class Wire:
    """An endpoint, what it posted, and raw peers."""

    def __init__(self, folder: Path) -> None:
        self.address = ipc_endpoint(folder)
        self.endpoint = EngineEndpoint(self.address)
        self.posted: queue.Queue[tuple[int, ToEngine]] = queue.Queue()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []
        self.endpoint.start(lambda client, message: self.posted.put((client, message)))

    def peer(self, identity: str) -> zmq.Socket[bytes]:
        self.peers.append(connect_front_end(self.context, self.address, identity.encode()))
        return self.peers[-1]

    def hello(self, peer: zmq.Socket[bytes], front_end: int = 0, incarnation: str = "a") -> int:
        peer.send(codec.encode(Hello(front_end, incarnation)))
        client, message = self.posted.get(timeout=5)
        assert isinstance(message, Hello)
        return client


@pytest.fixture
def wire() -> Iterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        wire = Wire(Path(folder))
        yield wire
        wire.endpoint.close()
        for peer in wire.peers:
            peer.close(linger=0)
        wire.context.term()


def receive(peer: zmq.Socket[bytes]) -> FromEngine:
    assert peer.poll(5000), "nothing came"
    return codec.decode_from_engine(peer.recv())


def test_bad_bytes_are_dropped_and_counted(wire: Wire) -> None:
    peer = wire.peer("a")
    client = wire.hello(peer)
    peer.send(b"\xc1 not a message")
    peer.send_multipart([b"two", b"frames"])
    peer.send(codec.encode(EngineDead("wrong direction")))
    peer.send(codec.encode(Abort(call_id=1)))
    assert wire.posted.get(timeout=5) == (client, Abort(call_id=1))
    assert wire.endpoint.num_malformed == 3


def test_who_has_not_said_hello_is_not_heard(wire: Wire) -> None:
    stranger, peer = wire.peer("stranger"), wire.peer("a")
    stranger.send(codec.encode(Abort(call_id=1)))
    stranger.send(codec.encode(Hello(1, "x")))
    client, message = wire.posted.get(timeout=5)
    assert isinstance(message, Hello)
    assert wire.endpoint.num_malformed == 1
    assert wire.hello(peer) != client


def test_another_protocol_is_told_so(wire: Wire) -> None:
    peer = wire.peer("a")
    peer.send(codec.encode(Hello(0, "a", protocol=99)))
    answer = receive(peer)
    assert isinstance(answer, EngineDead)
    assert "99" in answer.reason
    assert wire.posted.empty()


def test_a_new_incarnation_ends_the_old_one(wire: Wire) -> None:
    old, new = wire.peer("0-a"), wire.peer("0-b")
    old_client = wire.hello(old)
    new.send(codec.encode(Hello(0, "b")))
    assert wire.posted.get(timeout=5) == (old_client, Goodbye())
    new_client, _ = wire.posted.get(timeout=5)
    assert new_client != old_client
    wire.endpoint.emit(old_client, AbortDone(1, 1))  # rows that were under way to the old one
    wire.endpoint.emit(new_client, AbortDone(2, 2))
    assert receive(new) == AbortDone(2, 2)
    assert not old.poll(50)


def test_goodbye_forgets(wire: Wire) -> None:
    peer = wire.peer("a")
    client = wire.hello(peer)
    peer.send(codec.encode(Goodbye()))
    assert wire.posted.get(timeout=5) == (client, Goodbye())
    assert wire.hello(peer, incarnation="again") != client


def test_a_reader_that_sleeps_blocks_nobody_and_loses_nothing(wire: Wire) -> None:
    slow, quick = wire.peer("slow"), wire.peer("quick")
    slow_client, quick_client = wire.hello(slow, 0), wire.hello(quick, 1)
    for step in range(20_000):
        rows = StepOutputs(request_ids=[step], choices=[0], num_tokens=[1], token_ids=[step], finished=[0])
        wire.endpoint.emit(slow_client, rows)
    wire.endpoint.emit(quick_client, AbortDone(1, 0))
    assert receive(quick) == AbortDone(1, 0)
    for step in range(20_000):
        rows = receive(slow)
        assert isinstance(rows, StepOutputs)
        assert rows.token_ids == [step]


def test_last_words_are_delivered(wire: Wire) -> None:
    peer = wire.peer("a")
    client = wire.hello(peer)
    wire.endpoint.emit(client, EngineDead("boom"))
    wire.endpoint.close()
    assert receive(peer) == EngineDead("boom")


def test_a_front_end_may_come_before_the_engine() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, zmq.Context() as context:
        peer = connect_front_end(context, ipc_endpoint(Path(folder)), b"early")
        peer.send(codec.encode(Hello(0, "a")))
        endpoint = EngineEndpoint(ipc_endpoint(Path(folder)))
        posted: queue.Queue[tuple[int, ToEngine]] = queue.Queue()
        endpoint.start(lambda client, message: posted.put((client, message)))
        assert posted.get(timeout=5)[1] == Hello(0, "a")
        endpoint.close()
        peer.close(linger=0)


def test_a_path_that_is_too_long_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="TMPDIR"):
        ipc_endpoint(Path("/tmp/" + "x" * 100))


def test_a_stop_is_seen_at_whatever_moment_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before a turn clears the wake-up: it must look for the reason afterwards, or it would sleep for ever."""
    endpoint = EngineEndpoint(ipc_endpoint(tmp_path))
    clear = endpoint._waker.clear

    def stop_and_clear() -> None:
        endpoint._stopping.set()
        endpoint._waker.wake()
        clear()

    monkeypatch.setattr(endpoint._waker, "clear", stop_and_clear)
    endpoint.start(lambda client, message: None)
    endpoint._thread.join(5.0)
    assert not endpoint._thread.is_alive()
    endpoint.close()
