"""One generation from the body to the reply, for both routes: prepare, admit, submit, then collect or stream.

The engine is told of a client's disconnect first and at any stage; `Generation.end` always runs, closes what is open
and counts the request once. Errors before the first output become HTTP statuses, because no header has been sent by
then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from headrace.errors import QueueFull, Unavailable
from headrace.processing.inputs import ChatInput, PreparedRequest, Prompt, RequestOptions
from headrace.processing.outputs import OutputAssembler, TextDelta
from headrace.processing.parsing import ReplyParsing
from headrace.server.context import ServerContext, context_of, request_state
from headrace.server.deadlines import limited
from headrace.server.disconnect import ClientGone, DisconnectWatch
from headrace.server.errors import CLIENT_CLOSED, json_response
from headrace.server.keys import salted
from headrace.server.shape import ChoiceParts, Reply, failure
from headrace.server.sse import EventStream
from headrace.server.tracking import TrackedStream, refusals_traced
from headrace.types import GrammarSpec, SamplingParams, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request body, as a route hands it over."""

    source: ChatInput | Sequence[Prompt]
    params: SamplingParams
    options: RequestOptions
    is_stream: bool
    make_reply: Callable[[PreparedRequest, int], Reply]  # (what was prepared, unix time)
    make_parsing: Callable[[PreparedRequest], ReplyParsing | None] = lambda _: None
    max_thinking: tuple[int, str] | None = None  # tokens, and the field that says so


class Generation:
    """A submitted request on its way."""

    def __init__(
        self,
        context: ServerContext,
        prepared: PreparedRequest,
        watch: DisconnectWatch,
        state: dict[str, Any],
        parsing: ReplyParsing | None,
    ) -> None:
        submit = prepared.submit
        self.watch = watch
        self.log_id: str = state["request_id"]
        self._state = state
        stream = context.client.submit(submit)
        self._stream = TrackedStream(stream, submit, context.metrics, state["received"], context.trace)
        watch.on_gone = self.abandon
        self._assembler = OutputAssembler(context.tokenizer, submit, self._stream, parsing)
        self.send_body: Send = state["send_body"]

    @property
    def usage(self) -> Usage:
        return self._assembler.usage

    async def next(self) -> list[TextDelta] | None:
        """The next deltas; None at the end."""
        deltas, feed = self._stream, self._assembler.feed
        try:
            while True:
                if texts := feed(await deltas.__anext__()):
                    return texts
        except StopAsyncIteration:
            return self._assembler.end() or None

    async def first(self) -> list[TextDelta]:
        """The first deltas. Raises the error of a request that failed before it had any."""
        deltas = await self.next() or []
        for delta in deltas:
            if error := failure(delta):
                raise error
        return deltas

    async def collect(self) -> list[ChoiceParts]:
        """All choices to their ends. Raises the first error: a reply is whole or none."""
        num_choices = self._stream.num_choices
        choices = [ChoiceParts() for _ in range(num_choices)]
        while (deltas := await self.next()) is not None:
            for delta in deltas:
                if error := failure(delta):
                    raise error
                choices[delta.choice].add(delta)
        return choices

    def note_error(self, code: str) -> None:
        """For log and trace: the reply fails for a reason that no choice has."""
        self._state["log"]["error"] = code

    def abandon(self) -> None:
        """The client has gone."""
        self._stream.close("disconnect")

    def end(self) -> None:
        """Idempotent. Whatever still runs is aborted: an error or a cancelled handler left it behind."""
        self.watch.stop()
        self._stream.close("error")
        self._state["log"].update(self._stream.log_fields())


async def answer(request: Request, job: Job) -> Response:
    """Runs a job to its reply; raises RequestError."""
    context, state = context_of(request), request_state(request)
    watch = DisconnectWatch(request.receive)
    generation: Generation | None = None
    is_handed_over = False
    try:
        with refusals_traced(context.trace, state["received"]):
            prepared = await watch.run(_prepare(context, job, limited(request, salted(request, job.options))))
            generation = _submit(context, prepared, watch, state, job.make_parsing(prepared))
        reply = job.make_reply(prepared, int(time.time()))
        if job.is_stream:
            response: Response = EventStream(generation, await watch.run(generation.first()), reply)
            is_handed_over = True
            return response
        choices = await watch.run(generation.collect())
        return json_response(reply.body(choices, generation.usage))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    finally:
        if not is_handed_over:
            if generation is not None:
                generation.end()
            watch.stop()


async def _prepare(context: ServerContext, job: Job, options: RequestOptions) -> PreparedRequest:
    client = context.client

    def answer_form(prepared: PreparedRequest, spec: GrammarSpec) -> GrammarSpec:
        parsing = job.make_parsing(prepared)
        return spec if parsing is None else parsing.answer_form(spec)

    try:
        context.refuse_when_draining()
        prepared = await context.inputs.prepare(
            job.source, job.params, client.info, client.next_request_id(), options, answer_form=answer_form
        )
    except (QueueFull, Unavailable) as error:
        context.metrics.count_rejection(error.code)
        raise
    return prepared if job.max_thinking is None else _with_budget(context, job, prepared, *job.max_thinking)


def _with_budget(
    context: ServerContext, job: Job, prepared: PreparedRequest, max_tokens: int, field: str
) -> PreparedRequest:
    """Where the thoughts begin is known once the prompt is rendered."""
    budget = context.parsing.thinking_budget(job.make_parsing(prepared), max_tokens, field)
    submit = prepared.submit
    return PreparedRequest(replace(submit, params=replace(submit.params, thinking=budget)), prepared.texts)


def _submit(
    context: ServerContext,
    prepared: PreparedRequest,
    watch: DisconnectWatch,
    state: dict[str, Any],
    parsing: ReplyParsing | None,
) -> Generation:
    try:
        context.refuse_when_draining()  # again: it may have begun while a long prompt was tokenised
        return Generation(context, prepared, watch, state, parsing)
    except (QueueFull, Unavailable) as error:
        context.metrics.count_rejection(error.code)
        raise
