"""Log lines that nothing can break, as text and as JSON, and the level that a running process takes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.client.report import FrontEndReport
from headrace.observability.logs import LEVELS, LineFormatter, configure_logging, event, plain, set_level
from headrace.transport.board import StatusBoard
from headrace.transport.log_level import LogLevelFollower

NASTY = ["a\nb", "a\r\nb", "\x1b[31m", "a b", "\u202e", "\ud800", "x" * 10_000, "=", '"', ""]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield root
    root.handlers[:], level = before
    root.setLevel(level)


def test_an_event_is_one_line_of_fields(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "front-end-0")
    logger = logging.getLogger("headrace.test")
    event(logger, logging.INFO, "done", id="cmpl-1", seconds=0.123456789, nothing=None, path='/a "b"\nforged=1')
    event(logger, logging.DEBUG, "unseen")
    (line,) = capsys.readouterr().err.splitlines()
    assert " INFO front-end-0 headrace.test done id=cmpl-1 seconds=0.123457 path=" in line
    assert "nothing" not in line


@pytest.mark.parametrize("value", NASTY)
def test_no_value_breaks_a_line(value: str) -> None:
    text = plain(value)
    assert text.isprintable()
    assert text.isascii()
    assert len(text) < 1000
    assert text.startswith('"') or " " not in text


def test_a_message_with_line_breaks_stays_on_one_line() -> None:
    record = logging.LogRecord("n", logging.INFO, "", 0, "a\nb", (), None)
    assert len(LineFormatter("c").format(record).splitlines()) == 1


def test_json_lines(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "front-end-0", "json")
    logger = logging.getLogger("headrace.test")
    event(logger, logging.INFO, "done", id="cmpl-1", seconds=0.123456789, tokens=7, nothing=None, component="forged")
    event(logger, logging.INFO, "odd", big=10**30, not_finite=float("nan"), shape=(1, 2), is_on=True)
    try:
        raise ValueError("a\nb")
    except ValueError:
        logger.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    stamp = lines[0].pop("time")
    assert stamp.endswith("Z")
    assert lines[0] == {"level": "info", "component": "front-end-0", "logger": "headrace.test", "message": "done",
                        "id": "cmpl-1", "seconds": 0.123457, "tokens": 7}  # fmt: skip
    assert (lines[1]["big"], lines[1]["not_finite"], lines[1]["shape"], lines[1]["is_on"]) == (
        10**30,
        "nan",
        "(1, 2)",
        True,
    )
    assert lines[2]["exception"].endswith("ValueError: a\nb")


@pytest.mark.parametrize("value", NASTY)
def test_no_value_breaks_json(value: str, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "c", "json")
    event(logging.getLogger("headrace.test"), logging.INFO, value, path=value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isascii()
    assert json.loads(line)["path"] == (value if len(value) < 500 else value[:497] + "...")


def test_a_level_goes_by_the_board(tmp_path: Path) -> None:
    board = StatusBoard.create(tmp_path / "board", 2)
    reports = [FrontEndReport(board, index) for index in range(2)]
    applied: list[int] = []
    follower = LogLevelFollower(board, applied.append)
    follower.look()
    reports[1].update(log_level=LEVELS["debug"], log_level_ns=5)
    follower.look()
    follower.look()
    assert applied == [LEVELS["debug"]]
    reports[0].update(log_level=LEVELS["error"], log_level_ns=6)
    FrontEndReport(board, 0)  # it was restarted: what it had been told stays
    follower.look()
    assert applied == [LEVELS["debug"], LEVELS["error"]]


def test_other_peoples_loggers_stay_quiet(root_logger: logging.Logger) -> None:
    set_level(logging.DEBUG)
    assert logging.getLogger("headrace.x").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
