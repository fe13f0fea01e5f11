"""The OpenAPI text is true: bodies drawn from it, and bodies that break it, get the replies that it describes, never a
5xx; and the engine serves on afterwards. schemathesis draws the bodies and checks the replies against the schema.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.config.options import AdmissionConfig, ServeConfig
from headrace.testing.echo_app import echo_app

MESSAGES = [{"role": "user", "content": "Hi"}]
SMALL: dict[str, dict[str, Any]] = {  # what a case of these routes is added to, so that it comes as far as the engine
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3}},
    "/inference/v1/generate": {"token_ids": [72], "sampling_params": {"max_tokens": 3}},
}
CONTROL = "/v1/control/"
LEFT_OUT = {CONTROL + "join_group"}  # it starts a process that waits for the others of the group
KEEPS_WEIGHTS: dict[str, dict[str, Any]] = {  # what the mock engine could not get again; a state by design
    CONTROL + "sleep": {"tags": ["kv_cache"]},
    CONTROL + "begin_refresh": {"staged": "always"},
    CONTROL + "refresh_weights": {"staged": "always"},
}
UNDO = ("undrain", "resume", "abort_refresh", "wake")
PROBE = {"prompt": "probe", "max_tokens": 7, "logprobs": 1, "seed": 3, "temperature": 0}
NEW_EACH_TIME = ("id", "created", "usage", "weight_version")
NUM_FIELDS = 3
DRAWN = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)

CHECKS = (status_code_conformance, content_type_conformance)
load_all_checks()


class Server:
    """The application on a loop that goes on between the examples."""

    def __init__(self, runner: asyncio.Runner, stack: AsyncExitStack) -> None:
        self._runner = runner
        config = ServeConfig(admission=AdmissionConfig(max_logprobs=-1, trust_request_chat_template=True))
        self.http = runner.run(stack.enter_async_context(echo_app(config)))
        self.schema = schemathesis.openapi.from_dict(self.send("GET", "/openapi.json").json())
        self.statuses: Counter[int] = Counter()

    def send(self, method: str, url: str, **options: Any) -> httpx.Response:
        return self._runner.run(self.http.request(method, url, **options))

    def operations(self) -> list[APIOperation]:
        return [found.ok() for found in self.schema.get_all_operations() if found.ok().path not in LEFT_OUT]

    def probe(self) -> Any:
        reply = self.send("POST", "/v1/completions", json=PROBE)
        assert reply.status_code == 200, reply.text
        return {name: value for name, value in reply.json().items() if name not in NEW_EACH_TIME}

    def settle(self) -> None:
        """An operation that was not waited for may still run."""
        while (operation := self.send("GET", CONTROL + "status").json()["operation"]) is not None:
            if operation["kind"] == "drain":
                return
            self._runner.run(asyncio.sleep(0.001))

    def check(self, case: Case, body: Any) -> None:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": case.media_type} if body is not None and case.media_type else {}
        response = self.send(case.method, case.formatted_path, params=case.query, headers=headers, content=content)
        self.statuses[response.status_code] += 1
        told = (case.method, case.path, content[:1000], response.text[:500])
        is_late = response.status_code == 504 and "timeout_s" in str(told)  # a deadline may be over at once
        assert response.status_code < 500 or is_late, told
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        case.validate_response(response, checks=[*CHECKS, *([] if is_stream else [response_schema_conformance])])
        if response.status_code >= 400:
            assert "error" in response.json(), told
        elif is_stream:
            assert "server_error" not in response.text, told


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield Server(runner, stack)
        runner.run(stack.aclose())


def few_fields(path: str, body: Any, chosen: list[int]) -> Any:
    """Some of a body's fields on top of a small request: a body with forty drawn fields is always refused."""
    small = SMALL.get(path)
    if small is None or not isinstance(body, dict):
        return body
    names = sorted(body)
    return small | {names[index % len(names)]: body[names[index % len(names)]] for index in chosen if names}


def run(server: Server, operation: APIOperation, mode: GenerationMode, num_examples: int) -> None:
    @settings(DRAWN, max_examples=num_examples)
    @given(operation.as_strategy(generation_mode=mode), st.lists(st.integers(0, 60), max_size=NUM_FIELDS))
    def check(case: Case, chosen: list[int]) -> None:
        body = None if isinstance(case.body, NotSet) else few_fields(operation.path, case.body, chosen)
        if isinstance(body, dict):
            body = body | KEEPS_WEIGHTS.get(operation.path, {})
        server.check(case, body)
        if operation.path.startswith(CONTROL):
            server.settle()
            for name in UNDO:
                assert server.send("POST", CONTROL + name).status_code == 200

    check()


def examples(operation: APIOperation) -> int:
    if operation.path in SMALL:
        return 24
    return 4 if operation.body else 2


def test_bodies_of_the_schema(server: Server) -> None:
    before = server.probe()
    for operation in server.operations():
        run(server, operation, GenerationMode.POSITIVE, examples(operation))
    assert server.statuses[200] > 100, "enough of it must come as far as the engine"
    assert server.probe() == before


def test_bodies_that_break_the_schema(server: Server) -> None:
    before = server.probe()
    for operation in server.operations():
        if operation.body:
            run(server, operation, GenerationMode.NEGATIVE, examples(operation) // 2)
    assert server.probe() == before
