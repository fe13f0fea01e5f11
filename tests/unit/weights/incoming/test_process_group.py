"""Weights broadcast over torch process groups: real ranks on loopback, and every way in which a broadcast can go wrong.

Importing torch takes seconds in each process, so all groups of the module meet at once, in one fixture, and a test
that ends its group has one of its own.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from headrace.errors import Conflict, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from headrace.testing.torch_sender import Sending, TorchSender, pattern
from headrace.weights.incoming.process_group import TransferGroup
from headrace.weights.incoming.raw import Manifest
from headrace.weights.incoming.receiver_client import MODULE, ReceiverClient
from headrace.weights.tensor import CheckpointTensor, TensorKind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

MIXED = Manifest(
    names=("f32", "f16", "empty", "bf16", "scalar", "big"),
    dtypes=("float32", "float16", "float32", "bfloat16", "bfloat16", "bfloat16"),
    shapes=((3, 5), (7,), (0, 4), (2, 3, 4), (), (300, 1000)),
)
PACKED_BUFFER_BYTES = 64  # closed by f32 (with f16), by bf16, and by big


def one(*shape: int, dtype: str = "float32") -> Manifest:
    return Manifest(names=("w",), dtypes=(dtype,), shapes=(shape,))


SENDINGS: dict[str, list[Sending]] = {
    "main": [
        Sending(manifest=MIXED),
        Sending(manifest=MIXED, load_format="flattened_bucket"),
        Sending(manifest=MIXED, load_format="packed", packed_buffer_bytes=PACKED_BUFFER_BYTES),
    ],
    "second": [Sending(manifest=one(4))],
    "too large": [Sending(manifest=one(4))],
    "too small": [Sending(manifest=one(4, dtype="bfloat16"))],
    "killed": [Sending(manifest=one(4))],
    "silent": [],
}
TIMEOUTS_S = {"silent": 10.0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def make_group(name: str, port: int, timeout_s: float = 30.0) -> TransferGroup:
    return TransferGroup(host="127.0.0.1", port=port, rank=1, world_size=2, group_name=name, timeout_s=timeout_s)


class Meeting:
    """The groups, joined, and the process id of each one's sender."""

    def __init__(self, sender: TorchSender) -> None:
        ports = {name: free_port() for name in SENDINGS}
        self.groups = {name: make_group(name, port) for name, port in ports.items()}
        with ThreadPoolExecutor(len(SENDINGS)) as pool:
            joins = [pool.submit(group.join) for group in self.groups.values()]
            self.senders = {name: sender.start_group(name, ports[name], SENDINGS[name]) for name in SENDINGS}
            for join in joins:
                join.result()

    def __getitem__(self, name: str) -> TransferGroup:
        return self.groups[name]


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    with TorchSender() as sender:
        meeting = Meeting(sender)
        yield meeting
        for group in meeting.groups.values():
            group.close()


def check(tensors: dict[str, CheckpointTensor], manifest: Manifest) -> None:
    assert tuple(tensors) == manifest.names
    for i, (tensor, shape) in enumerate(zip(tensors.values(), manifest.shapes, strict=True)):
        assert not tensor.data.flags.writeable
        np.testing.assert_array_equal(tensor.dequantize(), pattern(shape, i))


