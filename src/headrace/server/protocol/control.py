"""Bodies of the control routes. pydantic holds types and ranges; what a source of weights holds is in `sources.py`.

`arguments()` of each is what the engine's operation takes: the fields that were given, without those that nobody knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name
from headrace.server.protocol.common import MAX_TIMEOUT_S, RequestModel
from headrace.server.protocol.sources import SOURCE, Checksums, Label, PathText, TensorName, TensorNames

MAX_IDS = 10_000
MAX_ID_CHARS = 160  # a public id: a prefix and at most 128 characters of the caller's
MAX_VALUES = 1_000_000

Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
Mode = Literal["abort", "wait", "keep"]
Kv = Literal["recompute", "keep"]
Staged = Literal["auto", "always", "never"]
RebalanceAction = Literal["apply", "plan", "begin", "stage", "commit", "abort", "pin", "unpin", "reset"]
Tags = Annotated[list[Literal["weights", "kv_cache"]], Field(min_length=1, max_length=2)]

MODE_HELP = "What becomes of running requests: they are aborted, finished first, or kept to go on afterwards."
CHECKSUMS_HELP = "Of the tensors as they are sent: name -> 32 hex digits. A difference fails it."
VERSION_HELP = "The new weights' name in replies; default: a counter."


class EmptyRequest(RequestModel):
    """No fields; the body may be left out."""


class ControlRequest(RequestModel):
    """What every operation takes."""

    wait: bool | None = Field(None, description="false: reply 202 at once, with the running operation. Default true.")

    def arguments(self) -> dict[str, Any]:
        """Plain data for `EngineClient.control`."""
        given = self.model_dump(include=set(type(self).model_fields), exclude_none=True)
        if given.get("wait"):
            del given["wait"]
        return given


class PauseRequest(ControlRequest):
    mode: Mode | None = Field(None, description=f"{MODE_HELP} Default abort.")
    recompute: bool | None = Field(None, description="What is frozen gives its KV up and computes it again later.")
    clear_cache: bool | None = Field(None, description="Forget cached prefixes too. Default false.")
    timeout_s: Seconds | None = Field(None, description="How long mode wait may take.")


class DrainRequest(ControlRequest):
    timeout_s: Seconds | None = Field(None, description="How long running requests may take. Default 600.")


class SleepRequest(ControlRequest):
    tags: Tags | None = Field(None, description="What to give back. Default: both.")
    mode: Mode | None = Field(None, description=f"{MODE_HELP} Default abort.")
    timeout_s: Seconds | None = Field(None, description="How long mode wait may take.")


class WakeRequest(ControlRequest):
    tags: Tags | None = Field(None, description="Default: all that sleeps.")


class CommitRefreshRequest(ControlRequest):
    version: Label | None = Field(None, description=VERSION_HELP)
    mode: Mode | None = Field(None, description=f"{MODE_HELP} Default keep.")
    kv: Kv | None = Field(None, description="KV of running requests. Default recompute.")
    timeout_s: Seconds | None = Field(None, description="How long it may take.")


class RefreshWeightsRequest(CommitRefreshRequest):
    """New weights as one transaction: begin, apply and commit in one."""

    source: Annotated[dict[str, Any], WithJsonSchema(SOURCE)] = Field(description="Where the tensors are.")
    staged: Staged | None = Field(None, description="Build the new weights beside the old ones. Default auto.")
    delta: bool | None = Field(None, description="Only some of the tensors; the others stay. Default false.")
    checksums: Checksums | None = Field(None, description=CHECKSUMS_HELP)


class BeginRefreshRequest(ControlRequest):
    staged: Staged | None = Field(None, description="Build the new weights beside the old ones. Default auto.")
    delta: bool | None = Field(None, description="Only some of the tensors; the others stay. Default false.")
    mode: Mode | None = Field(None, description=f"For staged never. {MODE_HELP}")
    silence_s: Seconds | None = Field(None, description="Silence that ends the refresh. Default --refresh-timeout.")


class ApplyRefreshRequest(ControlRequest):
    """Some tensors for the open refresh."""

    source: Annotated[dict[str, Any], WithJsonSchema(SOURCE)] = Field(description="Where the tensors are.")
    checksums: Checksums | None = Field(None, description=CHECKSUMS_HELP)
    timeout_s: Seconds | None = Field(None, description="How long it may take.")


class SetVersionRequest(ControlRequest):
    version: Label = Field(description="The name of the present weights.")


class ChecksumRequest(ControlRequest):
    names: TensorNames | None = Field(None, description="Default: all tensors.")


class CompareRequest(ControlRequest):
    path: PathText = Field(description="A folder or file on the server's machine.")


class GetWeightRequest(ControlRequest):
    name: TensorName
    max_values: Annotated[int, Field(ge=1, le=MAX_VALUES)] | None = Field(
        None, description="How many of the first values, flat. Default 100."
    )


class JoinGroupRequest(ControlRequest):
    """The process group over which a trainer broadcasts; answered once all have joined."""

    host: Label = Field(description="Of the rank that the others meet at.")
    port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=0, le=65535)] = Field(description="The rank of this server's first rank.")
    world_size: Annotated[int, Field(ge=1, le=65536)]
    group_name: Label | None = Field(None, description="Default weight_update_group.")
    backend: Literal["gloo", "nccl"] | None = Field(None, description="Default gloo.")
    timeout_s: Seconds | None = Field(None, description="How long the others may take.")


class LeaveGroupRequest(ControlRequest):
    group_name: Label | None = Field(None, description="Default weight_update_group.")


class RebalanceRequest(ControlRequest):
    """What becomes of the experts. A map and loads have a row for each layer with experts."""

    action: RebalanceAction | None = Field(None, description="Default apply.")
    slots: list[list[int]] | None = Field(None, description="A map of one's own: [layers][slots], experts' ids.")
    tokens: list[list[int]] | None = Field(None, description="Loads to plan for: [layers][experts]. Default: measured.")
    run: Label | None = Field(None, description="The run that is meant; to begin or stage one, its name.")
    silence_s: Seconds | None = Field(None, description="Silence that ends a run that is begun or staged.")
    timeout_s: Seconds | None = Field(None, description="How long it may take.")


class LogLevelRequest(RequestModel):
    level: Literal["debug", "info", "warning", "error"] = Field(description="The least severe log line.")


class AbortRequest(RequestModel):
    """What to abort: `request_ids` (public ids, X-Request-Ids or internal ids), or `all: true`."""

    request_ids: list[str] | None = Field(None, description="Public ids, X-Request-Ids or internal ids, mixed.")
    request_id: str | None = Field(None, description="The same, for one.")
    all: bool | None = Field(None, description="Every request of every front end.")

    def names(self) -> list[str] | None:
        """The ids to abort; None for all."""
        names = [*(self.request_ids or ()), *([] if self.request_id is None else [self.request_id])]
        if bool(self.all) == bool(names):
            raise InvalidRequest("Exactly one of request_ids and all: true must be given.", param="request_ids")
        if len(names) > MAX_IDS:
            raise InvalidRequest(f"request_ids must hold at most {MAX_IDS} ids, not {len(names)}.", param="request_ids")
        for index, name in enumerate(names):
            check_name(name, f"request_ids[{index}]", max_chars=MAX_ID_CHARS)
        return names or None


OPERATIONS: tuple[type[RequestModel], ...] = (
    PauseRequest,
    DrainRequest,
    SleepRequest,
    WakeRequest,
    RefreshWeightsRequest,
    BeginRefreshRequest,
    ApplyRefreshRequest,
    CommitRefreshRequest,
    SetVersionRequest,
    ChecksumRequest,
    CompareRequest,
    GetWeightRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    RebalanceRequest,
    ControlRequest,
    AbortRequest,
    LogLevelRequest,
)
"""For OpenAPI."""
