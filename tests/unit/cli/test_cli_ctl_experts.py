"""`headrace ctl experts`: what is sent for each word, what is printed, files of maps and loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.cli import control_client, main
from headrace.testing.fake_control import EXPERTS, RUN, operation_object

BALANCE = {"mean": 0.9, "worst": 0.8, "per_layer": [1.0, 0.8]}
DECISION = {
    "action": "apply", "reason": "requested", "value": 4.0, "limit": 1.0, "balance_now": BALANCE,
    "balance_predicted": {**BALANCE, "mean": 0.95}, "moved_per_layer": [3, 1],
}  # fmt: skip
DONE = {**RUN, "outcome": "committed", "ended": 101.0, "bytes_moved": 2048, "layers_changed": 2, "stall_s": 0.0125}


class Served:
    """The routes that the command calls, without a server."""

    def __init__(self) -> None:
        self.experts: dict[str, Any] = dict(EXPERTS)
        self.result: dict[str, Any] = {"run": DONE, "balance": {"mean": 0.9, "worst": 0.8}, "mode": "manual"}
        self.error: dict[str, Any] | None = None
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.raw_path.decode())
        if request.url.path == "/v1/experts":
            return httpx.Response(200, json=self.experts)
        assert request.url.path == "/v1/control/rebalance_experts"
        self.bodies.append(json.loads(request.content))
        if self.error is not None:
            return httpx.Response(
                200, json={**operation_object("rebalance_experts", state="failed"), "error": self.error}
            )
        return httpx.Response(200, json=operation_object("rebalance_experts", **self.result))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()
    client = httpx.Client

    def make(**options: Any) -> httpx.Client:
        return client(transport=httpx.MockTransport(served), **options)

    monkeypatch.setattr(control_client.httpx, "Client", make)
    return served


def run(*words: str) -> int:
    return main.main(["ctl", "experts", *words])


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["rebalance"], {"action": "apply"}),
        (["rebalance", "--timeout", "5"], {"action": "apply", "timeout_s": 5.0}),
        (["stage", "--run", "r", "--silence", "9"], {"action": "stage", "run": "r", "silence_s": 9.0}),
        (["commit"], {"action": "commit"}),
        (["abort", "--run", "r"], {"action": "abort", "run": "r"}),
        (["pin"], {"action": "pin"}),
        (["unpin"], {"action": "unpin"}),
        (["reset"], {"action": "reset"}),
    ],
)
def test_what_is_sent(served: Served, capsys: pytest.CaptureFixture[str], words: list[str], body: Any) -> None:
    assert run(*words) == 0
    assert served.bodies == [{**body, "wait": False}]
    out = capsys.readouterr().out
    assert "balance    mean 0.900, worst layer 0.800\nmode       manual\n" in out
    assert ("2 KiB moved, 2 layers changed, 1.00 s, of them 0.013 s without steps" in out) == ("pin" not in words[0])


def test_stats(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats") == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 layers of 4 experts in 6 slots on 2 ranks; 4 steps",
        "layer  tokens  balance  busiest experts (share)",
        "    1       8    1.000  0 (62%), 1 (12%), 2 (12%)",
        "    2       8    0.800  0 (25%), 1 (25%), 2 (25%)",
        "balance mean 0.900, worst layer 0.800 (mean over ranks / most; 1 is even)",
    ]
    served.experts["tokens"] = [[0, 0, 0, 0], [0, 0, 0, 3]]
    assert run("stats", "--clear") == 0
    assert served.paths[-1] == "/v1/experts?clear=true"
    assert "    1       0    1.000  none\n    2       3    0.800  3 (100%)\n" in capsys.readouterr().out
    assert run("stats", "--json") == 0
    assert json.loads(capsys.readouterr().out) == served.experts


def test_status(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status") == 0
    assert "run        none yet\ndecision   none yet\n" in capsys.readouterr().out
    served.experts |= {"run": {**DONE, "error": "late"}, "last_decision": DECISION, "rebalances": 1}
    assert run("status") == 0
    out = capsys.readouterr().out
    assert "run        run-1 committed: 2 KiB moved" in out
    assert "; late\n" in out
    assert "decision   apply: requested (4, limit 1)\n" in out
    assert "in all     1 rebalance, 0 failures, 0 B moved\n" in out
    served.experts |= {"is_expert_parallel": False, "run": {**RUN, "state": "staged"}}
    assert run("status") == 0
    out = capsys.readouterr().out
    assert "none can move" in out
    assert "run-1 staged" in out


def test_plan(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.result = {"decision": DECISION, "slots": [[0]], "bytes_to_move": 49152}
    assert run("plan") == 0
    assert capsys.readouterr().out.splitlines() == [
        "decision   apply: requested (4, limit 1)",
        "to move    48 KiB",
        "         now   then  slots that change",
        "mean   0.900  0.950                  4",
        "worst  0.800  0.800",
    ]
    served.result["decision"] = {**DECISION, "balance_predicted": None}
    assert run("plan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["result"][0]["slots"] == [[0]]


def test_maps_and_loads_come_from_files(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(EXPERTS))
    assert run("rebalance", "--tokens", str(file), "--slots", str(file)) == 0
    assert served.bodies[-1]["tokens"] == EXPERTS["tokens"]
    assert served.bodies[-1]["slots"] == EXPERTS["slots"]
    file.write_text("[[1, 2]]")
    assert run("pin", "--slots", str(file)) == 0
    assert served.bodies[-1]["slots"] == [[1, 2]]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda file: None, "cannot read --tokens"),
        (lambda file: file.write_text("{"), "no JSON"),
        (lambda file: file.write_text('{"slots": []}'), "an object with tokens"),
    ],
)
def test_files_that_are_wrong(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], Any], words: str
) -> None:
    file = tmp_path / "tokens.json"
    write(file)
    assert run("plan", "--tokens", str(file)) == 1
    assert words in capsys.readouterr().err
    assert not served.bodies


def test_a_failure_is_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.error = {"message": "There is no run x.", "code": "stale_run"}
    assert run("commit", "--run", "x") == 1
    assert "rebalance_experts failed: There is no run x." in capsys.readouterr().err
    assert run("commit", "--run", "x", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "stale_run"
