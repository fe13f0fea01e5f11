"""What of tracing everybody may import: W3C's trace context as text, and the door to OpenTelemetry, which is an extra.

`open_tracer` imports `otel.py`, and with it OpenTelemetry, only where traces are asked for.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from headrace.observability.otel import Tracer

TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
TRACES_PATH = "/v1/traces"
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def checked_trace_parent(text: str | None) -> str | None:
    """A `traceparent` header's value, or None if it is malformed: W3C's Trace Context has it ignored then."""
    return text if text is not None and TRACE_PARENT.fullmatch(text) else None


def trace_id_of(trace_parent: str | None) -> str | None:
    match = TRACE_PARENT.fullmatch(trace_parent or "")
    return match.group(1) if match else None


def traces_url(endpoint: str) -> str:
    """The URL that spans go to: a collector's address alone gets the usual path. Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-traces-endpoint: {endpoint!r} is no URL such as http://127.0.0.1:4318{TRACES_PATH}")
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def check_tracing(endpoint: str | None) -> None:
    """Raises StartupError if traces are asked for and cannot be had."""
    if endpoint is None:
        return
    traces_url(endpoint)
    if not all(map(_is_installed, _NEEDED)):
        raise StartupError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'headrace[otel]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def open_tracer(endpoint: str | None, *, version: str, instance: str) -> Tracer | None:
    """None when traces are switched off. Call `check_tracing` first."""
    if endpoint is None:
        return None
    from headrace.observability.otel import Tracer

    return Tracer.to_collector(traces_url(endpoint), version=version, instance=instance)
