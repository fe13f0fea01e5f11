"""Reads the pickles that RL trainers send: SGLang's `serialized_named_tensors`, bucketed or not. Nothing is unpickled.

Called for `/update_weights_from_tensor`. The payload is base64 of a pickle, which for Python's own unpickler would be
code from the network; here `pickle_machine.py` interprets it and `torch_values.py` says what it may hold. Tensors must
come as bytes (plain pickles of CPU tensors, or torch.save): handles of CUDA IPC or of shared memory are refused with
advice.

    None, "direct"        list of (name, tensor or LocalSerializedTensor), or a dict of these
    "flattened_bucket"    {"flattened_tensor": one 1-D tensor, "metadata": [FlattenedTensorMetadata, ...]}
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence

import numpy as np

from headrace.errors import InvalidRequest
from headrace.weights.incoming.base import Buffer, check_count, check_name, count_elements, view_tensor
from headrace.weights.incoming.pickle_machine import Budget, Record, type_name
from headrace.weights.incoming.raw import parse_dtype
from headrace.weights.incoming.torch_file import TorchReader
from headrace.weights.incoming.torch_values import (
    BUCKET_METADATA,
    LOCAL_TENSOR,
    TorchDtype,
    TorchTensor,
    storage_bytes,
    to_checkpoint_tensor,
    whole_number,
)
from headrace.weights.tensor import CheckpointTensor

FLATTENED_BUCKET = "flattened_bucket"
LOAD_FORMATS = (None, "direct", FLATTENED_BUCKET)


def read_serialized_tensors(
    serialized: Sequence[str | bytes], *, load_format: str | None = None, rank: int = 0
) -> dict[str, CheckpointTensor]:
    """The tensors in `serialized_named_tensors`, of which `rank`'s alone is read: each rank is sent whole tensors.

    One element is base64 (str), or the pickle itself (bytes). Raises InvalidRequest for whatever cannot be read.
    """
    if rank >= len(serialized):
        raise InvalidRequest(f"serialized_named_tensors has {len(serialized)} elements; rank {rank} has none.")
    payload = serialized[rank]
    data = _decode_base64(payload, "serialized_named_tensors") if isinstance(payload, str) else payload
    return read_pickled_tensors(data, load_format=load_format, rank=rank)


def read_pickled_tensors(
    pickled: Buffer, *, load_format: str | None = None, rank: int = 0
) -> dict[str, CheckpointTensor]:
    """The tensors in a pickle by name, as views of `pickled` wherever they are contiguous."""
    if load_format not in LOAD_FORMATS:
        allowed = ", ".join(str(name) for name in LOAD_FORMATS)
        raise InvalidRequest(f"load_format {load_format[:40]!r} is not supported; allowed: {allowed}.")
    data = memoryview(pickled).toreadonly()
    budget = Budget(copy_bytes=len(data))
    reader = TorchReader(budget)
    value = reader.read(data)
    if load_format == FLATTENED_BUCKET:
        return _split_bucket(value)
    tensors: dict[str, CheckpointTensor] = {}
    for name, item in _named_items(value):
        check_name(name, tensors)
        if isinstance(item, Record) and item.cls is LOCAL_TENSOR:
            item = _open_local(name, item, rank, reader, budget)
        if not isinstance(item, TorchTensor):
            raise InvalidRequest(f"tensor {name[:80]!r} is a {type_name(item)}; allowed: a torch tensor.")
        tensors[name] = to_checkpoint_tensor(name, item, budget)
    return tensors


def _decode_base64(text: str, what: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        raise InvalidRequest(f"{what} is no base64: {error}.") from None


def _named_items(value: object) -> list[tuple[str, object]]:
    """(name, value) pairs out of a list of pairs or a dict."""
    if isinstance(value, dict):
        check_count(len(value))
        return list(value.items())
    if not isinstance(value, list):
        raise InvalidRequest(f"the pickle holds a {type_name(value)}; needed: a list of (name, tensor).")
    check_count(len(value))
    items = []
    for i, item in enumerate(value):
        if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
            raise InvalidRequest(f"element {i} of the pickled list is a {type_name(item)}, not a (name, tensor).")
        items.append((item[0], item[1]))
    return items


def _open_local(name: str, record: Record, rank: int, reader: TorchReader, budget: Budget) -> object:
    """The value of `rank` in a LocalSerializedTensor: a pickle of its own per rank."""
    values = record.values.get("values")
    if not isinstance(values, list | tuple) or rank >= len(values):
        raise InvalidRequest(f"tensor {name[:80]!r} is a LocalSerializedTensor without a value for rank {rank}.")
    value = values[rank]
    if isinstance(value, str):
        what = f"tensor {name[:80]!r}"
        budget.spend_copy(len(value) // 4 * 3, what)
        value = memoryview(_decode_base64(value, what))
    if not isinstance(value, memoryview):
        raise InvalidRequest(f"tensor {name[:80]!r} holds a {type_name(value)} for rank {rank}; allowed: bytes.")
    return reader.read(value)


def _split_bucket(value: object) -> dict[str, CheckpointTensor]:
    """Views of the one tensor of a flattened bucket.

    Positions count bytes where it is uint8 (newer SGLang), else numbers, which are then of every tensor's dtype.
    """
    flat = value.get("flattened_tensor") if isinstance(value, dict) else None
    metadata = value.get("metadata") if isinstance(value, dict) else None
    if not isinstance(flat, TorchTensor) or not isinstance(metadata, list):
        raise InvalidRequest(
            f"load_format {FLATTENED_BUCKET} needs a dict of flattened_tensor (a torch tensor) and metadata (a list)."
        )
    if len(flat.shape) != 1 or (flat.shape[0] > 1 and flat.stride != (1,)):
        raise InvalidRequest(
            f"flattened_tensor has shape {list(flat.shape)} and stride {list(flat.stride)}; "
            "needed: one contiguous dimension."
        )
    dtype = flat.storage.dtype
    data = np.frombuffer(storage_bytes(flat.storage, "flattened_tensor"), np.uint8)
    start, end = flat.offset * dtype.itemsize, (flat.offset + flat.shape[0]) * dtype.itemsize
    if end > data.size:
        raise InvalidRequest(f"flattened_tensor lies at bytes {start} to {end} of a storage of {data.size}.")
    check_count(len(metadata))
    tensors: dict[str, CheckpointTensor] = {}
    for i, record in enumerate(metadata):
        tensor = _bucket_tensor(i, record, dtype, data[start:end])
        check_name(tensor.name, tensors)
        tensors[tensor.name] = tensor
    return tensors


def _bucket_tensor(i: int, record: object, flat: TorchDtype, data: np.ndarray) -> CheckpointTensor:
    if not isinstance(record, Record) or record.cls is not BUCKET_METADATA or not record.values:
        raise InvalidRequest(f"metadata {i} is a {type_name(record)}; allowed: FlattenedTensorMetadata.")
    name, shape, dtype = (record.values[field] for field in ("name", "shape", "dtype"))
    if not isinstance(name, str) or not isinstance(shape, tuple | list):
        raise InvalidRequest(f"metadata {i} has no name or no shape.")
    what = f"tensor {name[:80]!r}"
    if not isinstance(dtype, TorchDtype | str):
        raise InvalidRequest(f"{what} has a dtype of type {type_name(dtype)}; allowed: a torch dtype.")
    dtype_name = dtype if isinstance(dtype, str) else dtype.name
    kind = parse_dtype(name, dtype_name)
    if flat.name != "uint8" and parse_dtype("flattened_tensor", flat.name) is not kind:
        raise InvalidRequest(
            f"{what} has dtype {dtype_name[:40]} in a flattened_tensor of {flat.name}; needed: the same, or uint8."
        )
    sizes = [whole_number(size, f"{what}'s shape") for size in shape]
    start, end = (whole_number(record.values[field], f"{what}'s {field}") for field in ("start_idx", "end_idx"))
    num_bytes = kind.num_bytes(count_elements(name, sizes))
    if (end - start) * flat.itemsize != num_bytes:
        raise InvalidRequest(
            f"{what} of shape {sizes} and dtype {kind.label} needs {num_bytes} bytes; "
            f"start_idx {start} and end_idx {end} give {(end - start) * flat.itemsize}."
        )
    return view_tensor(name, kind, sizes, data, start * flat.itemsize)
