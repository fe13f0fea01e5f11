"""The error tree, with the HTTP status of each error. Everything a user can cause is raised as one of these.

    HeadraceError
    ├── RequestError            ends one request; carries status, type, code and the field's path
    │   ├── InvalidRequest      400  a bad field, an impossible length, a value out of range
    │   │   └── ContextLengthExceeded
    │   ├── AuthenticationFailed 401
    │   ├── PermissionDenied    403
    │   ├── NotFound            404  unknown model, route or operation
    │   ├── Conflict            409
    │   ├── RequestTooLarge     413
    │   ├── QueueFull           429  admission; Retry-After
    │   ├── InternalError       500  a bug of ours
    │   ├── Unavailable         503  starting, draining, asleep, engine dead; the reason is the code
    │   │   └── Draining
    │   └── DeadlineExceeded    504
    └── StartupError            one line on stderr, exit code 1
        ├── ConfigError         an option that cannot work
        └── CheckpointError     a model file that is missing, corrupt, truncated or unsupported

`assert` is for our own invariants; it never guards what a user sent.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error as data: what crosses a process and what becomes the HTTP body."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


class HeadraceError(Exception):
    """Root of the tree."""


class RequestError(HeadraceError):
    """An error that ends one request and is shown to its sender."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.status, self.type, self.code, self.message, self.param, self.retry_after_s)


class InvalidRequest(RequestError):
    status, type, default_code = 400, "invalid_request_error", "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class AuthenticationFailed(RequestError):
    status, type, default_code = 401, "authentication_error", "invalid_api_key"


class PermissionDenied(RequestError):
    status, type, default_code = 403, "permission_error", "permission_denied"


class NotFound(RequestError):
    status, type, default_code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(RequestError):
    status, type, default_code = 405, "invalid_request_error", "method_not_allowed"


class Conflict(RequestError):
    status, type, default_code = 409, "conflict_error", "conflict"


class RequestTooLarge(RequestError):
    status, type, default_code = 413, "invalid_request_error", "request_too_large"


class QueueFull(RequestError):
    status, type, default_code = 429, "rate_limit_error", "queue_full"


class InternalError(RequestError):
    status, type, default_code = 500, "server_error", "internal_error"


class Unavailable(RequestError):
    """503. `code` is the reason: starting, draining, engine_dead, aborted, ..."""

    status, type, default_code = 503, "unavailable", "unavailable"


class Draining(Unavailable):
    """No new requests: the server is about to go, or its operator wants it idle."""

    def __init__(self) -> None:
        super().__init__("The server is draining and takes no new requests.", code="draining", retry_after_s=5)


class DeadlineExceeded(RequestError):
    status, type, default_code = 504, "timeout_error", "deadline_exceeded"


class FailedRequest(RequestError):
    """An error that came back from the engine as data."""

    def __init__(self, info: ErrorInfo, operation: dict[str, Any] | None = None) -> None:
        """`operation`: the object of the control operation that failed with it."""
        super().__init__(info.message, param=info.param, code=info.code, retry_after_s=info.retry_after_s)
        self.operation = operation
        self._info = info

    def info(self) -> ErrorInfo:
        return self._info


class StartupError(HeadraceError):
    """The program cannot start; the message is one line that says why and what would help."""


class ConfigError(StartupError):
    """An option, or a combination of options, that cannot work."""


class CheckpointError(StartupError):
    """A model file that is missing, corrupt, truncated or of an unsupported kind."""
