"""Where new weights come from: one reader per kind of source, one way from each into a stage.

`read_into` runs in a thread, beside the steps. The bytes are looked at where they lie (a mapped file, shared memory,
the buffers of a process group); what must outlive the call is copied by the stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from headrace.errors import CheckpointError, InvalidRequest, NotFound, PermissionDenied
from headrace.executor.base import Stage
from headrace.weights.incoming import (
    Manifest,
    parse_dtype,
    read_indices,
    read_pickled_tensors,
    read_raw,
    read_safetensors_bytes,
    read_shared_memory,
    tensor_checksum,
)
from headrace.weights.incoming.process_group import PACKED_BUFFER_BYTES, TransferGroup
from headrace.weights.tensor import CheckpointTensor, map_file

if TYPE_CHECKING:
    from headrace.engine.control.state import EngineState

FileFormat = Literal["safetensors", "raw", "pickle", "sparse"]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of source and its fields; those of other kinds stay None.

    path           path
    shared_memory  segment, manifest
    file           file, format, manifest (raw, sparse), load_format (pickle), delete: a body in a file
    group          group_name, manifest, load_format, src (the sender's rank; -1: the last), packed_buffer_bytes

    The manifest is names, dtypes, shapes and, where bytes are not one after the other, offsets. A sparse file holds
    for each tensor as many indices (of index_dtype) and then values as its shape, [n], says.
    """

    kind: Literal["path", "shared_memory", "file", "group"]
    path: str | None = None
    segment: str | None = None
    file: str | None = None
    format: FileFormat | None = None
    delete: bool = False
    group_name: str = "weight_update_group"
    load_format: str | None = None
    names: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    offsets: tuple[int, ...] | None = None
    index_dtype: str = "int32"
    src: int = 0
    packed_buffer_bytes: int = PACKED_BUFFER_BYTES

    @property
    def manifest(self) -> Manifest:
        if self.names is None or self.dtypes is None or self.shapes is None:
            raise InvalidRequest(f"source.kind {self.kind!r} needs names, dtypes and shapes.", param="source")
        return Manifest(names=self.names, dtypes=self.dtypes, shapes=self.shapes, offsets=self.offsets)


def read_into(stage: Stage, source: Source, checksums: Mapping[str, str] | None, state: EngineState) -> None:
    """Reads all tensors of a source into a stage. Raises RequestError."""
    try:
        if source.kind == "path":
            if checksums is not None:
                raise InvalidRequest(
                    "checksums are for tensors that are sent; use compare for a folder.", param="checksums"
                )
            stage.add_path(Path(_needed(source, "path")))
        elif source.kind == "file" and source.format == "sparse":
            _add_sparse(stage, source, checksums)
        else:
            tensors = _read(source, state)
            check_sums(tensors, checksums)
            stage.add(tensors)
    except CheckpointError as error:
        raise InvalidRequest(str(error), param="source") from error


def check(probe: Stage, source: Source, state: EngineState) -> None:
    """Raises for a source whose tensors could not all be taken, as far as that can be seen before they are."""
    if source.kind == "path":
        probe.check_path(Path(_needed(source, "path")))
    elif source.kind == "group":
        _group(source, state)
    elif source.format != "sparse":
        probe.check(_read(source, state))


def discard(source: Source | None) -> None:
    """Deletes the file of a body that was sent, however its operation has ended."""
    if source is not None and source.delete and source.file is not None:
        Path(source.file).unlink(missing_ok=True)


def check_sums(tensors: Mapping[str, CheckpointTensor], checksums: Mapping[str, str] | None) -> None:
    """Compares what came with what its sender says; tensors that no checksum names are taken as they are."""
    for name, expected in (checksums or {}).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InvalidRequest(f"checksums names {name[:80]!r}, which is not among the tensors.", param="checksums")
        found = tensor_checksum(tensor)
        if found != expected:
            raise InvalidRequest(f"Tensor {name[:80]!r} has checksum {found}, not {expected[:80]}.", param="checksums")


def _read(source: Source, state: EngineState) -> dict[str, CheckpointTensor]:
    if source.kind == "shared_memory":
        return read_shared_memory(_needed(source, "segment"), source.manifest)
    if source.kind == "group":
        group = _group(source, state)
        sender, buffer_bytes = source.src % group.world_size, source.packed_buffer_bytes
        return group.receive(source.manifest, source.load_format, sender, packed_buffer_bytes=buffer_bytes)
    buffer = map_file(Path(_needed(source, "file")))
    if source.format == "safetensors":
        return read_safetensors_bytes(buffer)
    if source.format == "raw":
        return read_raw(buffer, source.manifest)
    if source.format == "pickle":
        if not state.config.allow_pickled_weights:
            raise PermissionDenied(
                "Pickled tensors are refused: start the server with --allow-pickled-weights, or send safetensors."
            )
        return read_pickled_tensors(buffer, load_format=source.load_format)
    raise InvalidRequest("source.format must be safetensors, raw, pickle or sparse.", param="source.format")


def _group(source: Source, state: EngineState) -> TransferGroup:
    group = state.groups.get(source.group_name)
    if group is None:
        raise NotFound(f"There is no group {source.group_name[:80]!r}: join_group comes first.", param="group_name")
    return group


def _add_sparse(stage: Stage, source: Source, checksums: Mapping[str, str] | None) -> None:
    manifest = source.manifest
    data = np.frombuffer(map_file(Path(_needed(source, "file"))), np.uint8)
    start = 0
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=False):
        count = _count_of(name, shape)
        kind = parse_dtype(name, dtype)
        index_bytes = count * (8 if "64" in source.index_dtype else 4)
        border, end = start + index_bytes, start + index_bytes + kind.num_bytes(count)
        if end > data.size:
            raise InvalidRequest(f"Tensor {name[:80]!r} ends at byte {end}, but {data.size} have come.", param="source")
        indices = read_indices(data[start:border], source.index_dtype, name=name)
        values = CheckpointTensor(name, (count,), kind, data[border:end]).dequantize()
        expected = None if checksums is None else checksums.get(name)
        stage.add_sparse(name, indices, values, expected)
        start = end
    if start != data.size or not len(manifest.names) == len(manifest.dtypes) == len(manifest.shapes):
        raise InvalidRequest(f"{data.size} bytes have come, but the manifest names {start}.", param="source")


def _count_of(name: str, shape: Sequence[int]) -> int:
    if len(shape) != 1 or shape[0] < 0:
        raise InvalidRequest(f"Tensor {name[:80]!r}: the shape of a sparse change is [n].", param="source")
    return shape[0]


def _needed(source: Source, field: str) -> str:
    value: Any = getattr(source, field)
    if not value:
        raise InvalidRequest(f"source.kind {source.kind!r} needs {field}.", param=f"source.{field}")
    return str(value)
