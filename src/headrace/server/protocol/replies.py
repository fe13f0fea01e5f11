"""The replies' types, for OpenAPI and for readers; the routes build them as plain objects of these shapes.

Extensions of OpenAI's objects (stop_reason, token_ids, prompt_logprobs, ...) come with the fields that ask for them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorObject


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """`arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: FunctionCall


class AssistantMessage(msgspec.Struct):
    """`reasoning` is `reasoning_content` again; both are there when the server has a reasoning parser."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class VersionSpan(msgspec.Struct):
    """Tokens [start, end) of a choice that crossed a refresh, and the label of the weights that made them."""

    version: str
    start: int
    end: int


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    weight_version: str | None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobsReply(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    weight_version: str | None


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


class RankLoad(msgspec.Struct):
    rank: int
    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    num_blocks: int
    kv_usage: float
    prefix_hit_rate: float
    heartbeat_age_s: float
    step: int
    weights_version: str


class Load(msgspec.Struct):
    """Sums over the engines, and each of them."""

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    num_blocks: int
    kv_usage: float
    prefix_hit_rate: float
    ranks: list[RankLoad]


class Operation(msgspec.Struct):
    """A control operation; `started`, `ended` and `deadline` are unix times, `result` has an entry per rank."""

    id: str
    kind: str
    state: str
    error: ErrorObject | None
    result: list[dict[str, Any]] | None
    started: float
    ended: float | None
    deadline: float | None
    trace_id: str | None


class AbortOperation(Operation):
    aborted: int = 0


class LogLevel(msgspec.Struct):
    level: str


class OperationList(msgspec.Struct):
    """The newest first."""

    operations: list[Operation]


class OpenRefresh(msgspec.Struct):
    staged: bool
    delta: bool
    num_tensors: int
    num_bytes: int
    started: float


class RunningOperation(msgspec.Struct):
    id: str
    kind: str
    started: float


class ControlStatus(msgspec.Struct):
    """`state` is ready, asleep, updating or poisoned, with the `reason` of the last."""

    state: str
    reason: str | None
    asleep: list[str]
    is_paused: bool
    pause_mode: str | None
    is_draining: bool
    version: str
    epoch: int
    refresh: OpenRefresh | None
    operation: RunningOperation | None
    num_running: int
    num_waiting: int


class GenerateMeta(msgspec.Struct):
    """`finish_reason` has a type (stop, length, abort). Logprobs are lists of [logprob, token id, text or null]."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[VersionSpan]
    output_token_logprobs: list[list[Any]] | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[list[Any]] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[list[Any]]] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[list[Any]] | None] | msgspec.UnsetType = msgspec.UNSET
    output_token_ids_logprobs: list[list[list[Any]]] | msgspec.UnsetType = msgspec.UNSET
    input_token_ids_logprobs: list[list[list[Any]] | None] | msgspec.UnsetType = msgspec.UNSET


class GenerateOutput(msgspec.Struct):
    """Of one choice; several come as a list."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class TokenChoice(msgspec.Struct):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]
    stop_reason: int | str | None
    weight_versions: list[VersionSpan]


class TokenGeneration(msgspec.Struct):
    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None
    kv_transfer_params: None
    usage: UsageReply


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """Anthropic's; its blocks are of type thinking, text and tool_use, in this order."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage
    weight_version: str | None
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


class Embedding(msgspec.Struct):
    object: str
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian float32


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    weight_version: str | None


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct):
    """OpenAI's; `status` is completed, incomplete, cancelled, in_progress, or failed (in a stream). Most members that
    repeat the request are not listed here."""

    id: str
    object: str
    created_at: int
    status: str
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    usage: ResponseUsage | None
    weight_version: str | None
    weight_versions: list[VersionSpan] | msgspec.UnsetType = msgspec.UNSET


class InputItems(msgspec.Struct):
    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    id: str
    object: str
    deleted: bool
