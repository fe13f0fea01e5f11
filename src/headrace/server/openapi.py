"""The OpenAPI text behind /docs. Bodies are read by `body.py` and not by FastAPI, so their schemas are added here.

Routes pass `**describe(body, reply)` to their decorator; `install_openapi` puts the named schemas beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import PlainTextResponse

from headrace.server.docs_page import install_docs_page
from headrace.server.protocol import expert_replies, probe_replies, replies
from headrace.server.protocol.chat import ChatCompletionRequest
from headrace.server.protocol.common import RequestModel
from headrace.server.protocol.completions import CompletionRequest
from headrace.server.protocol.control import OPERATIONS, EmptyRequest
from headrace.server.protocol.embeddings import EmbeddingRequest
from headrace.server.protocol.generate import GenerateRequest, GenerateSampling
from headrace.server.protocol.messages import CountTokensRequest, MessagesRequest
from headrace.server.protocol.responses import ResponsesRequest
from headrace.server.protocol.sources import SOURCES
from headrace.server.protocol.token_generate import TokenGenerateRequest, TokenSampling
from headrace.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: tuple[type[RequestModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerateSampling,
    TokenGenerateRequest,
    TokenSampling,
    EmptyRequest,
    *OPERATIONS,
    *SOURCES.values(),
)
REPLIES: tuple[type[msgspec.Struct], ...] = (
    replies.ErrorReply,
    replies.ChatCompletion,
    replies.Completion,
    replies.ResponseObject,
    replies.DeletedResponse,
    replies.InputItems,
    replies.Message,
    replies.TokenCount,
    replies.EmbeddingList,
    replies.ModelList,
    replies.ModelCard,
    replies.TokenizeReply,
    replies.DetokenizeReply,
    replies.GenerateOutput,
    replies.TokenGeneration,
    probe_replies.Readiness,
    probe_replies.VersionReply,
    replies.Load,
    replies.Operation,
    replies.AbortOperation,
    replies.LogLevel,
    replies.OperationList,
    replies.ControlStatus,
    expert_replies.Experts,
)
REF = "#/components/schemas/"


def describe(
    body: type[RequestModel] | None,
    reply: type[msgspec.Struct] | None,
    *,
    streams: bool = False,
    may_run_on: bool = False,
    other_bodies: Mapping[str, str] | None = None,
    text: str | None = None,
    or_list: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a route's decorator. `other_bodies`: what bytes of another media type than JSON hold;
    `text`: what a reply of plain text holds; `or_list`: several replies come as a list."""
    content: dict[str, Any] = {} if reply is None else {"application/json": _ref(reply.__name__)}
    if reply is not None and or_list:
        one = _ref(reply.__name__)["schema"]
        content["application/json"] = {"schema": {"anyOf": [one, {"type": "array", "items": one}]}}
    if text is not None:
        content["text/plain"] = {"schema": {"type": "string", "description": text}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "With stream: true."}}
    responses: dict[int | str, Any] = {
        200: {"description": "Done.", **({"content": content} if content else {})},
        "default": {"description": "An error.", "content": {"application/json": _ref("ErrorReply")}},
    }
    if may_run_on:
        responses[202] = {"description": "With wait: false; it still runs.", "content": content}
    arguments: dict[str, Any] = {"responses": responses, "response_model": None}
    if text is not None:
        arguments["response_class"] = PlainTextResponse
    if body is not None:
        bodies: dict[str, Any] = {"application/json": _ref(body.__name__)}
        for media_type, text in (other_bodies or {}).items():
            bodies[media_type] = {"schema": {"type": "string", "format": "binary", "description": text}}
        arguments["openapi_extra"] = {"requestBody": {"required": True, "content": bodies}}
    return arguments


def _ref(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": REF + name}}


def install_openapi(app: FastAPI) -> None:
    """Replaces `app.openapi`; the text is made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _make(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    install_docs_page(app)


def _make(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF + "{model}")
    _, structs = msgspec.json.schema_components(REPLIES, ref_template=REF + "{name}")
    schema.setdefault("components", {})["schemas"] = {**bodies["$defs"], **structs}
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; ours is the default error
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    return schema
