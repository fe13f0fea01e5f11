"""Log lines of every process: one line per event, `time level logger message key=value ...`, to stderr.

A process calls `configure_logging` once; everybody else uses `logging.getLogger(__name__)` and `event(...)`. Nothing a
client sent can break a line or forge one, and keys and prompts are never logged.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
MAX_VALUE_CHARS = 500
FIELDS = "headrace_fields"  # attribute of a LogRecord


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Logs `message` with fields as `key=value`; a field of None is left out."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={FIELDS: fields})


def plain(value: Any) -> str:
    """One field's value: printable ASCII on one line, quoted when it holds a space, of bounded length."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = text[: MAX_VALUE_CHARS - 3] + "..."
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
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        parts = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname, self._component, record.name, message]
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        parts += [f"{key}={plain(value)}" for key, value in fields.items() if value is not None]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


def configure_logging(level: str = "info", component: str = "headrace") -> None:
    """Sends all loggers of this process to stderr at `level`. Calling it again replaces the former set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(max(LEVELS[level], logging.WARNING))
