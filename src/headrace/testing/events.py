"""Reads streams whose events have names, and adds up those of /v1/messages and /v1/responses, as their clients do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

Event = dict[str, Any]


def named_events(response: httpx.Response) -> list[Event]:
    """The data of a stream; checks its framing and that each event's name is its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_message(events: Sequence[Event]) -> dict[str, Any]:
    """The message that the events of /v1/messages make."""
    message: dict[str, Any] = events[0]["message"]
    open_block: int | None = None
    arguments = ""
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None, "blocks follow each other"
            assert event["index"] == len(message["content"])
            open_block, arguments = event["index"], ""
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                assert delta[field], "no empty deltas"
                block[field] += delta[field]
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            if arguments:
                message["content"][-1]["input"] = json.loads(arguments)
            open_block = None
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message |= {name: value for name, value in event.items() if name.startswith("weight_version")}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def added_output(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The output items that the deltas of /v1/responses make; each must be what its `done` event says."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"]
        assert event["output_index"] == len(output) - (kind != "response.output_item.added")
        if kind == "response.output_item.added":
            output.append(event["item"])
            continue
        item = output[-1]
        if kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind.endswith("_text.delta"):
            assert event["delta"], "no empty deltas"
            item["content"][0]["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "response.output_item.done":
            item["status"] = event["item"]["status"]
            if item["type"] == "message":
                item["content"][0]["logprobs"] = event["item"]["content"][0]["logprobs"]
            assert item == event["item"]
    return output
