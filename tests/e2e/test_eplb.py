"""Two servers of two ranks each that change their expert maps together, through FastDeploy's routes: all or none."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.cli import main
from headrace.kernels import has_native
from headrace.server.protocol.expert_replies import ExpertRun, Experts
from headrace.testing.server import RunningServer
from headrace.testing.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="several ranks need the native kernels")
LOGIN = {"user": "scheduler", "passwd": "word"}
WAIT_S = 20.0
SILENCE_S = 2.0
SIZES = {"num_layers": 2, "num_experts": 8, "num_experts_per_token": 2, "expert_size": 64}
Servers = list[RunningServer]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The first has two front ends: what one of them was told, the other knows."""
    path = write_tiny_model(
        tmp_path_factory.mktemp("moe") / "model", architecture="qwen3_moe", router_skew=3.0, **SIZES
    )
    options = [
        str(path), "--kv-cache-memory", "4MiB", "--threads", "2", "--tensor-parallel-size", "2",
        "--enable-expert-parallel", "--redundant-experts", "2", "--expert-move-bytes", "32KiB",
        "--eplb-user", LOGIN["user"], "--eplb-password", LOGIN["passwd"],
        "--eplb-timeout", str(SILENCE_S), "--eplb-call-timeout", "1.5",
    ]  # fmt: skip
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(RunningServer, [*options, *more]) for more in (["--api-servers", "2"], [])]
        yield [stack.enter_context(server.result()) for server in starting]


