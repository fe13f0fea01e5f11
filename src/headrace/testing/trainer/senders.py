"""The ways in which a trainer's weights reach the server; `SOURCES` has their names, `create_sender` makes one.

Each `send` is one refresh: when it returns, the server samples from these weights under this version.
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle  # noqa: TID251  (the trainer's side of SGLang's dialect)
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.testing.shared_tensors import DTYPES, SharedTensors
from headrace.testing.tiny import write_safetensors
from headrace.testing.trainer.group import TrainerGroup
from headrace.testing.trainer.policy import Arrays
from headrace.testing.trainer.rollouts import Server
from headrace.weights.incoming import parse_dtype, tensor_checksum
from headrace.weights.tensor import CheckpointTensor

NUM_BUCKETS = 3
FRAME = {"Content-Type": "application/octet-stream"}
SAFETENSORS = {"Content-Type": "application/x-safetensors"}


class Sender(Protocol):
    """From one thread."""

    def send(self, arrays: Arrays, version: str) -> None:
        """Returns when the server has these weights, all of a model; raises if it has not."""
        ...

    def close(self) -> None:
        """Gives back what the sender holds."""
        ...


class Disk:
    """A folder per version. The last one stays as long as the sender: a server that sleeps reads it when it wakes."""

    def __init__(self, server: Server, model: Path) -> None:
        self._server = server
        self._model = model
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-trainer-")
        self._last: Path | None = None

    def send(self, arrays: Arrays, version: str) -> None:
        folder = save(Path(self._folder.name) / version, self._model, arrays)
        self._server.control("refresh_weights", source={"kind": "path", "path": str(folder)}, version=version)
        if self._last is not None:
            shutil.rmtree(self._last)
        self._last = folder

    def close(self) -> None:
        self._folder.cleanup()


class Group:
    """Broadcasts of a torch process group, which is formed with the first version and kept."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._group: TrainerGroup | None = None

    def send(self, arrays: Arrays, version: str) -> None:
        if self._group is None:
            self._group = TrainerGroup(self._server)
        source = {"kind": "group", "group_name": self._group.name, **manifest_of(arrays)}
        self._group.broadcast([as_torch(array) for array in arrays.values()], source, version)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


class Whole:
    """All tensors, by a function that leaves nothing behind."""

    def __init__(self, server: Server, transfer: Callable[[Server, Arrays, str], None]) -> None:
        self._server = server
        self._transfer = transfer

    def send(self, arrays: Arrays, version: str) -> None:
        self._transfer(self._server, arrays, version)

    def close(self) -> None:
        pass


class Changes:
    """What differs from the weights that the server has, by a function that takes the changed tensors and the old."""

    def __init__(
        self, server: Server, present: Arrays, transfer: Callable[[Server, Arrays, Arrays, str], None]
    ) -> None:
        self._server = server
        self._present = present
        self._transfer = transfer

    def send(self, arrays: Arrays, version: str) -> None:
        changed = {name: array for name, array in arrays.items() if not np.array_equal(array, self._present[name])}
        self._transfer(self._server, changed, self._present, version)
        self._present = arrays

    def close(self) -> None:
        pass


def send_safetensors(server: Server, arrays: Arrays, version: str) -> None:
    """One body with all tensors, as a safetensors file."""
    with tempfile.NamedTemporaryFile(prefix="headrace-trainer-") as file:
        write_safetensors(Path(file.name), tensors_of(arrays))
        server.control_with("refresh_weights", params={"version": version}, content=file, headers=SAFETENSORS)


def send_frames(server: Server, arrays: Arrays, version: str) -> None:
    """Several bodies with raw tensors and their checksums, between begin and commit."""
    server.control("begin_refresh")
    for bucket in buckets(arrays):
        checksums = {tensor.name: tensor_checksum(tensor) for tensor in tensors_of(bucket)}
        content = frame(manifest_of(bucket) | {"checksums": checksums}, *bucket.values())
        server.control_with("apply_refresh", content=content, headers=FRAME)
    server.control("commit_refresh", version=version)


def send_in_shared_memory(server: Server, arrays: Arrays, version: str) -> None:
    """A segment, for a server on the same machine."""
    with SharedTensors(arrays) as shared:
        source = {"kind": "shared_memory", "segment": shared.name, **manifest_of(arrays)}
        server.control("refresh_weights", source=source, version=version)


