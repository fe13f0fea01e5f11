"""The output of `headrace run-batch`: what it knows of earlier runs, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.run_batch_lines import BadLine, Job, refusal, result_of
from headrace.cli.run_batch_output import OutputLines
from headrace.errors import ConfigError, StartupError


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


JOB = Job(1, "a", "/v1/completions", b"{}")
ANONYMOUS = BadLine(7, None, "invalid_json", "line 7: no JSON object")


def test_an_output_knows_what_it_holds_and_loses_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputLines(str(path)) as output:
        assert not output.has(JOB)
        output.write(result_of(JOB, 200, "r", b"{}"))
        output.write(refusal(ANONYMOUS))
        assert (output.num_done, output.num_failed) == (2, 1)
    whole = path.read_bytes()
    for torn in (b"", b"{", whole[:20], whole.splitlines()[0]):
        path.write_bytes(whole + torn)
        with OutputLines(str(path)) as output:
            assert output.has(JOB)
            assert output.has(ANONYMOUS)
            assert not output.has(Job(1, "b", "", b""))
            assert not output.has(BadLine(8, None, "", ""))
            assert (output.num_done, output.num_failed) == (2, 1)
            assert path.read_bytes() == whole
            output.write(result_of(Job(2, "b", "", b""), 400, "r", b"{}"))
            assert output.num_failed == 2
        assert [line["custom_id"] for line in read(path)] == ["a", None, "b"]


@pytest.mark.parametrize(
    "content",
    [b"notes", b"notes\n", b'{"custom_id": "a", "method": "POST"}\n', b'{"id": "x"', b"\x00\x00\n", b"\xff\n"],
)
def test_a_file_of_something_else_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1"):
        OutputLines(str(path))
    assert path.read_bytes() == content


def test_failures_are_taken_out_to_be_tried_again(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    link.symlink_to(path)
    with OutputLines(str(path)) as output:
        for number, status in enumerate((200, 500, 201, 400), start=1):
            output.write(result_of(Job(number, f"r{number}", "", b""), status, "r", b"{}"))
        output.write(refusal(ANONYMOUS))
    path.chmod(0o600)
    whole = path.read_bytes()
    good = b"".join(line for line in whole.splitlines(keepends=True) if b'"status_code":20' in line)
    path.write_bytes(whole + whole[:20])
    with OutputLines(str(link), drop_failed=True) as output:
        assert path.read_bytes() == good
        assert (output.num_done, output.num_failed) == (2, 0)
        assert [output.has(Job(number, f"r{number}", "", b"")) for number in (1, 2, 3, 4)] == [True, False, True, False]
        assert not output.has(ANONYMOUS)
        with pytest.raises(ConfigError, match="another run"):
            OutputLines(str(path))
        output.write(result_of(Job(2, "r2", "", b""), 200, "r", b"{}"))
    assert [line["custom_id"] for line in read(path)] == ["r1", "r3", "r2"]
    assert (path.stat().st_mode & 0o777, link.is_symlink()) == (0o600, True)
    assert sorted(tmp_path.iterdir()) == [link, path]
    again = path.read_bytes()
    with OutputLines(str(path), drop_failed=True):
        assert path.read_bytes() == again


def test_a_copy_that_cannot_be_written_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputLines(str(path)) as output:
        output.write(refusal(ANONYMOUS))
    whole = path.read_bytes()
    (tmp_path / ".out.jsonl.retry").mkdir()
    with pytest.raises(ConfigError, match="retry"):
        OutputLines(str(path), drop_failed=True)
    assert path.read_bytes() == whole
    for target in ("-", "/dev/null"):
        with pytest.raises(ConfigError, match="--retry-failed"):
            OutputLines(target, drop_failed=True)


def test_one_run_at_a_time_writes_an_output(tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    with OutputLines(path), pytest.raises(ConfigError, match="another run"):
        OutputLines(path)
    OutputLines(path).__exit__(None, None, None)


def test_a_full_disk_is_one_line() -> None:
    with OutputLines("/dev/full") as output, pytest.raises(StartupError, match="No space"):
        output.write(refusal(ANONYMOUS))
