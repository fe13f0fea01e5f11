"""Bodies of the control routes."""

from __future__ import annotations

from pydantic import Field

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name
from headrace.server.protocol.common import RequestModel

MAX_IDS = 10_000
MAX_ID_CHARS = 160  # a public id: a prefix and at most 128 characters of the caller's


class EmptyRequest(RequestModel):
    """No fields; the body may be left out."""


class AbortRequest(RequestModel):
    """What to abort: `request_ids` (public ids, X-Request-Ids or internal ids), or `all: true`."""

    request_ids: list[str] | None = Field(None, description="Public ids, X-Request-Ids or internal ids, mixed.")
    request_id: str | None = Field(None, description="The same, for one.")
    all: bool | None = Field(None, description="Every request of every front end.")

    def names(self) -> list[str] | None:
        """The ids to abort; None for all."""
        names = [*(self.request_ids or ()), *([] if self.request_id is None else [self.request_id])]
        if bool(self.all) == bool(names):
            raise InvalidRequest("Exactly one of request_ids and all: true must be given.", param="request_ids")
        if len(names) > MAX_IDS:
            raise InvalidRequest(f"request_ids must hold at most {MAX_IDS} ids, not {len(names)}.", param="request_ids")
        for index, name in enumerate(names):
            check_name(name, f"request_ids[{index}]", max_chars=MAX_ID_CHARS)
        return names or None
