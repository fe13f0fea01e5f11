"""The command itself: subcommands, quick help, errors as one line, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import headrace
from headrace.cli import main as cli
from headrace.errors import CheckpointError, Unavailable


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, timeout=50)


def fails_with(error: BaseException) -> Callable[[object], int]:
    def run_command(_: object) -> int:
        raise error

    return run_command


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from headrace.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'httpx', 'rich', 'zmq', 'tokenizers', 'fastapi', 'yaml', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize("words", [["serve"], ["chat"], ["complete"], ["pull"], ["bench"], ["bench", "serve"], ["ctl"],
                                   ["ctl", "refresh"], ["bench", "offline"], ["doctor"], ["version"]])  # fmt: skip
def test_help_of_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--help"])
    assert caught.value.code == 0
    assert "usage: headrace" in capsys.readouterr().out


def test_serve_help_imports_neither_numpy_nor_server() -> None:
    code = (
        "import sys; from headrace.cli.main import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'fastapi', 'zmq', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len N" in done.stdout
    assert "--[no-]enable-prefix-caching" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize("error", [CheckpointError("the file\nis cut"), Unavailable("the file is cut")])
def test_an_error_is_one_line_and_exit_code_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = SimpleNamespace(add_arguments=lambda parser: None, run=fails_with(error))
    monkeypatch.setattr(cli.importlib, "import_module", lambda path: command)
    assert cli.main(["version"]) == 1
    assert capsys.readouterr().err == "headrace: the file is cut\n"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = SimpleNamespace(add_arguments=lambda parser: None, run=fails_with(KeyboardInterrupt()))
    monkeypatch.setattr(cli.importlib, "import_module", lambda path: command)
    assert cli.main(["version"]) == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["serve", "no-such-model"], "smollm2"),
        (["complete", "x", "--model", "/no/such/model"], "/no/such/model"),
        (["complete", ""], "prompt"),
        (["chat", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["chat", "--url", "http://127.0.0.1:9", "--block-size", "8"], "--block-size"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--num-requests", "0"], "--num-requests"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["bench", "offline", "--batch-sizes", "1,x"], "--batch-sizes"),
        (["pull", "no-such-model"], "smollm2"),
    ],
)
def test_what_cannot_work_is_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("headrace: ")
    assert expected in lines[0]


def test_a_corrupt_model_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 100)
    done = run("complete", "x", "--model", str(file))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("headrace: ")
    assert done.stdout == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    pipe = f"{sys.executable} -m headrace doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=50)
    assert done.stdout == "{"
    assert done.stderr == ""
