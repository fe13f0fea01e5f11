"""What /openapi.json says of ranges is what the validator holds to."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.server.protocol.common import RANGES
from headrace.testing.front_end import FrontEnd

STEP = {"integer": 1, "number": 1e-3}
ROUTES = {
    "ChatCompletionRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "CompletionRequest": ("/v1/completions", {"prompt": "Hi"}),
    "ResponsesRequest": ("/v1/responses", {"input": "Hi"}),
}


def kind_of(shown: dict[str, Any]) -> str:
    return next(branch["type"] for branch in shown["anyOf"] if branch["type"] != "null")


@pytest.mark.parametrize("schema_name", ROUTES)
async def test_ranges_are_the_validators(front_end: FrontEnd, schema_name: str) -> None:
    path, base = ROUTES[schema_name]
    schema = (await front_end.http.get("/openapi.json")).json()["components"]["schemas"][schema_name]
    found = [name for name in schema["properties"] if name in RANGES]
    assert len(found) > 3
    for name in found:
        shown = schema["properties"][name]
        step = STEP[kind_of(shown)]
        inside, outside = [], []
        if "minimum" in shown:
            inside, outside = [shown["minimum"]], [shown["minimum"] - step]
        if "exclusiveMinimum" in shown:
            inside, outside = [shown["exclusiveMinimum"] + step], [shown["exclusiveMinimum"]]
        if "maximum" in shown:
            inside.append(shown["maximum"])
            outside.append(shown["maximum"] + step)
        more = {"logprobs": True, "include": ["message.output_text.logprobs"]} if name == "top_logprobs" else {}
        if schema_name != "ResponsesRequest":
            more.pop("include", None)
        for value in outside:
            response = await front_end.post(path, {**base, **more, name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name), (name, value)
        for value in inside:
            if name.endswith("logprobs") and value == -1:
                continue  # -1 is in the range only with --max-logprobs -1
            response = await front_end.post(path, {**base, **more, name: value})
            assert response.status_code == 200, (name, value, response.text)


async def test_numbers_of_prometheus_are_text(front_end: FrontEnd) -> None:
    paths = (await front_end.http.get("/openapi.json")).json()["paths"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert (await front_end.http.get("/metrics")).headers["content-type"].startswith("text/plain")
