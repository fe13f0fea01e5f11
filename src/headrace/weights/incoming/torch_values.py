"""What torch's pickles may build here: storages and tensors as inert records, and the allow-list of their globals.

Called by `torch_file.py`. A global is looked up by its exact module and name and becomes one of our own values; torch
is never imported. `to_checkpoint_tensor` is where a torch tensor's strides are checked and, if need be, unravelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.errors import InvalidRequest
from headrace.weights.incoming.base import MAX_DIMENSION, count_elements, view_tensor
from headrace.weights.incoming.pickle_machine import Budget, Builder, RecordClass, type_name
from headrace.weights.incoming.raw import parse_dtype
from headrace.weights.safetensors import MAX_DIMENSIONS
from headrace.weights.tensor import CheckpointTensor


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A torch dtype by name; `itemsize` is bytes per number."""

    name: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A typed storage's class, which stands for its dtype (an untyped one counts bytes)."""

    dtype: TorchDtype


@dataclass(slots=True)
class TorchStorage:
    """The numbers under one or more tensors. `data` may come after the tensors, and is then exactly `num_bytes`."""

    dtype: TorchDtype
    num_bytes: int
    data: memoryview | None = None


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A view of a storage; `offset` and `stride` count numbers and are not yet checked against the storage."""

    storage: TorchStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


BUCKET_METADATA = RecordClass(
    "FlattenedTensorMetadata", frozenset({"name", "shape", "dtype", "start_idx", "end_idx", "numel"})
)
LOCAL_TENSOR = RecordClass("LocalSerializedTensor", frozenset({"values"}))

_ITEMSIZES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
_DTYPES = {name: TorchDtype(name, itemsize) for name, itemsize in _ITEMSIZES.items()}
_STORAGES = {
    ("torch", "BFloat16Storage"): "bfloat16",
    ("torch", "HalfStorage"): "float16",
    ("torch", "FloatStorage"): "float32",
    ("torch", "DoubleStorage"): "float64",
    ("torch", "ByteStorage"): "uint8",
    ("torch", "CharStorage"): "int8",
    ("torch", "ShortStorage"): "int16",
    ("torch", "IntStorage"): "int32",
    ("torch", "LongStorage"): "int64",
    ("torch", "BoolStorage"): "bool",
    ("torch", "UntypedStorage"): "uint8",
    ("torch.storage", "UntypedStorage"): "uint8",
}


def _sizes(value: object, what: str) -> tuple[int, ...]:
    """A tuple of sane, non-negative integers out of a pickle."""
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{what} is no tuple of at most {MAX_DIMENSIONS} integers.")
    return tuple(whole_number(number, what) for number in value)


def whole_number(value: object, what: str) -> int:
    """A non-negative integer out of a pickle; a bool is none."""
    if type(value) is not int or not 0 <= value <= MAX_DIMENSION:
        raise InvalidRequest(f"{what} holds {type_name(value)} where an integer of 0 to {MAX_DIMENSION} is needed.")
    return value


def _build_tensor(arguments: tuple[object, ...]) -> TorchTensor:
    # storage, offset, size, stride, requires_grad, hooks and, from newer torch, metadata
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], TorchStorage):
        raise InvalidRequest("a torch tensor in the pickle is not built from a storage and its layout.")
    storage, offset, size, stride = arguments[:4]
    shape, strides = _sizes(size, "a tensor's size"), _sizes(stride, "a tensor's stride")
    if len(shape) != len(strides):
        raise InvalidRequest(f"a tensor of {len(shape)} dimensions has {len(strides)} strides.")
    assert isinstance(storage, TorchStorage)
    return TorchTensor(storage, whole_number(offset, "a tensor's offset"), shape, strides)


def _build_parameter(arguments: tuple[object, ...]) -> TorchTensor:
    if not arguments or not isinstance(arguments[0], TorchTensor):
        raise InvalidRequest("a torch parameter in the pickle is not built from a tensor.")
    return arguments[0]


def _build_size(arguments: tuple[object, ...]) -> tuple[int, ...]:
    if len(arguments) != 1:
        raise InvalidRequest("a torch.Size in the pickle is not built from one tuple.")
    return _sizes(arguments[0], "a torch.Size")


def _build_dict(arguments: tuple[object, ...]) -> dict[str, object]:
    if arguments:
        raise InvalidRequest("an OrderedDict in the pickle is not built empty.")
    return {}


_GLOBALS: Mapping[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): Builder("torch._utils._rebuild_tensor_v2", _build_tensor),
    ("torch._utils", "_rebuild_parameter"): Builder("torch._utils._rebuild_parameter", _build_parameter),
    ("torch", "Size"): Builder("torch.Size", _build_size),
    ("collections", "OrderedDict"): Builder("collections.OrderedDict", _build_dict),
    # SGLang has moved LocalSerializedTensor twice, and trainers carry the bucket's metadata along.
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): BUCKET_METADATA,
    ("slime.backends.megatron_utils.weight_sync_utils", "FlattenedTensorMetadata"): BUCKET_METADATA,
    ("lmdeploy.utils", "FlattenedTensorMetadata"): BUCKET_METADATA,
    ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"): LOCAL_TENSOR,
    ("sglang.srt.model_executor.weight_updater", "LocalSerializedTensor"): LOCAL_TENSOR,
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"): LOCAL_TENSOR,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{key: StorageClass(_DTYPES[name]) for key, name in _STORAGES.items()},
}
# Modules whose functions open another process's memory: CUDA IPC handles, file descriptors, named segments.
_HANDLE_MODULES = (
    "torch.multiprocessing.reductions",
    "sglang.srt.utils.patch_torch",
    "sglang.srt.patch_torch",
    "slime.backends.megatron_utils.weight_sync_utils",
)


def find_global(module: str, name: str) -> object:
    """Our value for a global of a pickle; InvalidRequest says what to send instead of one that is not allowed."""
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    what = f"{module[:80]}.{name[:80]}"
    if module in _HANDLE_MODULES:
        raise InvalidRequest(
            f"the pickle holds a handle to memory of another process ({what}), not the numbers; send the tensors' "
            "bytes (pickle.dumps of CPU tensors, or safetensors), or a shared memory segment with a manifest."
        )
    raise InvalidRequest(f"the pickle asks for {what}; allowed: torch tensors, dtypes and sizes, and plain data.")


def storage_bytes(storage: TorchStorage, name: str) -> memoryview:
    if storage.data is None:
        raise InvalidRequest(f"tensor {name[:80]!r} has a storage whose bytes are not in the payload.")
    return storage.data


def to_checkpoint_tensor(name: str, tensor: TorchTensor, budget: Budget) -> CheckpointTensor:
    """The tensor in C order: a view of the payload, or a copy paid from `budget` where its strides are others."""
    dtype = tensor.storage.dtype
    kind = parse_dtype(name, dtype.name)
    data = np.frombuffer(storage_bytes(tensor.storage, name), np.uint8)
    num_elements = count_elements(name, tensor.shape)
    if num_elements == 0:
        return view_tensor(name, kind, tensor.shape, data, 0)
    num_available = data.size // dtype.itemsize
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    if last >= num_available:
        raise InvalidRequest(
            f"tensor {name[:80]!r} of shape {list(tensor.shape)} and stride {list(tensor.stride)} reaches number "
            f"{last} of a storage of {num_available}."
        )
    if _is_contiguous(tensor):
        return view_tensor(name, kind, tensor.shape, data, tensor.offset * dtype.itemsize)
    advice = f"tensor {name[:80]!r} has stride {list(tensor.stride)} (send tensor.contiguous())"
    budget.spend_copy(num_elements * dtype.itemsize, advice)
    numbers = np.frombuffer(data, f"u{dtype.itemsize}", num_available)[tensor.offset :]
    strides = [step * dtype.itemsize for step in tensor.stride]
    ordered = np.ascontiguousarray(np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides))
    ordered.flags.writeable = False
    return CheckpointTensor(name, tensor.shape, kind, ordered.reshape(-1).view(np.uint8))


def _is_contiguous(tensor: TorchTensor) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
