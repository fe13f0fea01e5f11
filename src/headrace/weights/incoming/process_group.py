"""Receives the tensors that an RL trainer broadcasts over a torch process group it forms with us as a member.

Called by whoever carries out `/init_weights_update_group`, `/update_weights_from_distributed` and their like, in a
thread, as `join` and `receive` block. torch runs in a process of the group's own (`receiver_process.py`): the caller's
never imports it, nor is any group of its own touched. Linux only.

What it can meet: groups made by `init_custom_process_group` and `init_process_group` of OpenRLHF, SGLang, slime and
AReaL, with gloo, or with nccl where there is a GPU. What it cannot: vLLM's and TRL's StatelessProcessGroup, which hands
a pickled NCCL id around and moves data by NCCL alone, so that no CPU can be a member; such trainers need gloo here.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.errors import Conflict, DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from headrace.weights.incoming.base import count_elements
from headrace.weights.incoming.raw import Manifest, parse_dtype, read_raw
from headrace.weights.incoming.receiver_client import ReceiverClient, ReceiverDied
from headrace.weights.incoming.receiver_wire import (
    COUNTER_BYTES,
    GLOO,
    NCCL,
    NO_GPU,
    NO_TORCH,
    SHORT,
    Failed,
    Join,
    Receive,
)
from headrace.weights.tensor import CheckpointTensor

FLATTENED_BUCKET = "flattened_bucket"
PACKED = "packed"
LOAD_FORMATS = (None, FLATTENED_BUCKET, PACKED)
BACKENDS = (GLOO, NCCL)
PACKED_BUFFER_BYTES = 1 << 30  # vLLM's default; the trainer's must be the same
MAX_GROUP_NAME_LENGTH = 256
MAX_HOST_LENGTH = 253
MAX_WORLD_SIZE = 1 << 16
MAX_TIMEOUT_S = 7 * 86400.0

_TOO_LARGE = "Received data size doesn't match expected size"  # gloo's last words


class TransferGroup:
    """Membership in one group of a trainer, from `join()` to `close()`; there may be several, each with its name.

    After any error the group is closed: members of a broadcast that failed no longer agree on what comes next.
    `join` and `receive` are for one thread at a time; `abort`, `close` and `is_open` are for any.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str = GLOO,
        timeout_s: float = 300.0,
    ) -> None:
        """`timeout_s` bounds each `join` and each `receive`. Raises InvalidRequest; nothing is started yet."""
        self._join = Join(host, port, rank, world_size, group_name, backend, timeout_s)
        _check_group(self._join)
        self._what = f"process group {group_name[:80]!r}"
        self._busy = threading.Lock()  # held by the one thread that asks the receiver, or frees it
        self._state = threading.Lock()  # guards the fields below, and is never held while blocking
        self._receiver: ReceiverClient | None = None
        self._is_joined = False
        self._end: str | None = None  # why the group can no longer be used

    @property
    def group_name(self) -> str:
        return self._join.group_name

    @property
    def world_size(self) -> int:
        """Members, the sender and this server among them."""
        return self._join.world_size

    @property
    def is_open(self) -> bool:
        """Joined, and neither failed nor closed since."""
        return self._is_joined and self._end is None

    def join(self) -> None:
        """Blocks until all members have met; with nccl, until the store at `host` answers.

        Raises DeadlineExceeded after `timeout_s`; Unavailable when torch is missing, a connection breaks or `abort()`
        is called; InvalidRequest for nccl without a GPU; Conflict when called twice.
        """
        join = self._join
        with self._exclusively():
            if self._receiver is not None:
                raise Conflict(f"{self._what} was joined before.")
            with self._state:
                self._check_usable()
                self._receiver = ReceiverClient()
            self._ask(self._receiver, join, lambda: f"meeting {join.world_size} members at {join.host}:{join.port}")
            self._is_joined = True

    def receive(
        self,
        manifest: Manifest,
        load_format: str | None = None,
        src: int = 0,
        *,
        packed_buffer_bytes: int = PACKED_BUFFER_BYTES,
    ) -> dict[str, CheckpointTensor]:
        """Takes part in the broadcasts that member `src` makes of the manifest's tensors, and returns them by name.

            None                one broadcast per tensor, in the manifest's order
            "flattened_bucket"  one broadcast with the bytes of all, one after the other (SGLang, slime)
            "packed"            buffers of whole tensors, each closed by the tensor that takes it beyond
                                `packed_buffer_bytes` (vLLM)

        The result is read-only views of memory that lives as long as they do; the same bytes in another dtype of equal
        size go unnoticed. Raises InvalidRequest for a wrong manifest (before anything is received; the group stays
        open), and when the trainer's broadcasts have other sizes; DeadlineExceeded after `timeout_s`; Unavailable when
        a member dies or `abort()` is called.
        """
        with self._exclusively():
            self._check_usable()
            if self._receiver is None or not self._is_joined:
                raise Conflict(f"{self._what} is not joined yet.")
            if src == self._join.rank or not 0 <= src < self._join.world_size:
                raise InvalidRequest(
                    f"{self._what} has no sender {src}; allowed: 0 to {self._join.world_size - 1}, "
                    f"but not {self._join.rank}, which is this server."
                )
            sizes = _broadcast_sizes(manifest, load_format, packed_buffer_bytes)
            descriptor, mapping = _map_buffer(sum(sizes))
            try:
                # This checks the whole manifest; the views then see what the receiver writes under them.
                tensors = read_raw(mapping, manifest)
                names = manifest.names if load_format is None else ()
                self._ask(
                    self._receiver,
                    Receive(sizes, src),
                    lambda: _describe_progress(descriptor, sizes, names),
                    descriptor,
                )
            finally:
                os.close(descriptor)
            return tensors

    def abort(self) -> None:
        """Ends the group at once; a `join` or `receive` that blocks in another thread raises Unavailable."""
        self._kill("aborted")

    def abort_if_busy(self) -> None:
        """The same, if somebody is inside `join` or `receive`."""
        if self._busy.locked():
            self.abort()

    def close(self) -> None:
        """Leaves the group and frees its process; ends a blocked `join` or `receive` first. May be called twice."""
        self._kill("closed")
        with self._busy:
            self._free()

    def _kill(self, reason: str) -> None:
        with self._state:
            self._end = self._end or reason
            if self._receiver is not None:
                self._receiver.kill()

    def _free(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _check_usable(self) -> None:
        if self._end is not None:
            raise Unavailable(f"{self._what} can no longer be used: {self._end}", code="group_closed")

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise Conflict(f"{self._what} is busy with another call.")
        try:
            yield
        finally:
            self._busy.release()

    def _ask(
        self,
        receiver: ReceiverClient,
        command: Join | Receive,
        activity: Callable[[], str],
        descriptor: int | None = None,
    ) -> None:
        """Has `command` carried out within `timeout_s`; otherwise closes the group and raises what happened."""
        timeout_s = self._join.timeout_s
        error: RequestError
        try:
            failed = receiver.ask(command, time.monotonic() + timeout_s, descriptor)
            if failed is None:
                return
            error = _explain_failure(failed, f"{self._what}: {activity()}")
        except TimeoutError:
            error = DeadlineExceeded(f"{self._what}: {activity()} took more than {timeout_s:g} s.")
        except ReceiverDied as death:
            if self._end is not None:
                error = Unavailable(f"{self._what} was {self._end} while {activity()}.", code="aborted")
            else:
                error = _explain_death(death, f"{self._what}: {activity()}")
        except BaseException:
            self._kill("interrupted")  # its answer must not be taken for that of the next command
            raise
        self._kill(error.message)
        self._free()
        raise error


def _check_group(join: Join) -> None:
    if not (join.host.isprintable() and 0 < len(join.host) <= MAX_HOST_LENGTH):
        raise InvalidRequest(f"master address {join.host[:80]!r} is no host name or address.")
    if not 0 < join.port < 1 << 16:
        raise InvalidRequest(f"master port {join.port} is out of range; allowed: 1 to 65535.")
    if not 2 <= join.world_size <= MAX_WORLD_SIZE:
        raise InvalidRequest(f"world size {join.world_size} is out of range; allowed: 2 to {MAX_WORLD_SIZE}.")
    if not 0 <= join.rank < join.world_size:
        raise InvalidRequest(f"rank {join.rank} is out of range; allowed: 0 to {join.world_size - 1}.")
    if not 0 < len(join.group_name) <= MAX_GROUP_NAME_LENGTH:
        raise InvalidRequest(
            f"the group's name has {len(join.group_name)} characters; allowed: 1 to {MAX_GROUP_NAME_LENGTH}."
        )
    if join.backend not in BACKENDS:
        raise InvalidRequest(f"backend {join.backend[:40]!r} is not supported; allowed: {', '.join(BACKENDS)}.")
    if not 0 < join.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout {join.timeout_s} s is out of range; allowed: up to {MAX_TIMEOUT_S:.0f} s.")


def _broadcast_sizes(manifest: Manifest, load_format: str | None, packed_buffer_bytes: int) -> tuple[int, ...]:
    """Bytes of each broadcast. Checks what `read_raw` cannot; fields of different lengths are left to it."""
    if load_format not in LOAD_FORMATS:
        allowed = ", ".join(str(name) for name in LOAD_FORMATS)
        raise InvalidRequest(f"load_format {load_format[:40]!r} is not supported; allowed: {allowed}.")
    if manifest.offsets is not None:
        raise InvalidRequest("the manifest has offsets; a broadcast has none, its tensors follow one another.")
    sizes = [
        parse_dtype(name, dtype).num_bytes(count_elements(name, shape))
        for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=False)
    ]
    if not any(sizes):
        raise InvalidRequest("the manifest has no numbers to receive.")
    if load_format is None:
        return tuple(sizes)
    limit = math.inf if load_format == FLATTENED_BUCKET else packed_buffer_bytes
    buffers = [0]
    for i, size in enumerate(sizes):
        buffers[-1] += size
        if buffers[-1] > limit and i + 1 < len(sizes):
            buffers.append(0)
    return tuple(buffers)


