"""The supervisor's pieces: sockets, runtime directory, launch file, ready lines, signals, the parent's pipe."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.config.launch import Launch
from headrace.config.options import CacheConfig, EngineConfig, ModelConfig, ServeConfig, ServerConfig
from headrace.control.announce import ready_lines
from headrace.control.children import Child, explain_exit
from headrace.control.listen import open_listeners, url_of
from headrace.control.runtime_dir import RuntimeDir
from headrace.control.wakeup import SignalWakeup
from headrace.errors import StartupError


def test_a_used_port_is_one_line_even_if_its_owner_shares_it() -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        for count in (1, 2):
            with pytest.raises(StartupError, match=f"127.0.0.1:{port}: the port is in use") as caught:
                open_listeners("127.0.0.1", port, count)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "port"), [("256.1.1.1", 80), ("no such host", 80), ("127.0.0.1", 70000)])
def test_a_bad_address_is_one_line(host: str, port: int) -> None:
    with pytest.raises(StartupError, match=r"cannot listen on|--port must be") as caught:
        open_listeners(host, port, 1)
    assert "\n" not in str(caught.value)


def test_port_zero_is_one_port_for_all() -> None:
    listeners = open_listeners("127.0.0.1", 0, 3)
    ports = {listener.getsockname()[1] for listener in listeners}
    assert len(ports) == 1
    assert url_of(listeners[0]) == f"http://127.0.0.1:{ports.pop()}"
    with socket.create_connection(listeners[0].getsockname()):
        pass
    for listener in listeners:
        listener.close()


def test_the_url_of_any_address_is_loopback() -> None:
    (listener,) = open_listeners("0.0.0.0", 0, 1)
    with listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_the_runtime_dir_is_private_and_goes_away(tmp_path: Path) -> None:
    with RuntimeDir(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_supervisor_left_is_swept_up_and_a_living_one_kept(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.control.runtime_dir import RuntimeDir\n"
        "with RuntimeDir(Path(sys.argv[1])) as path: print(path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        os.utime(left, (0, 0))
        with RuntimeDir(tmp_path):
            assert left.exists(), "its owner lives"
        os.utime(left, (0, 0))
        process.kill()
    with RuntimeDir(tmp_path):
        assert not left.exists()


def test_the_launch_file_is_private_and_keeps_every_option(tmp_path: Path) -> None:
    config = ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(model="x", served_model_name=("a", "b")), cache=CacheConfig(num_kv_blocks=7)
        ),
        server=ServerConfig(api_key=("secret",), cors_origin=("*",), drain_timeout=1.5),
    )
    launch = Launch(config=config, model_path="/m", runtime_dir=str(tmp_path), endpoint="ipc://x", listen_fds=(5, 6))
    launch.write(tmp_path / "launch.json")
    assert (tmp_path / "launch.json").stat().st_mode & 0o777 == 0o600
    assert Launch.read(tmp_path / "launch.json") == launch
    launch.fail("first\nline")
    launch.fail("second")
    assert launch.failure_path.read_text() == "first line"


def test_the_ready_lines_hold_a_shell_command() -> None:
    _, line = ready_lines("http://h:1", "it's", has_chat_template=True, needs_key=True, seconds=1.0)
    words = shlex.split(line.removeprefix("Try: "))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer $HEADRACE_API_KEY" in words
    assert '"model": "it\'s"' in words[-1]
    _, line = ready_lines("http://h:1", "m", has_chat_template=False, needs_key=False, seconds=1.0)
    assert "/v1/completions" in line


def test_signals_end_the_sleep_and_are_kept_in_order() -> None:
    with SignalWakeup() as wakeup:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        started = time.monotonic()
        wakeup.sleep(30.0)
        assert time.monotonic() - started < 10
        assert wakeup.stop_signals == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


CHILD = (
    "import sys, time\n"
    "from headrace.transport.parent_watch import ParentWatch, leave_signals_to_supervisor\n"
    "leave_signals_to_supervisor(); watch = ParentWatch(grace_s=0.2)\n"
)


def start(tmp_path: Path, code: str) -> Child:
    (tmp_path / "child_module.py").write_text(CHILD + code)
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        return Child("child", "child_module", [])
    finally:
        del os.environ["PYTHONPATH"]


def wait(child: Child) -> int:
    child.reap()
    assert child.exit_code is not None
    return child.exit_code


def test_a_child_leaves_when_its_pipe_closes(tmp_path: Path) -> None:
    child = start(tmp_path, "time.sleep(60)")
    child.ask_to_stop()
    child.ask_to_stop()
    assert wait(child) == 0


def test_a_child_that_hangs_in_its_own_end_leaves_by_force(tmp_path: Path) -> None:
    child = start(tmp_path, "watch.on_stop = lambda: None; time.sleep(60)")
    child.ask_to_stop()
    assert wait(child) in (0, 1)  # 0 when the pipe closed before on_stop was set


def test_a_kill_reaches_the_childs_children(tmp_path: Path) -> None:
    code = (
        "import subprocess; from pathlib import Path\n"
        "grandchild = subprocess.Popen(['sleep', '60'])\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(grandchild.pid)); time.sleep(60)"
    )
    child = start(tmp_path, code)
    pid_file = tmp_path / "pid"
    until = time.monotonic() + 10
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    grandchild = int(pid_file.read_text())
    child.kill()
    assert explain_exit(wait(child)) == "killed by SIGKILL"
    while Path(f"/proc/{grandchild}").exists():
        state = Path(f"/proc/{grandchild}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # dead; whoever inherited it has not looked yet
            break
        assert time.monotonic() < until
        time.sleep(0.01)