@pytest.fixture(autouse=True)
def same_start(servers: Servers) -> None:
    for server in servers:
        reply = httpx.post(server.url + "/v1/control/rebalance_experts", json={"action": "reset"}, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        post(server, "/get_per_expert_tokens_stats", clear_stat=True)


def post(server: RunningServer, path: str, **fields: Any) -> Json:
    response = httpx.post(server.url + path, json={**LOGIN, **fields}, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    reply: Json = response.json()
    assert (reply["code"], reply["msg"]) == (0, "ok")
    return reply


def status(server: RunningServer) -> str:
    return str(post(server, "/check_redundant")["status"])


def experts(server: RunningServer) -> Json:
    found: Json = server.get("/v1/experts").json()
    return found


def generate(server: RunningServer) -> Json:
    body = {"prompt": list(range(20, 60)), "max_tokens": 16, "temperature": 0, "logprobs": 1}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    choice: Json = reply.json()["choices"][0]
    return choice


def address(server: RunningServer) -> str:
    return server.url.removeprefix("http://")


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_all_end_in_one_map(servers: Servers) -> None:
    answers = [generate(server) for server in servers]
    assert answers[0] == answers[1]
    old = [experts(server)["slots"] for server in servers]
    stats = [post(server, "/get_per_expert_tokens_stats")["data"] for server in servers]
    assert stats[0] == stats[1]
    assert [len(ranks) for ranks in stats] == [2, 2]
    loads = [experts(server)["tokens"] for server in servers]
    assert loads[0] == [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*stats[0], strict=True)]

    post(servers[0], "/rearrange_experts", ips=[address(server) for server in servers])
    wait_for(lambda: all(status(server) == "DONE" for server in servers))

    first, second = (experts(server) for server in servers)
    assert first["slots"] == second["slots"]
    assert first["slots"] != old[0]
    assert first["run"]["id"] == second["run"]["id"]
    assert {(run["outcome"], run["bytes_moved"] > 0) for run in (first["run"], second["run"])} == {("committed", True)}
    assert first["balance"]["mean"] > 0.5
    assert [generate(server) for server in servers] == answers
    workloads = post(servers[1], "/check_redundant", check_get_workloads=True)["data"]
    assert workloads["ep_rank_to_expert_id_list"] == first["slots"]
    assert post(servers[1], "/get_per_expert_tokens_stats", clear_stat=True)["data"] != stats[1]


def test_a_scheduler_that_leads_by_itself(servers: Servers) -> None:
    """As FastDeploy's does, which knows no names of runs."""
    old = experts(servers[0])["slots"]
    answers = [generate(server) for server in servers]
    loads = experts(servers[0])["tokens"]
    for server in servers:
        post(server, "/rearrange_experts", action="recv_expert_weight", data=loads)
    for server in servers:
        wait_for(lambda: post(server, "/check_redundant", action="check_load_weight_result")["data"] == [1, 1])  # noqa: B023
        assert status(server) == "LOAD_SUCC"
        assert experts(server)["slots"] == old
        busy = httpx.post(server.url + "/rearrange_experts", json={**LOGIN, "ips": [address(server)]}, timeout=WAIT_S)
        assert (busy.status_code, busy.json()["code"]) == (400, 1)
    for server in servers:
        post(server, "/rearrange_experts", action="update_weight_from_tensor")
        assert status(server) == "DONE"
    first, second = (experts(server)["slots"] for server in servers)
    assert first == second != old
    assert [generate(server) for server in servers] == answers


def test_the_native_route_and_what_it_refuses(servers: Servers) -> None:
    url = servers[0].url + "/v1/control/"

    def rebalance(**fields: Any) -> httpx.Response:
        return httpx.post(url + "rebalance_experts", json=fields, timeout=WAIT_S)

    def code(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["code"]

    answer = generate(servers[0])
    assert rebalance(action="plan").json()["result"][0]["decision"]["action"] == "apply"
    assert rebalance(action="stage", run="monday").json()["result"][0]["run"]["state"] == "staged"
    assert code(rebalance(action="commit", run="tuesday")) == (409, "stale_run")
    assert code(rebalance()) == (409, "rebalance_open")
    assert rebalance(action="commit", run="monday").json()["result"][0]["run"]["outcome"] == "committed"
    assert code(rebalance(action="commit", run="monday")) == (409, "wrong_state")
    assert code(rebalance(slots=[[0] * 10, [0] * 10])) == (400, "invalid_value")
    assert generate(servers[0]) == answer
    httpx.post(url + "begin_refresh", timeout=WAIT_S).raise_for_status()
    try:
        for action in ("apply", "begin", "stage"):
            assert code(rebalance(action=action)) == (409, "refresh_open")
    finally:
        httpx.post(url + "abort_refresh", timeout=WAIT_S).raise_for_status()


class HalfServer(BaseHTTPRequestHandler):
    """Says what it was sent to, and never gets to the end of anything but statistics."""

    stats: Json
    is_over: threading.Event

    def do_POST(self) -> None:
        if self.path != "/get_per_expert_tokens_stats":
            self.is_over.wait(WAIT_S)
            self.close_connection = True
            return
        body = json.dumps(self.stats).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def other(kind: str, stats: Json) -> Iterator[str]:
    """The address of a third server, which does not do its part."""
    if kind == "dead":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        yield f"127.0.0.1:{port}"
    elif kind == "silent":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
    else:
        handler = type("Handler", (HalfServer,), {"stats": stats, "is_over": threading.Event()})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            handler.is_over.set()
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.mark.parametrize("kind", ["dead", "silent", "silent after its statistics"])
def test_one_that_fails_leaves_the_old_map_everywhere(servers: Servers, kind: str) -> None:
    answers = [generate(server) for server in servers]
    old = [experts(server)["slots"] for server in servers]
    stats = post(servers[1], "/get_per_expert_tokens_stats")
    with other(kind, stats) as third:
        post(servers[0], "/rearrange_experts", ips=[*(address(server) for server in servers), third])
        wait_for(lambda: experts(servers[0])["run"]["outcome"] == "aborted")
        wait_for(
            lambda: all(status(server) == "FREE" or experts(server)["run"]["state"] == "free" for server in servers)
        )
    runs = [experts(server)["run"] for server in servers]
    if "statistics" in kind:
        assert status(servers[1]) == "FREE"
        assert runs[1]["id"] == runs[0]["id"], "it had begun to load"
        assert runs[1]["outcome"] in ("aborted", "failed")
    assert status(servers[0]) == "FREE"
    assert [experts(server)["slots"] for server in servers] == old
    assert [generate(server) for server in servers] == answers


def test_a_leader_that_falls_silent_is_not_waited_for(servers: Servers) -> None:
    old, loads = experts(servers[1])["slots"], experts(servers[1])["tokens"]
    post(servers[1], "/rearrange_experts", action="recv_expert_weight", data=loads, run="orphan")
    wait_for(lambda: status(servers[1]) == "LOAD_SUCC")
    wait_for(lambda: status(servers[1]) == "FREE")
    found = experts(servers[1])
    assert (found["run"]["outcome"], found["slots"]) == ("aborted", old)
    assert "nothing was heard" in found["run"]["error"]


def test_what_else_shows_experts_and_ranks(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(servers[0])
    ready = servers[0].get("/readyz").json()
    assert [rank["rank"] for rank in ready["ranks"]] == [0, 1]
    assert all(rank["pid"] > 0 and rank["heartbeat_age_s"] < 10 for rank in ready["ranks"])
    wait_for(lambda: 'expert_balance{model_name="' in servers[0].get("/metrics").text)
    reply = servers[0].get("/v1/experts").content
    assert set(json.loads(reply)) == set(Experts.__struct_fields__)
    shown = msgspec.json.decode(reply, type=Experts)
    assert set(json.loads(reply)["run"]) == set(ExpertRun.__struct_fields__)
    assert main.main(["ctl", "experts", "plan", "--url", servers[0].url]) == 0
    assert main.main(["ctl", "experts", "status", "--url", servers[0].url]) == 0
    printed = capsys.readouterr().out
    assert "decision   " in printed
    assert f"{shown.num_slots} slots of 8 experts on 2 ranks" in printed
    picture = tmp_path / "heat.html"
    assert main.main(["experts", "heatmap", "--url", servers[0].url, "-o", str(picture)]) == 0
    assert "<svg" in picture.read_text() or "<table" in picture.read_text()
