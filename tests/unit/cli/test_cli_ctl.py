"""`headrace ctl` against the real routes over a fake engine: what is sent, what is printed, exit codes, uploads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from headrace.cli import ctl
from headrace.cli import main as cli
from headrace.errors import Conflict
from headrace.server import spool
from headrace.testing.fake_control import FakeControl, operation_object
from headrace.testing.front_end import FrontEnd, make_front_end


class Server:
    """The application on a real port, in a thread."""

    def __init__(self, front_end: FrontEnd) -> None:
        self.control: FakeControl = front_end.client.controlled
        self.front_end = front_end
        config = uvicorn.Config(front_end.app, port=0, ws="none", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        (listening,) = self._server.servers
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    def _serve(self) -> None:
        async def serve() -> None:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(self.front_end.close)
                await self._server.serve()

        asyncio.run(serve())

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


def _content(file: str) -> bytes:
    return Path(file).read_bytes()


class FinishingControl(FakeControl):
    """Operations that run when they were asked to, and have ended by the second question."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, dict[str, Any]] = {}  # other fields of the ended operation, by kind
        self.num_asked = 0
        self.stay_running = False
        self.files: list[bytes] = []

    async def __call__(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        name = arguments.get("id")
        if operation == "operations" and name in self.operations and not self.stay_running:
            self.num_asked += 1
            kind = self.operations[name]["kind"]
            if self.num_asked % 2 == 0:
                ended = operation_object(kind, **self.replies.get(kind, {}))
                self.operations[name] = {**ended, "id": name, **self.ends.get(kind, {})}
        if file := arguments.get("source", {}).get("file"):
            self.files.append(_content(file) if arguments["source"].get("delete") else b"")
        return await super().__call__(operation, arguments)

    @property
    def sent(self) -> list[tuple[str, dict[str, Any]]]:
        """Operations, without the questions and without what every long one has."""
        asked = [(kind, arguments) for kind, arguments in self.calls if kind not in ("operations", "status")]
        return [(kind, {name: arguments[name] for name in arguments if name != "wait"}) for kind, arguments in asked]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server(make_front_end(admission={"max_body_bytes": 100_000}))
    yield server
    server.close()


@pytest.fixture
def server(running: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path_factory.mktemp("spool"))
    monkeypatch.setattr("headrace.cli.control_client.FIRST_POLL_S", 0.001)
    running.control = running.front_end.client.controlled = FinishingControl()
    return running


@pytest.fixture
def control(server: Server) -> FinishingControl:
    assert isinstance(server.control, FinishingControl)
    return server.control


def ctl_main(server: Server, action: str, *words: str) -> int:
    return cli.main(["ctl", action, "--url", server.url, *words])


@pytest.mark.parametrize(
    ("words", "kind", "arguments"),
    [
        (["pause"], "pause", {}),
        (["pause", "--mode", "wait", "--timeout", "5", "--clear-cache"], "pause",
         {"mode": "wait", "timeout_s": 5.0, "clear_cache": True}),
        (["resume"], "resume", {}),
        (["drain", "--timeout", "5"], "drain", {"timeout_s": 5.0}),
        (["undrain"], "undrain", {}),
        (["sleep", "--tags", "weights", "kv_cache"], "sleep", {"tags": ["weights", "kv_cache"]}),
        (["wake", "--tags", "weights"], "wake", {"tags": ["weights"]}),
        (["checksum", "a", "b"], "checksum", {"names": ["a", "b"]}),
        (["refresh", "/models/x"], "refresh_weights", {"source": {"kind": "path", "path": "/models/x"}}),
        (["refresh", "/m.safetensors", "--version", "7", "--mode", "keep", "--kv", "keep",
          "--staged", "never", "--delta"],
         "refresh_weights",
         {"source": {"kind": "file", "file": "/m.safetensors", "format": "safetensors"},
          "version": "7", "mode": "keep", "kv": "keep", "staged": "never", "delta": True}),
    ],
)  # fmt: skip
def test_what_is_sent(
    server: Server, control: FinishingControl, capsys: pytest.CaptureFixture[str], words: list[str], kind: str,
    arguments: dict[str, Any],
) -> None:  # fmt: skip
    assert ctl_main(server, *words) == 0
    assert control.sent == [(kind, arguments)]
    out = capsys.readouterr()
    assert out.out.startswith(f"{kind}: succeeded in 1.50 s")
    assert out.err == ""


def test_ranks_are_printed_with_units(
    server: Server, control: FinishingControl, capsys: pytest.CaptureFixture[str]
) -> None:
    control.replies["refresh_weights"] = {"num_tensors": 0, "num_bytes": 1 << 30, "staged": True, "stall_s": 0.01234}
    assert ctl_main(server, "refresh", "/m") == 0
    assert "rank 0: num_tensors 0, num_bytes 1 GiB, staged yes, stall_s 0.012 s" in capsys.readouterr().out


def test_checksums(server: Server, control: FinishingControl, capsys: pytest.CaptureFixture[str]) -> None:
    control.replies["checksum"] = {"total": "ff", "tensors": {"a": "01", "b": "02"}}
    assert ctl_main(server, "checksum") == 0
    assert "01" not in (out := capsys.readouterr().out)
    assert "total ff" in out
    assert ctl_main(server, "checksum", "--tensors") == 0
    assert "  01  a\n  02  b\n" in capsys.readouterr().out


def test_status_operations_and_json(
    server: Server, control: FinishingControl, capsys: pytest.CaptureFixture[str]
) -> None:
    control.replies["status"] = {
        "state": "poisoned", "reason": "refresh", "is_paused": True, "pause_mode": "keep", "asleep": ["kv_cache"],
        "operation": {"id": "op-1", "kind": "pause", "started": 0.0},
        "refresh": {"staged": True, "num_tensors": 3, "started": 0.0},
    }  # fmt: skip
    assert ctl_main(server, "status") == 0
    out = capsys.readouterr().out
    for text in ("poisoned (refresh)", "2 running, 1 waiting", "mode keep", "kv_cache", "3 tensors", "pause op-1"):
        assert text in out
    assert ctl_main(server, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "poisoned"
    assert ctl_main(server, "operations") == 0
    assert capsys.readouterr().out == "no operations yet\n"
    assert ctl_main(server, "resume") == 0
    assert ctl_main(server, "operations") == 0
    assert ctl_main(server, "operations", "op-1") == 0
    assert capsys.readouterr().out.count("resume: succeeded") == 3
    assert ctl_main(server, "cancel") == 0
    assert control.sent[-1] == ("cancel", {"id": "op-1"})
    assert capsys.readouterr().out == "resume: cancelled in 1.50 s\n"


def test_abort(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl_main(server, "abort", "--all") == 0
    assert "aborted 3" in capsys.readouterr().out
    assert ctl_main(server, "abort", "x", "y") == 0
    assert server.front_end.client.aborts[-1] == (None, ["x", "y"], "control")


def test_failures_are_one_line_and_exit_code_1(
    server: Server, control: FinishingControl, capsys: pytest.CaptureFixture[str]
) -> None:
    control.errors["pause"] = Conflict("sleep op-1 is running")
    assert ctl_main(server, "pause") == 1
    assert capsys.readouterr().err == "headrace: sleep op-1 is running\n"
    control.ends["sleep"] = {"state": "failed", "error": {"message": "no memory", "code": "x"}}
    assert ctl_main(server, "sleep") == 1
    assert capsys.readouterr().err == "headrace: sleep failed: no memory\n"
    assert ctl_main(server, "sleep", "--json") == 1
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    assert ctl_main(server, "cancel") == 1
    assert cli.main(["ctl", "status", "--url", "http://127.0.0.1:9"]) == 1
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["dance"], ["pause", "--mode", "soon"], ["abort"], ["abort", "x", "--all"], ["refresh"], ["sleep", "--tags"],
     ["refresh", "/no/such.safetensors", "--upload"], ["refresh", "/dev", "--upload"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(server: Server, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl_main(server, *words)
    assert caught.value.code == 2
    assert "usage: headrace ctl" in capsys.readouterr().err


def test_an_interrupt_cancels(server: Server, control: FinishingControl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.control_client.time.sleep", interrupt)
    control.stay_running = True
    assert ctl_main(server, "pause", "--mode", "wait") == 130
    assert control.sent[-1] == ("cancel", {"id": "op-1"})


# ---------------------------------------------------------------------------------------------------------- uploads


def test_one_file_is_sent_as_one_refresh(server: Server, control: FinishingControl, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 4000)
    assert ctl_main(server, "refresh", str(file), "--upload", "--version", "7", "--delta") == 0
    ((kind, arguments),) = control.sent
    assert (kind, arguments["version"], arguments["delta"]) == ("refresh_weights", "7", True)
    assert control.files == [file.read_bytes()]


def test_a_folder_is_sent_file_by_file(server: Server, control: FinishingControl, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    (tmp_path / "config.json").write_text("{}")
    words = ["refresh", str(tmp_path), "--upload", "--version", "7", "--staged", "always"]
    assert ctl_main(server, *words) == 0
    assert [kind for kind, _ in control.sent] == ["begin_refresh", "apply_refresh", "apply_refresh", "commit_refresh"]
    assert control.files == [b"a", b"b"]
    assert control.sent[0][1] == {"staged": "always"}
    assert control.sent[-1][1] == {"version": "7"}


def test_a_folder_that_fails_half_way_is_given_up(
    server: Server, control: FinishingControl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    control.ends["apply_refresh"] = {"state": "failed", "error": "bad tensor"}
    assert ctl_main(server, "refresh", str(tmp_path), "--upload") == 1
    assert "a.safetensors: apply_refresh failed: bad tensor" in capsys.readouterr().err
    assert [kind for kind, _ in control.sent] == ["begin_refresh", "apply_refresh", "abort_refresh"]


def test_the_key_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def request(self: httpx.Client, method: str, path: str, **_: Any) -> httpx.Response:
        seen.append(self.headers.get("authorization"))
        return httpx.Response(200, json={"operations": []}, request=httpx.Request(method, "http://x"))

    monkeypatch.setattr(httpx.Client, "request", request)
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "from-env")
    assert cli.main(["ctl", "operations"]) == 0
    assert cli.main(["ctl", "operations", "--key", "given"]) == 0
    assert seen == ["Bearer from-env", "Bearer given"]
    assert ctl.MODES == ("abort", "wait", "keep")
