"""`headrace doctor`: the report is whole, and its JSON and its table tell the same."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from headrace.cli.main import main


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cpu"]["usable threads"] >= 1
    assert report["headrace"]["packages"]["numpy"]
    assert report["kernels"]["backend auto"]
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    for section, values in report.items():
        assert section in table
        for key in values:
            assert key in table


def test_a_taken_port_and_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "none"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", "--port", str(port)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["network"][f"port {port}"].startswith("not free")
    assert "headrace pull smollm2" in report["default model"]["state"]
    assert report["models"]["smollm2"].startswith("not pulled")
    assert not (tmp_path / "none").exists()


@pytest.mark.real_model
def test_kv_memory_of_the_default_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["default model"]
    assert state["context"] == "8192 tokens"
    assert "blocks" in state["KV tokens"]