def send_pickles(server: Server, arrays: Arrays, version: str) -> None:
    """SGLang's dialect: base64 of pickled tensors, several calls of which the last one flushes."""
    parts = list(buckets(arrays))
    for index, bucket in enumerate(parts):
        pickled = pickle.dumps([(name, as_torch(array)) for name, array in bucket.items()])
        body = {
            "serialized_named_tensors": [base64.b64encode(pickled).decode()],
            "load_format": None,
            "flush_cache": index == len(parts) - 1,
            "weight_version": version,
        }
        server.post("/update_weights_from_tensor", json=body)


def send_tensors(server: Server, changed: Arrays, present: Arrays, version: str) -> None:
    """The changed tensors, each of them whole."""
    content = frame({**manifest_of(changed), "delta": True, "version": version}, *changed.values())
    server.control_with("refresh_weights", content=content, headers=FRAME)


def send_numbers(server: Server, changed: Arrays, present: Arrays, version: str) -> None:
    """The changed numbers, by their places in each tensor; checksums say what must come of it."""
    places = {name: np.flatnonzero(array != present[name]) for name, array in changed.items()}
    header = {
        **manifest_of(changed),
        "format": "sparse",
        "shapes": [[each.size] for each in places.values()],
        "checksums": {
            tensor.name: tensor_checksum(CheckpointTensor.from_floats(tensor.name, tensor.dequantize()))
            for tensor in tensors_of(changed)
        },
        "delta": True,
        "version": version,
    }
    parts = [part for name, at in places.items() for part in (at.astype(np.int32), changed[name].reshape(-1)[at])]
    server.control_with("refresh_weights", content=frame(header, *parts), headers=FRAME)


WHOLE = {
    "safetensors": send_safetensors,
    "frames": send_frames,
    "shared_memory": send_in_shared_memory,
    "pickle": send_pickles,
}
CHANGES = {"delta": send_tensors, "sparse": send_numbers}
SOURCES = ("disk", "group", *WHOLE, *CHANGES)


def create_sender(source: str, server: Server, model: Path, present: Arrays) -> Sender:
    """`model` is the folder that the server was started with, `present` the weights that it has."""
    if source == "disk":
        return Disk(server, model)
    if source == "group":
        return Group(server)
    if source in WHOLE:
        return Whole(server, WHOLE[source])
    return Changes(server, present, CHANGES[source])


def save(folder: Path, model: Path, arrays: Arrays) -> Path:
    """A folder like `model` with these weights. Returns it."""
    if not model.is_dir():
        raise ValueError(f"{model} is no folder whose config and tokenizer could be copied")
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_safetensors(folder / "model.safetensors", tensors_of(arrays))
    return folder


def tensors_of(arrays: Arrays) -> list[CheckpointTensor]:
    return [
        CheckpointTensor(
            name,
            array.shape,
            parse_dtype(name, DTYPES[array.dtype.name]),
            np.ascontiguousarray(array).reshape(-1).view(np.uint8),
        )
        for name, array in arrays.items()
    ]


def manifest_of(arrays: Arrays) -> dict[str, Any]:
    return {
        "names": list(arrays),
        "dtypes": [DTYPES[array.dtype.name] for array in arrays.values()],
        "shapes": [list(array.shape) for array in arrays.values()],
    }


def frame(header: Mapping[str, Any], *arrays: np.ndarray) -> bytes:
    """The body of `application/octet-stream`: the JSON's length, the JSON, the arrays' bytes."""
    text = json.dumps(header).encode()
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(np.ascontiguousarray(array).tobytes() for array in arrays)]
    )


def buckets(arrays: Arrays, count: int = NUM_BUCKETS) -> Iterator[dict[str, np.ndarray]]:
    """At most `count` parts, nearly equal in bytes, in order; tensors that belong together may come apart."""
    limit = sum(array.nbytes for array in arrays.values()) / count
    bucket: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        bucket[name] = array
        if sum(each.nbytes for each in bucket.values()) >= limit:
            yield bucket
            bucket = {}
    if bucket:
        yield bucket


def as_torch(array: np.ndarray) -> Any:
    torch: Any = importlib.import_module("torch")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
