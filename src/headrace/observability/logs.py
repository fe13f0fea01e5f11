"""Log lines of every process: one line per event, to stderr, as `time level logger message key=value ...` or as JSON.

A process calls `configure_logging` once, and `set_level` when it is told to; everybody else uses
`logging.getLogger(__name__)` and `event(...)`. Nothing a client sent can break a line or forge one, and keys and
prompts are never logged.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import Any

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("text", "json")
NOISY = ("httpx", "httpcore", "asyncio", "urllib3", "uvicorn.access")  # never below warning
MAX_VALUE_CHARS = 500
FIELDS = "headrace_fields"  # attribute of a LogRecord


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Logs `message` with fields as `key=value`; a field of None is left out."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={FIELDS: fields})


def bounded(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def plain(value: Any) -> str:
    """One field's value: printable ASCII on one line, quoted when it holds a space, of bounded length."""
    text = f"{value:.6g}" if isinstance(value, float) else bounded(str(value))
    if text and all("!" <= character <= "~" and character not in "\"\\'=" for character in text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class LineFormatter(logging.Formatter):
    """Formats a record as one line; an exception's traceback follows it, indented."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        parts = [_stamp(record), record.levelname, self._component, record.name, message]
        parts += [f"{key}={plain(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line that is a JSON object of ASCII: the record's own members, then its fields."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            members.setdefault(key, _json_value(value))
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members)


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, FIELDS, {})
    return {key: value for key, value in fields.items() if value is not None}


def _json_value(value: Any) -> int | float | str:
    """A number stays one, if JSON knows it."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value if isinstance(value, int) else bounded(str(value))


def configure_logging(level: str = "info", component: str = "headrace", log_format: str = "text") -> None:
    """Sends all loggers of this process to stderr at `level`. Calling it again replaces the former set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(component) if log_format == "json" else LineFormatter(component))
    logging.getLogger().handlers[:] = [handler]
    set_level(LEVELS[level])


def set_level(level: int) -> None:
    """From now on, for all loggers of this process."""
    logging.getLogger().setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
