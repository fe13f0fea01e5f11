"""Collects the rows of a step, per client, into the columns of `StepOutputs`. Used by the core alone.

What is reported once about a choice (cached tokens, queue and prefill time) goes with its first token, or with its last
row if it never had one; rows that carry prompt logprobs alone may come before.
"""

from __future__ import annotations

import msgspec

from headrace.engine.sequence import Sequence
from headrace.errors import ErrorInfo
from headrace.transport.messages import RowDetail, StepOutputs
from headrace.types import FinishReason, LogprobRows, RequestId


class OutputRows:
    """Rows since the last `take`. `version` is that of the weights; a choice hears of it when it changes."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._by_client: dict[int, StepOutputs] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def take(self) -> dict[int, StepOutputs]:
        taken, self._by_client = self._by_client, {}
        return taken

    def drop_client(self, client: int) -> None:
        self._by_client.pop(client, None)

    def add_token(
        self,
        seq: Sequence,
        token_id: int,
        reason: FinishReason | None,
        now_s: float,
        logprobs: LogprobRows | None,
        prompt_logprobs: LogprobRows | None,
    ) -> None:
        """The row of a sampled token, the last one of the choice if there is a `reason`."""
        request = seq.request
        rows = self._rows(request.client)
        has_new_version = seq.told_version != self.version
        if logprobs is not None or reason is not None or has_new_version or not seq.is_first_row_sent:
            stop_id = token_id if reason is FinishReason.STOP else None
            detail = RowDetail(
                row=len(rows.choices),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                stop_token_id=stop_id,
                num_preemptions=seq.num_preemptions,
                weights_version=self.version if has_new_version else None,
            )
            seq.told_version = self.version
            rows.details.append(_with_first(seq, detail, now_s))
        rows.request_ids.append(request.request_id)
        rows.choices.append(seq.choice)
        rows.num_tokens.append(1)
        rows.token_ids.append(token_id)
        rows.finished.append(0 if reason is None else int(reason))

    def add_embedding(self, seq: Sequence, embedding: bytes, now_s: float) -> None:
        """The only row of a choice whose prompt was pooled."""
        rows = self._rows(seq.request.client)
        version, seq.told_version = self.version, self.version
        detail = RowDetail(
            row=len(rows.choices),
            num_preemptions=seq.num_preemptions,
            weights_version=version,
            embedding=embedding,
        )
        rows.details.append(_with_first(seq, detail, now_s))
        self._add_empty(rows, seq.request.request_id, seq.choice, int(FinishReason.STOP))

    def add_prompt_logprobs(self, seq: Sequence, logprobs: LogprobRows) -> None:
        """A row without a token, ahead of the choice's first one."""
        rows = self._rows(seq.request.client)
        rows.details.append(RowDetail(row=len(rows.choices), prompt_logprobs=logprobs))
        self._add_empty(rows, seq.request.request_id, seq.choice, 0)

    def add_end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None) -> None:
        """The terminal row of a choice that ends without another token."""
        rows = self._rows(seq.request.client)
        detail = RowDetail(row=len(rows.choices), error=error, num_preemptions=seq.num_preemptions)
        rows.details.append(_with_first(seq, detail, None))
        self._add_empty(rows, seq.request.request_id, seq.choice, int(reason))

    def add_refusal(self, client: int, request_id: RequestId, num_choices: int, error: ErrorInfo) -> None:
        """The terminal rows of a request that was not let in."""
        rows = self._rows(client)
        for choice in range(num_choices):
            rows.details.append(RowDetail(row=len(rows.choices), error=error))
            self._add_empty(rows, request_id, choice, int(FinishReason.ERROR))

    def _rows(self, client: int) -> StepOutputs:
        rows = self._by_client.get(client)
        if rows is None:
            rows = StepOutputs(request_ids=[], choices=[], num_tokens=[], token_ids=[], finished=[], details=[])
            self._by_client[client] = rows
        return rows

    @staticmethod
    def _add_empty(rows: StepOutputs, request_id: RequestId, choice: int, finished: int) -> None:
        rows.request_ids.append(request_id)
        rows.choices.append(choice)
        rows.num_tokens.append(0)
        rows.finished.append(finished)


def _with_first(seq: Sequence, detail: RowDetail, first_token_s: float | None) -> RowDetail:
    """Adds what is told once, if it was not told yet; a choice that was never scheduled has nothing to tell."""
    scheduled_s = seq.first_scheduled_s
    if seq.is_first_row_sent or scheduled_s is None:
        return detail
    seq.is_first_row_sent = True
    return msgspec.structs.replace(
        detail,
        num_cached_tokens=seq.group.num_cached_tokens,
        queue_s=scheduled_s - seq.request.arrival_s,
        prefill_s=None if first_token_s is None else first_token_s - scheduled_s,
    )
