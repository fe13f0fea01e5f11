"""Where a refresh gets its tensors from: the `source` object of the control routes, one model per kind.

The server opens none of these: a path, a segment and a group are names that it hands on to the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name
from headrace.server.protocol.common import RequestModel
from headrace.weights.incoming.base import MAX_DIMENSION, MAX_NAME_LENGTH, MAX_TENSORS
from headrace.weights.incoming.checksum import DIGEST_BYTES
from headrace.weights.incoming.process_group import MAX_WORLD_SIZE
from headrace.weights.safetensors import MAX_DIMENSIONS

MAX_PATH_CHARS = 4095
INT64_MAX = 2**63 - 1


def _label(value: str) -> str:
    try:
        return check_name(value, "it")
    except InvalidRequest:
        raise PydanticCustomError("label", "Input should be 1 to 128 printable ASCII characters") from None


def _path(value: str) -> str:
    if not 0 < len(value) <= MAX_PATH_CHARS or "\0" in value:
        raise PydanticCustomError("path", "Input should be a path")
    return value


def _digest(value: str) -> str:
    if len(value) != 2 * DIGEST_BYTES or not set(value) <= set("0123456789abcdefABCDEF"):
        raise PydanticCustomError("digest", "Input should be 32 hex digits")
    return value.lower()


Label = Annotated[str, AfterValidator(_label), WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 128})]
PathText = Annotated[str, AfterValidator(_path), WithJsonSchema({"type": "string", "maxLength": MAX_PATH_CHARS})]
TensorName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
TensorNames = Annotated[list[TensorName], Field(max_length=MAX_TENSORS)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=MAX_DIMENSION)]], Field(max_length=MAX_DIMENSIONS)]
Digest = Annotated[str, AfterValidator(_digest), WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{32}$"})]
Checksums = Annotated[dict[TensorName, Digest], Field(max_length=MAX_TENSORS)]


class TensorLayout(RequestModel):
    """The tensors of one buffer, an entry per tensor in each list; offsets in bytes, default one after the other."""

    names: TensorNames | None = None
    dtypes: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_TENSORS)] | None = None
    shapes: Annotated[list[Shape], Field(max_length=MAX_TENSORS)] | None = None
    offsets: Annotated[list[Annotated[int, Field(ge=0, le=INT64_MAX)]], Field(max_length=MAX_TENSORS)] | None = None

    def check(self, prefix: str) -> None:
        """What no single field shows. `prefix` is the path of this object. Raises InvalidRequest."""
        self.check_lists(prefix)

    def check_lists(self, prefix: str) -> None:
        num_names = None if self.names is None else len(self.names)
        for field in ("names", "dtypes", "shapes", "offsets"):
            values = getattr(self, field)
            if values is None and field != "offsets":
                raise InvalidRequest(f"{prefix}{field} is missing.", param=f"{prefix}{field}", code="missing_field")
            if values is not None and len(values) != num_names:
                raise InvalidRequest(
                    f"{prefix}{field} must have one entry for each of the {num_names} names, not {len(values)}.",
                    param=f"{prefix}{field}",
                )

    def arguments(self) -> dict[str, Any]:
        """The source as the engine takes it."""
        return self.model_dump(include=set(type(self).model_fields), exclude_none=True)


class PathSource(RequestModel):
    """A folder of safetensors, or a GGUF file, on the server's machine."""

    kind: Literal["path"]
    path: PathText

    def check(self, prefix: str) -> None:
        """A path is right or wrong when the engine opens it."""

    def arguments(self) -> dict[str, Any]:
        return {"kind": "path", "path": self.path}


class SharedMemorySource(TensorLayout):
    """A POSIX shared memory segment of a trainer on the same machine."""

    kind: Literal["shared_memory"]
    segment: Label


class GroupSource(TensorLayout):
    """What the trainer broadcasts in a process group that was joined before."""

    kind: Literal["group"]
    group_name: Label = "weight_update_group"
    load_format: Literal["flattened_bucket", "packed"] | None = None
    src: Annotated[int, Field(ge=-1, le=MAX_WORLD_SIZE)] | None = Field(
        None, description="Rank of the member that sends, -1 for the last one. Default 0."
    )
    packed_buffer_bytes: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = Field(
        None, description="Of the packed format, as the sender has it. Default 1 GiB."
    )


class SentTensors(TensorLayout):
    """Tensors as bytes. `raw` and `sparse` need the lists; `safetensors` and `pickle` bring their own.

    A sparse tensor is its indices, then as many values; its shape is their number.
    """

    format: Literal["raw", "safetensors", "sparse", "pickle"] = "raw"
    load_format: Literal["direct", "flattened_bucket"] | None = Field(None, description="Of a pickle.")
    index_dtype: Literal["int32", "int64"] | None = Field(None, description="Of sparse tensors. Default int32.")

    def check(self, prefix: str) -> None:
        if self.format in ("raw", "sparse"):
            self.check_lists(prefix)
        for field in (*TensorLayout.model_fields, "load_format", "index_dtype"):
            users = {"load_format": ("pickle",), "index_dtype": ("sparse",)}.get(field, ("raw", "sparse"))
            if getattr(self, field) is not None and self.format not in users:
                raise InvalidRequest(
                    f"{prefix}{field} has no meaning with format {self.format}.", param=f"{prefix}{field}"
                )


class FileSource(SentTensors):
    """The same in a file on the server's machine; it is read and left where it is."""

    kind: Literal["file"]
    file: PathText


Source = PathSource | FileSource | SharedMemorySource | GroupSource
SOURCES: dict[str, type[Source]] = {
    "path": PathSource,
    "file": FileSource,
    "shared_memory": SharedMemorySource,
    "group": GroupSource,
}
SOURCE = {"oneOf": [{"$ref": f"#/components/schemas/{model.__name__}"} for model in SOURCES.values()]}