def _map_buffer(num_bytes: int) -> tuple[int, mmap.mmap]:
    """Descriptor of a file in memory with room for the numbers and the counter, and the numbers mapped read-only.

    Its pages come into being as they are written, so a manifest that claims too much costs nothing.
    """
    descriptor = os.memfd_create("headrace-broadcast", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes + COUNTER_BYTES)
        return descriptor, mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
    except (OSError, OverflowError, ValueError):
        os.close(descriptor)
        raise InvalidRequest(f"the manifest is for {num_bytes} bytes, more than can be mapped.") from None


def _describe_progress(descriptor: int, sizes: Sequence[int], names: Sequence[str]) -> str:
    """Where the receiver is; `names` are those of the broadcasts, if they have any."""
    num_done = int.from_bytes(os.pread(descriptor, COUNTER_BYTES, sum(sizes)), "little")
    i = min(num_done, len(sizes) - 1)
    name = f"tensor {names[i][:80]!r}, " if names else ""
    return f"receiving broadcast {i + 1} of {len(sizes)} ({name}{sizes[i]} bytes)"


def _explain_failure(failed: Failed, activity: str) -> RequestError:
    if failed.code == NO_TORCH:
        return Unavailable(
            f"{activity} needs torch, which is not installed: pip install 'headrace[torch]' ({failed.message}).",
            code="torch_missing",
        )
    if failed.code == NO_GPU:
        return InvalidRequest(f"{activity} over nccl needs a GPU, and torch finds none; use the backend gloo.")
    if failed.code == SHORT:
        return InvalidRequest(f"{activity}: the sender's broadcast is smaller than the manifest says.")
    return Unavailable(f"{activity} failed: {failed.message.splitlines()[0][:300]}", code="group_failed")


def _explain_death(death: ReceiverDied, activity: str) -> RequestError:
    if _TOO_LARGE in death.last_words:
        return InvalidRequest(f"{activity}: the sender's broadcast is larger than the manifest says.")
    lines = death.last_words.strip().splitlines() or ["it said nothing"]
    return Unavailable(f"{activity} failed, as its process ended: {lines[-1][:300]}", code="group_failed")
