"""Numbers and logs of a whole server: a live scrape, the dashboard against it, JSON lines, a level that changes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.observability.aliases import ALIASES
from headrace.observability.engine_series import EXPERT_COUNTERS
from headrace.testing.server import RunningServer

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
USER_KEY, ADMIN_KEY, PROMPT = "sk-user-3141592653", "sk-admin-2718281828", "PROMPT-TEXT-OF-A-CLIENT"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Two front ends, keys, JSON logs, both aliases; it has served a little of everything."""
    options = ["--mock-engine", "--api-servers", "2", "--log-format", "json", "--api-key", USER_KEY]
    aliases = ["--metrics-alias", "vllm", "--metrics-alias", "fastdeploy", "--metrics-alias", "vllm"]
    with RunningServer([*options, "--admin-key", ADMIN_KEY, *aliases]) as running:
        body = {"prompt": PROMPT, "max_tokens": 3, "n": 2}
        headers = {"Authorization": f"Bearer {USER_KEY}"}
        for _ in range(8):
            assert httpx.post(f"{running.url}/v1/completions", json=body, headers=headers).status_code == 200
        yield running


def scrape(server: RunningServer) -> dict[str, float]:
    """Sums by the samples' names."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query")


def test_the_dashboard_shows_what_exists_and_all_of_it(server: RunningServer) -> None:
    asked = {
        name for text in expressions(json.loads(DASHBOARD.read_text())) for name in re.findall(r"[a-z_]+:\w+", text)
    }
    of_experts = {f"headrace:{name}_total" for name in EXPERT_COUNTERS} | {"headrace:expert_balance"}
    shown = set(scrape(server)) | of_experts  # which this model does not have
    assert asked <= shown, asked - shown
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    own = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown if name.startswith("headrace:")}
    assert own == families, own ^ families


def test_aliases_have_the_same_numbers(server: RunningServer) -> None:
    numbers = scrape(server)
    while numbers["headrace:generation_tokens_total"] < 48:  # the engine publishes a few times a second
        numbers = scrape(server)
    for name in ("num_requests_waiting", "generation_tokens_total", "request_success_total", "prompt_tokens_total"):
        assert numbers[f"vllm:{name}"] == numbers[f"headrace:{name}"]
    assert numbers["vllm:gpu_cache_usage_perc"] == numbers["fastdeploy:gpu_cache_usage_perc"]
    assert numbers["fastdeploy:max_gpu_block_num"] == numbers["headrace:num_kv_blocks"] > 0
    assert numbers["headrace:iteration_tokens_total_sum"] >= 48
    for alias, known in ALIASES.items():
        for entry in known:
            assert any(name.startswith(f"{alias}:{entry.name}") for name in numbers), entry


def wait_for(server: RunningServer, text: str) -> list[dict[str, Any]]:
    """The log lines that hold a text, once there are some. Every line but the ready lines is JSON."""
    until = time.monotonic() + 5
    while not any(text in line for line in list(server.output)):
        assert time.monotonic() < until, text
        time.sleep(0.02)
    return [json.loads(line) for line in list(server.output) if text in line]


def set_level(server: RunningServer, level: str) -> None:
    response = httpx.post(f"{server.url}/v1/control/log_level", json={"level": level}, headers=ADMIN)
    assert (response.status_code, response.json()) == (200, {"level": level})


def test_a_request_s_line(server: RunningServer) -> None:
    trace = "00-" + "5" * 32 + "-" + "6" * 16 + "-01"
    headers = {"Authorization": f"Bearer {USER_KEY}", "X-Request-Id": "line-1", "traceparent": trace}
    body = {"prompt": PROMPT, "max_tokens": 3}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    (line,) = wait_for(server, '"line-1"')
    assert line["component"] in ("front-end-0", "front-end-1")
    expected = {"level": "info", "message": "http", "request_id": "line-1", "trace_id": "5" * 32, "id": "cmpl-line-1",
                "status": 200, "prompt_tokens": len(PROMPT), "completion_tokens": 3, "finish": "length",
                "weights_version": "0"}  # fmt: skip
    assert expected.items() <= line.items()
    assert 0 < line["ttft_s"] < line["seconds"]


def test_the_level_changes_in_every_process_and_tells_no_secrets(server: RunningServer) -> None:
    httpx.get(f"{server.url}/livez", headers={"X-Request-Id": "quiet-before"})
    set_level(server, "debug")
    deadline = time.monotonic() + 5
    seen: set[str] = set()
    while len(seen) < 2:  # whichever front end was told, both know
        assert time.monotonic() < deadline, seen
        httpx.get(f"{server.url}/livez")
        seen |= {json.loads(line)["component"] for line in list(server.output) if '"/livez"' in line}
    assert not any("quiet-before" in line for line in server.output)
    headers = {"Authorization": f"Bearer {USER_KEY}"}
    for body in ({"prompt": PROMPT, "max_tokens": 2}, {"prompt": PROMPT, "temperature": PROMPT}, {"prompt": [PROMPT]}):
        httpx.post(f"{server.url}/v1/completions?key={USER_KEY}", json=body, headers=headers)
    wait_for(server, '"invalid_value"')

    set_level(server, "error")
    time.sleep(1.5)  # an idle engine looks once a second
    before = len(server.output)
    assert httpx.post(f"{server.url}/v1/control/pause", headers=ADMIN).status_code == 200
    assert httpx.post(f"{server.url}/v1/control/resume", headers=ADMIN).status_code == 200
    set_level(server, "info")
    time.sleep(1.5)
    assert httpx.post(f"{server.url}/v1/control/pause", headers=ADMIN).status_code == 200
    (*_, line) = wait_for(server, "control: pause")
    assert line["component"] == "engine"
    assert sum("control: pause" in text and "after" in text for text in server.output[before:]) == 1
    assert httpx.post(f"{server.url}/v1/control/resume", headers=ADMIN).status_code == 200

    everything = "".join(server.output)
    for secret in (USER_KEY, ADMIN_KEY, PROMPT):
        assert secret not in everything


def test_a_level_that_is_none(server: RunningServer) -> None:
    for body in ({}, {"level": "loud"}, {"level": 3}):
        response = httpx.post(f"{server.url}/v1/control/log_level", json=body, headers=ADMIN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "level")
    assert httpx.post(f"{server.url}/v1/control/log_level", json={"level": "info"}).status_code in (401, 403)


def one(server: RunningServer, name: str, **labels: str) -> bool:
    """Whether the sample with these labels is 1."""
    return any(
        sample.value == 1
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
        if sample.name == f"headrace:{name}" and labels.items() <= sample.labels.items()
    )


def test_weights_and_refreshes(tiny_model: Path) -> None:
    with RunningServer([str(tiny_model), "--backend", "reference", "--num-kv-blocks", "64"]) as running:
        body = {"source": {"kind": "path", "path": str(tiny_model)}, "version": "step-9"}
        done = httpx.post(f"{running.url}/v1/control/refresh_weights", json=body, timeout=30)
        assert done.status_code == 200, done.text
        until = time.monotonic() + 5
        while not one(running, "weight_refresh_seconds_count", source="path"):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert one(running, "weights_version_info", version="step-9")
        assert one(running, "weights_state", state="ready")
        assert httpx.post(f"{running.url}/v1/control/sleep", json={}, timeout=30).status_code == 200
        assert one(running, "weights_state", state="asleep")
        assert not one(running, "weights_state", state="ready")
