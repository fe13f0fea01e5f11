"""/v1/responses: makes a response, whole or as a stream of events; gives, deletes and cancels those that are kept."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_int, refusal
from headrace.processing.inputs import PreparedRequest, RequestOptions
from headrace.server.body import keep_request_id, read_body
from headrace.server.context import context_of
from headrace.server.errors import JSON, json_response
from headrace.server.generation import Job, answer
from headrace.server.input_items import input_items
from headrace.server.keys import key_digest, require_user
from headrace.server.openapi import describe
from headrace.server.operate import end_requests
from headrace.server.protocol.replies import DeletedResponse, InputItems, ResponseObject
from headrace.server.protocol.responses import ResponsesRequest
from headrace.server.responses_reply import ResponseShape, ResponsesReply
from headrace.server.routes.options import constrained, with_grammar

router = APIRouter(prefix="/v1/responses", dependencies=[Depends(require_user)], tags=["Inference"])
MAX_ITEMS = 100  # of a page
NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "prompt": "input"}


@router.post("", **describe(ResponsesRequest, ResponseObject, streams=True))
async def create_response(request: Request) -> Response:
    """Answers a conversation; the response can be continued by its id."""
    context = context_of(request)
    body = await read_body(request, ResponsesRequest)
    model = context.model_name(body.model)
    body.check()
    owner, store = key_digest(request), context.responses
    messages = body.messages()
    if body.previous_response_id is not None:
        messages = [*store.messages(body.previous_response_id, owner), *messages]
    source, grammar = body.source(messages), body.reply_grammar(context.parsing)
    name = keep_request_id(request, None)
    response_id = f"resp_{uuid.uuid4().hex}"
    options = RequestOptions(
        prefix="resp",
        name=name,
        public_id=response_id,
        trace_parent=context.trace_parent,
        names=with_grammar(NAMES, grammar),
    )

    def make_reply(prepared: PreparedRequest, created: int) -> ResponsesReply:
        shape = ResponseShape(
            id=response_id,
            created=created,
            model=model,
            body=body,
            params=prepared.submit.params,
            messages=messages,
            owner=owner,
            store=store,
            is_kept=body.store is not False and store.max_bytes > 0,
        )
        reply = ResponsesReply(shape)
        store.begin(response_id, reply)
        return reply

    job = Job(
        source=source,
        params=constrained(body.params(context.sampling_defaults), grammar),
        options=options,
        is_stream=bool(body.stream),
        make_reply=make_reply,
        make_parsing=lambda prepared: body.parsing(context.parsing, prepared, source),
    )
    return await answer(request, job)


@router.get("/{response_id}", **describe(None, ResponseObject))
async def get_response(request: Request, response_id: str) -> Response:
    """A response that is kept, or is being made."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("stream must be false: events are not kept.", param="stream", code="unsupported_field")
    store, owner = context_of(request).responses, key_digest(request)
    if (reply := store.open(response_id, owner)) is not None:
        return json_response(reply.snapshot())
    return Response(store.get(response_id, owner), media_type=JSON)


@router.get("/{response_id}/input_items", **describe(None, InputItems))
async def list_input_items(
    request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
) -> Response:
    """The conversation that a response which is kept has answered, as items; the newest first."""
    check_int(limit, "limit", 1, MAX_ITEMS)
    if order not in ("asc", "desc"):
        raise refusal("order", order, "asc or desc")
    messages = context_of(request).responses.messages(response_id, key_digest(request))
    items = input_items(messages[:-1], response_id)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise refusal("after", after, "the id of an item")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    body = {"object": "list", "data": page, "has_more": start + limit < len(items)}
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_response(body | ends)


@router.delete("/{response_id}", **describe(None, DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a response that is kept."""
    context_of(request).responses.delete(response_id, key_digest(request))
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/{response_id}/cancel", **describe(None, ResponseObject))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is being made; whoever waits for it gets what there is."""
    context, owner = context_of(request), key_digest(request)
    reply = context.responses.open(response_id, owner)
    if reply is None:
        context.responses.get(response_id, owner)  # 404 if there is none
        raise InvalidRequest(
            f"The response {response_id} has ended: there is nothing to cancel.", param="response_id", code="has_ended"
        )
    await end_requests(context, [response_id])
    return json_response({**reply.snapshot(), "status": "cancelled"})
