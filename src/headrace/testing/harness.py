"""Drives an `EngineCore` in tests, without threads or time, on a `StrictExecutor`.

It checks the engine's invariants after every call and keeps what each choice got; `control` runs operations as the
engine's loop does. A choice that ends twice, or gets a
row after its end, fails at once. Tests build requests through `submit`, whose defaults make the output's length known.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.options import CacheConfig, ControlConfig, SchedulerConfig
from headrace.engine.control import ControlPlane
from headrace.engine.control.state import EngineState
from headrace.engine.core import EngineCore
from headrace.errors import FailedRequest
from headrace.testing.clock import FakeClock
from headrace.testing.strict import StrictExecutor
from headrace.transport.messages import Abort, Control, ControlDone, Lifecycle, RowDetail, StepOutputs, Submit
from headrace.types import FinishReason, RequestId, SamplingParams

Key = tuple[int, int, int]
"""Client, request id, choice."""


@dataclass
class ChoiceRecord:
    """All that a choice has got so far."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    details: list[RowDetail] = field(default_factory=list)

    @property
    def error_code(self) -> str | None:
        return next((detail.error.code for detail in self.details if detail.error is not None), None)

    @property
    def error_status(self) -> int | None:
        return next((detail.error.status for detail in self.details if detail.error is not None), None)

    @property
    def num_cached_tokens(self) -> int | None:
        return next((d.num_cached_tokens for d in self.details if d.num_cached_tokens is not None), None)

    @property
    def stop_token_id(self) -> int | None:
        return next((d.stop_token_id for d in self.details if d.stop_token_id is not None), None)

    @property
    def scored_ids(self) -> list[int]:
        """Token ids of all rows of prompt logprobs."""
        rows = [detail.prompt_logprobs for detail in self.details if detail.prompt_logprobs is not None]
        return [int(token_id) for part in rows for token_id in part.arrays()[0][:, 0]]


class EngineHarness:
    """One engine, its clock, its strict executor, and the records of all choices."""

    def __init__(  # budget: every parameter is an option of the engine
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        prefix_caching: bool = True,
        priority_ageing_s: float = 10.0,
        control: ControlConfig | None = None,
        weights_path: Path | None = None,
        holds_while_asleep: bool = False,
        **executor: Any,
    ) -> None:
        self.clock = FakeClock()
        self.executor = StrictExecutor(
            max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens, **executor
        )
        self.core = EngineCore(
            self.executor,
            CacheConfig(block_size=block_size, num_kv_blocks=num_blocks, enable_prefix_caching=prefix_caching),
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                priority_ageing_s=priority_ageing_s,
            ),
            clock=self.clock,
            holds_while_asleep=holds_while_asleep,
        )
        self.records: dict[Key, ChoiceRecord] = {}
        self.lifecycles: list[Lifecycle] = []
        self.core.on_lifecycle = self.lifecycles.append
        self.answers: dict[int, ControlDone] = {}
        self._woken = threading.Event()
        self.state = EngineState(self.core, control or ControlConfig(), weights_path, self._woken.set, self.clock)
        self.plane = ControlPlane(self.state, self._answer, self.clock)
        self.num_conflicts = 0
        self._next_id = 0
        self._next_call = 1

    def submit(
        self,
        *prompts: list[int],
        client: int = 0,
        request_id: int | None = None,
        aliases: tuple[str, ...] = (),
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        cache_salt: str | None = None,
        **params: Any,
    ) -> int:
        """Submits and returns the request id. EOS is ignored unless told otherwise, so that the length is known."""
        if request_id is None:
            request_id = self._next_id
            self._next_id += 1
        sampling = SamplingParams(**({"ignore_eos": True, "max_tokens": 4, "seed": 7} | params))
        message = Submit(
            request_id=RequestId(request_id),
            public_id=f"public-{client}-{request_id}",
            aliases=aliases,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            params=sampling,
            priority=priority,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            cache_salt=cache_salt,
        )
        self.core.submit(client, message)
        self.core.check_invariants()
        return request_id

    def abort(self, *request_ids: int, client: int = 0, **fields: Any) -> int:
        """By ids of this client; with none and no names, everything."""
        ids = tuple(RequestId(i) for i in request_ids) or None
        num_aborted = self.core.abort(client, Abort(call_id=0, request_ids=ids, **fields))
        self.core.check_invariants()
        return num_aborted

    def step(self, times: int = 1) -> dict[int, StepOutputs]:
        outputs: dict[int, StepOutputs] = {}
        for _ in range(times):
            outputs = self.core.step()
            self.core.check_invariants()
            self.record(outputs)
        return outputs

    def run(self, max_steps: int = 20_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.core.stats()}")

    # ------------------------------------------------------------------ control operations

    def start(self, operation: str, **arguments: Any) -> int:
        """Begins an operation; its answer comes to `answers` under the returned number."""
        call_id = self._next_call
        self._next_call += 1
        self.plane.handle(0, Control(call_id=call_id, operation=operation, arguments=arguments))
        self.core.check_invariants()
        return call_id

    def turn(self) -> None:
        """What the engine's loop does between two looks at its inbox."""
        if self.core.has_work:
            self.step()
        else:
            self.core.expire()
            self.record(self.core.take_outputs())
        self.plane.advance()

    def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Runs an operation to its end and returns its first rank's result (a query's own). Raises FailedRequest."""
        call_id = self.start(operation, **arguments)
        for _ in range(20_000):
            if call_id in self.answers:
                break
            self._woken.clear()
            self.turn()
            if call_id not in self.answers and not self._woken.wait(0.01 if self.core.has_work else 10):
                assert self.core.has_work, f"{operation} waits for nothing"  # else steps go on beside a thread
        done = self.answers[call_id]
        self.record(self.core.take_outputs())
        if done.error is not None:
            raise FailedRequest(done.error)
        assert done.result is not None, "an answer has a result or an error"
        result: dict[str, Any] = done.result["result"][0] if "result" in done.result else done.result
        return result

    def _answer(self, client: int, done: ControlDone) -> None:
        self.answers[done.call_id] = done

    def choice(self, request_id: int, choice: int = 0, client: int = 0) -> ChoiceRecord:
        return self.records.setdefault((client, request_id, choice), ChoiceRecord())

    def record(self, outputs: dict[int, StepOutputs]) -> None:
        for client, rows in outputs.items():
            details = {detail.row: detail for detail in rows.details}
            assert len(details) == len(rows.details), "two details for one row"
            start = 0
            for row, request_id in enumerate(rows.request_ids):
                stop = start + rows.num_tokens[row]
                detail = details.get(row)
                if detail is not None and detail.error is not None and detail.error.code == "conflict":
                    self.num_conflicts += 1
                    continue
                record = self.choice(request_id, rows.choices[row], client)
                assert record.finish is None, f"{request_id}/{rows.choices[row]} got a row after its end"
                record.token_ids += rows.token_ids[start:stop]
                if detail is not None:
                    record.details.append(detail)
                if rows.finished[row]:
                    record.finish = FinishReason(rows.finished[row])
                start = stop
            assert start == len(rows.token_ids)

    def assert_idle(self) -> None:
        """Nothing is alive and nothing is held."""
        stats = self.core.stats()
        assert not self.core.has_work
        assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        self.core.check_invariants()