def failure(act: Callable[[], object]) -> tuple[RequestError, float]:
    """The error that `act` raises, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RequestError) as caught:
        act()
    return caught.value, time.monotonic() - start


def test_three_forms_in_one_group(meeting: Meeting) -> None:
    group = meeting["main"]
    for wrong in (
        Manifest(names=("a", "a"), dtypes=("float32",) * 2, shapes=((1,),) * 2),
        Manifest(names=("a",), dtypes=("int8",), shapes=((1,),)),
        Manifest(names=("a", "b"), dtypes=("float32",), shapes=((1,),)),
        Manifest(names=("a",), dtypes=("float32",), shapes=((1 << 40, 1 << 40),)),
        Manifest(names=("a",), dtypes=("float32",), shapes=((1 << 40, 1 << 14),)),
        Manifest(names=("a",), dtypes=("float32",), shapes=((1,),), offsets=(0,)),
        Manifest(names=(), dtypes=(), shapes=()),
    ):
        with pytest.raises(InvalidRequest):  # and the group is as good as before
            group.receive(wrong)
    each = group.receive(MIXED)
    check(each, MIXED)
    assert each["bf16"].kind is TensorKind.BF16
    check(group.receive(MIXED, "flattened_bucket"), MIXED)
    check(group.receive(MIXED, "packed", packed_buffer_bytes=PACKED_BUFFER_BYTES), MIXED)
    assert group.is_open
    group.close()
    group.close()
    assert not group.is_open
    check(each, MIXED)  # the memory outlives the group
    with pytest.raises(Unavailable, match="process group 'main' can no longer be used: closed"):
        group.receive(MIXED)


def test_a_second_group_its_refusals_and_its_abort(meeting: Meeting) -> None:
    group = meeting["second"]
    check(group.receive(one(4)), one(4))
    with pytest.raises(Conflict, match="was joined before"):
        group.join()
    with pytest.raises(InvalidRequest, match="load_format 'direct' is not supported; allowed: None, flattened_bucket"):
        group.receive(one(4), "direct")
    for src in (1, 2, -1):
        with pytest.raises(InvalidRequest, match=f"no sender {src}; allowed: 0 to 1, but not 1"):
            group.receive(one(4), src=src)
    assert group.is_open
    threading.Timer(0.3, group.abort).start()
    error, seconds = failure(lambda: group.receive(one(4)))
    assert type(error) is Unavailable
    assert error.code == "aborted"
    assert error.message.startswith("process group 'second' was aborted while receiving broadcast 1 of 1")
    assert seconds < 3


def test_torch_has_one_thread_and_gloo_a_few(meeting: Meeting) -> None:
    receivers = [process for process in psutil.Process().children() if MODULE in process.cmdline()]
    assert receivers
    # main, the reader of commands, gloo's loop and its two workers; torch may start one more when it is imported
    assert max(receiver.num_threads() for receiver in receivers) <= 6


def test_more_bytes_than_the_manifest_says(meeting: Meeting) -> None:
    error, seconds = failure(lambda: meeting["too large"].receive(one(2)))
    assert type(error) is InvalidRequest
    assert error.message == (
        "process group 'too large': receiving broadcast 1 of 1 (tensor 'w', 8 bytes): "
        "the sender's broadcast is larger than the manifest says."
    )
    assert seconds < 5
    assert not meeting["too large"].is_open


def test_fewer_bytes_than_the_manifest_says(meeting: Meeting) -> None:
    error, _ = failure(lambda: meeting["too small"].receive(one(4)))
    assert type(error) is InvalidRequest
    assert error.message.endswith("(tensor 'w', 16 bytes): the sender's broadcast is smaller than the manifest says.")


def test_sender_killed_between_two_tensors(meeting: Meeting) -> None:
    two = Manifest(names=("w", "v"), dtypes=("float32",) * 2, shapes=((4,),) * 2)
    threading.Timer(0.5, os.kill, (meeting.senders["killed"], signal.SIGKILL)).start()
    error, seconds = failure(lambda: meeting["killed"].receive(two))
    assert type(error) is Unavailable
    assert error.message.startswith(
        "process group 'killed': receiving broadcast 2 of 2 (tensor 'v', 16 bytes) failed: "
    )
    assert "Connection closed by peer" in error.message
    assert seconds < 5


def test_a_sender_that_says_nothing(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    group = meeting["silent"]
    monkeypatch.setattr(group, "_join", msgspec.structs.replace(group._join, timeout_s=0.5))
    error, seconds = failure(lambda: group.receive(one(4)))
    assert type(error) is DeadlineExceeded
    assert error.message == (
        "process group 'silent': receiving broadcast 1 of 1 (tensor 'w', 16 bytes) took more than 0.5 s."
    )
    assert 0.4 < seconds < 3


def test_nobody_at_the_address() -> None:
    port = free_port()
    with closing(make_group("lonely", port, timeout_s=0.5)) as group:
        error, seconds = failure(group.join)
    assert type(error) is DeadlineExceeded
    assert error.message == f"process group 'lonely': meeting 2 members at 127.0.0.1:{port} took more than 0.5 s."
    assert 0.4 < seconds < 3


@pytest.mark.parametrize(("end", "word"), [(TransferGroup.abort, "aborted"), (TransferGroup.close, "closed")])
def test_join_is_ended_from_another_thread(end: Callable[[TransferGroup], None], word: str) -> None:
    with closing(make_group("early", free_port())) as group:
        threading.Timer(0.3, end, (group,)).start()
        error, seconds = failure(group.join)
    assert type(error) is Unavailable
    assert error.message.startswith(f"process group 'early' was {word} while meeting 2 members at 127.0.0.1:")
    assert seconds < 3


def test_one_call_at_a_time_and_none_after_the_end() -> None:
    with closing(make_group("busy", free_port())) as group, ThreadPoolExecutor(1) as pool:
        with pytest.raises(Conflict, match="process group 'busy' is not joined yet"):
            group.receive(one(4))
        join = pool.submit(group.join)
        while group._receiver is None:
            time.sleep(0.001)
        with pytest.raises(Conflict, match="process group 'busy' is busy with another call"):
            group.join()
        group.abort()
        assert isinstance(join.exception(), Unavailable)
        group.abort()


def test_a_group_aborted_before_it_is_joined() -> None:
    group = make_group("late", free_port())
    group.abort()
    with pytest.raises(Unavailable, match="process group 'late' can no longer be used: aborted"):
        group.join()
    group.close()


def test_the_receiver_goes_with_its_server() -> None:
    client = ReceiverClient()
    client._channel.close()  # as the kernel does when the server is killed
    assert client._process.wait(5.0) == 0
    client.close()


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('hidden for a test')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(make_group("torchless", free_port())) as group:
        error, _ = failure(group.join)
    assert type(error) is Unavailable
    assert error.code == "torch_missing"
    assert "pip install 'headrace[torch]' (hidden for a test)" in error.message


def test_nccl_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with closing(
        TransferGroup(host="localhost", port=free_port(), rank=1, world_size=2, group_name="g", backend="nccl")
    ) as group:
        error, _ = failure(group.join)
    assert type(error) is InvalidRequest
    assert error.message.endswith("over nccl needs a GPU, and torch finds none; use the backend gloo.")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("host", "", "master address '' is no host name"),
        ("host", "a\nb", "is no host name"),
        ("port", 0, "master port 0 is out of range; allowed: 1 to 65535"),
        ("port", 65536, "master port 65536 is out of range"),
        ("world_size", 1, "world size 1 is out of range; allowed: 2 to "),
        ("rank", 2, "rank 2 is out of range; allowed: 0 to 1"),
        ("group_name", "", "the group's name has 0 characters"),
        ("backend", "mpi", "backend 'mpi' is not supported; allowed: gloo, nccl"),
        ("timeout_s", 0.0, "timeout 0.0 s is out of range"),
        ("timeout_s", float("nan"), "timeout nan s is out of range"),
    ],
)
def test_what_the_constructor_refuses(field: str, value: object, message: str) -> None:
    fields: dict[str, object] = {"host": "h", "port": 1, "rank": 1, "world_size": 2, "group_name": "g", field: value}
    with pytest.raises(InvalidRequest, match=message):
        TransferGroup(**fields)  # type: ignore[arg-type]
