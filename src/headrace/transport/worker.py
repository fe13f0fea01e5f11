"""What rank 0 of a model and its workers (`executor/`) say to each other beside the steps, over a socket pair.

Steps themselves go through the group's shared memory. One call is under way per socket, and a worker has three: for
what happens between two steps, for slow work beside them, and for what may take nothing from them. Tensors lie in an
anonymous file whose descriptor comes along. All ranks of a server are of one version, so nothing here has to be
append-only.
"""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """A worker's first message, answered when its weights are loaded."""

    rank: int
    size: int
    has_whole_experts: bool
    num_redundant: int
    slots: list[list[int]] | None
    model_path: str
    num_threads: int
    kv_cache_dtype: str
    quantization: str | None
    board_path: str | None
    log_level: str
    log_format: str


class AllocateKV(msgspec.Struct, frozen=True, tag="allocate_kv"):
    num_blocks: int
    block_size: int


class FreeKV(msgspec.Struct, frozen=True, tag="free_kv"):
    """Until the next `AllocateKV`."""


class OpenStage(msgspec.Struct, frozen=True, tag="open_stage"):
    """A place for new weights, under a number of rank 0's, until it is swapped in or closed. Weights may be compared
    while a refresh is open, so there may be two."""

    stage: int
    is_delta: bool


class AddPath(msgspec.Struct, frozen=True, tag="add_path"):
    """What rank 0 has found sound. The fingerprint (weights/checkpoint.py) tells whether the files are the same."""

    stage: int
    path: str
    fingerprint: str


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: tuple[int, ...]
    kind: str
    start: int  # byte of the file that came along
    num_bytes: int


class AddTensors(msgspec.Struct, frozen=True, tag="add_tensors"):
    """Likewise; the bytes lie in the file whose descriptor came along."""

    stage: int
    tensors: list[TensorPlace]


class FinishStage(msgspec.Struct, frozen=True, tag="finish_stage"):
    stage: int


class SwapStage(msgspec.Struct, frozen=True, tag="swap_stage"):
    stage: int


class CloseStage(msgspec.Struct, frozen=True, tag="close_stage"):
    """Gives back what it holds. Nothing happens if it is not open."""

    stage: int


class DropWeights(msgspec.Struct, frozen=True, tag="drop_weights"):
    """Gives their memory back."""


class ReadWeight(msgspec.Struct, frozen=True, tag="read_weight"):
    """By our name (models/names/base.py). Answered by the worker's rows as `Numbers`, by `Done` where it has none."""

    name: str


class DifferingFrom(msgspec.Struct, frozen=True, tag="differing_from"):
    stage: int


class ExpertPiece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, start + num_bytes) of an expert, which lie at `place` in the group's memory for moves."""

    layer: int
    expert: int
    start: int
    num_bytes: int
    place: int


class PartShape(msgspec.Struct, frozen=True, array_like=True):
    """One packed matrix."""

    kind: str
    rows: int
    cols: int
    num_bytes: int


class DescribeExperts(msgspec.Struct, frozen=True, tag="describe_experts"):
    """Answered by the shapes of the parts of each, as `Shapes`."""

    experts: list[tuple[int, int]]  # layer, expert


class GiveExperts(msgspec.Struct, frozen=True, tag="give_experts"):
    """Copy pieces of experts that are held into the memory for moves."""

    pieces: list[ExpertPiece]


class TakeExperts(msgspec.Struct, frozen=True, tag="take_experts"):
    """Copy pieces that others have given out of it, beside the weights in use."""

    pieces: list[ExpertPiece]
    shapes: dict[str, list[PartShape]]  # by "layer.expert"


class PrepareExperts(msgspec.Struct, frozen=True, tag="prepare_experts"):
    """All that these rows of the map need, by layer with experts, has been taken: make ready to use them at once."""

    slots: dict[int, list[int]]


class PlaceExperts(msgspec.Struct, frozen=True, tag="place_experts"):
    """The next step runs with the rows that were prepared. What is no longer held goes."""


class ReadFormats(msgspec.Struct, frozen=True, tag="read_formats"):
    """Answered by what the worker's experts are, or were, packed as, as `ExpertFormats`."""


class RemapExperts(msgspec.Struct, frozen=True, tag="remap_experts"):
    """While there are no weights: the next ones have their experts where this map says."""

    slots: list[list[int]]
    formats: dict[str, tuple[str, ...]]


class DropExperts(msgspec.Struct, frozen=True, tag="drop_experts"):
    """Forget what was taken or prepared, and not placed."""


Call = (
    Launch
    | AllocateKV
    | FreeKV
    | OpenStage
    | AddPath
    | AddTensors
    | FinishStage
    | SwapStage
    | CloseStage
    | DropWeights
    | ReadWeight
    | DifferingFrom
    | DescribeExperts
    | GiveExperts
    | TakeExperts
    | PrepareExperts
    | PlaceExperts
    | ReadFormats
    | RemapExperts
    | DropExperts
)


class Done(msgspec.Struct, frozen=True, tag="done"):
    names: list[str] = []
    num_bytes: int = 0  # of the weights it holds, after `Launch`


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """float32 rows of a tensor."""

    shape: tuple[int, ...]
    data: bytes
    kind: str = ""  # how they are stored, "" if not by the compiled kernels


class Shapes(msgspec.Struct, frozen=True, tag="shapes"):
    shapes: list[list[PartShape]]


class ExpertFormats(msgspec.Struct, frozen=True, tag="expert_formats"):
    """The kinds of packed matrices, by unit (models/units.py)."""

    formats: dict[str, tuple[str, ...]]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`error` is the name of a class of headrace.errors."""

    error: str
    message: str


Reply = Done | Numbers | Shapes | ExpertFormats | Failed

_ENCODER = msgspec.msgpack.Encoder()
_CALLS: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Call | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_call(data: bytes) -> Call:
    return _CALLS.decode(data)


def decode_reply(data: bytes) -> Reply:
    return _REPLIES.decode(data)
