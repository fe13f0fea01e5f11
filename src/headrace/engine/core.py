"""The engine: takes requests in, runs them step by step on an executor, and ends each choice exactly once.

`EngineLoop` (loop.py) drives it from one thread; so do tests, without any. It composes the intake, the scheduler, the
KV manager, the registry of live requests and the output rows, and knows no thread, socket, process or tensor. Its own
job is how choices start (fan-out), how they end, and who is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.intake import Intake, num_refusals
from headrace.engine.outputs import OutputRows
from headrace.engine.registry import RequestRegistry
from headrace.engine.scheduler import create_scheduler
from headrace.engine.sequence import PromptGroup, Request, Sequence, SequenceState
from headrace.engine.sizing import (
    available_memory,
    fitting_tokens,
    num_kv_blocks,
    resolve_max_model_len,
    resolve_max_num_seqs,
)
from headrace.errors import (
    Conflict,
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    NotFound,
    RequestError,
    Unavailable,
)
from headrace.executor.base import Executor
from headrace.kv.manager import KVManager
from headrace.transport.messages import Abort, EngineInfo, StepOutputs, Submit
from headrace.transport.plan import StepResult
from headrace.transport.stats import EngineStats
from headrace.types import FinishReason

logger = logging.getLogger(__name__)

SENDERS_OWN_REASONS = frozenset({"client", "disconnect", "stop_string"})
"""Abort reasons of the sender itself: its choice just ends. Any other one is the server's, and an error to it."""


class EngineCore:
    """All methods belong to one thread. `step` and `take_outputs` return the rows of each client."""

    def __init__(
        self,
        executor: Executor,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model = executor.info
        free_bytes = available_memory()
        max_len = resolve_max_model_len(max_model_len, model, fitting_tokens(cache, model, free_bytes))
        max_num_seqs = resolve_max_num_seqs(scheduler)
        num_blocks = num_kv_blocks(cache, model, max_len, max_num_seqs, free_bytes)
        executor.allocate(num_blocks, cache.block_size, max_num_seqs)
        self.info = EngineInfo(
            model=model.name,
            vocab_size=model.vocab_size,
            max_model_len=max_len,
            max_num_seqs=max_num_seqs,
            block_size=cache.block_size,
            num_blocks=num_blocks,
            backend=model.backend,
            weights_version=model.weights_version,
            has_prefix_cache=cache.enable_prefix_caching,
        )
        self._executor = executor
        self._clock = clock
        self._intake = Intake(self.info, frozenset(model.eos_token_ids), scheduler.priority_ageing_s)
        self._kv = KVManager(num_blocks, cache.block_size)
        self._scheduler = create_scheduler(scheduler, self._kv, max_num_seqs)
        self._registry = RequestRegistry()
        self._rows = OutputRows()
        self._num_steps = 0
        self._num_followers = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, client: int, request: Submit) -> None:
        """Takes a request in; one that cannot run is answered with a terminal ERROR for each choice, not raised."""
        try:
            if self._registry.get(client, request.request_id) is not None:
                raise Conflict(f"request id {request.request_id} is in use", param="request_id")
            live = self._intake.admit(client, request, self._clock())
        except RequestError as error:
            self._rows.add_refusal(client, request.request_id, num_refusals(request), error.info())
            return
        self._registry.add(live)
        for seq in live.sequences:
            if seq.group.leader is None:
                seq.group.leader = seq
                self._scheduler.add(seq)
            else:
                seq.group.followers.append(seq)
                self._num_followers += 1

    def abort(self, client: int, abort: Abort) -> int:
        """Ends what the message names, in whatever state it is; returns how many choices were alive. Idempotent."""
        if abort.request_ids is None and abort.names is None:
            requests = list(self._registry)
        else:
            own = (self._registry.get(client, request_id) for request_id in abort.request_ids or ())
            requests = list(dict.fromkeys(request for request in own if request is not None))
            requests += [request for request in self._registry.named(abort.names or ()) if request not in requests]
        return sum(self._abort_request(request, abort.reason, abort.choice) for request in requests)

    def abort_client(self, client: int) -> int:
        """The client is gone: ends all that it had and drops the rows that it would have got."""
        num_aborted = sum(self._abort_request(request, "disconnect") for request in self._registry.of_client(client))
        self._rows.drop_client(client)
        return num_aborted

    def _abort_request(self, request: Request, reason: str, choice: int | None = None) -> int:
        error: ErrorInfo | None = None
        if reason not in SENDERS_OWN_REASONS:
            error = Unavailable(f"the server ended this request: {reason}", code="aborted").info()
        ending = [seq for seq in request.sequences if seq.is_live and choice in (None, seq.choice)]
        self._end_all(ending, FinishReason.ABORT, error)
        return len(ending)

    def control(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Runs a control operation to its effect. Raises RequestError."""
        if operation != "reset_prefix_cache":
            raise NotFound(
                f"there is no control operation {operation!r}; there is: reset_prefix_cache", param="operation"
            )
        if arguments:
            raise InvalidRequest(f"reset_prefix_cache takes no arguments, got {sorted(arguments)}", param="arguments")
        return {"num_blocks": self._kv.reset()}

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything: choices are alive, or rows wait to be taken."""
        return len(self._registry) > 0 or bool(self._rows)

    def take_outputs(self) -> dict[int, StepOutputs]:
        """The rows that need no step: of aborts and refusals since the last one."""
        return self._rows.take()

    def step(self) -> dict[int, StepOutputs]:
        """Ends what is past its deadline, computes one step, and returns all rows since the last look, by client.

        An exception of the executor passes through; the engine is of no use after it.
        """
        now_s = self._clock()
        for request in self._registry.pop_expired(now_s):
            error = DeadlineExceeded(f"the request's deadline of {request.submit.timeout_s:g} s has passed").info()
            self._end_all([seq for seq in request.sequences if seq.is_live], FinishReason.ERROR, error)
        plan = self._scheduler.schedule(self._num_steps, now_s)
        if plan is not None:
            self._num_steps += 1
            self._apply(self._executor.execute(plan))
        return self._rows.take()

    def _apply(self, result: StepResult) -> None:
        """Brings the sequences up to what the step computed."""
        now_s = self._clock()
        running = self._scheduler.running
        by_slot = dict(running) if result.errors else running  # a failed slot is vacated before its rows are read
        for slot, message in result.errors.items():
            seq = by_slot[slot]
            logger.error("%r failed: %s", seq, message)
            self._end(seq, FinishReason.ERROR, InternalError(message).info(), is_faulty=True)
        if result.prompt_logprobs:
            self._share_prompt_logprobs(result, by_slot)
        for seq in self._scheduler.advance():
            self._prefill_completed(seq)
        logprobs, prompt_logprobs, errors = result.logprobs, result.prompt_logprobs, result.errors
        for slot, token_id in zip(result.slots, result.token_ids, strict=True):
            if slot in errors:
                continue
            seq = by_slot[slot]
            seq.append(token_id)
            reason = seq.finish_reason_now(token_id)
            self._rows.add_token(seq, token_id, reason, now_s, logprobs.get(slot), prompt_logprobs.get(slot))
            self._num_generated_tokens += 1
            if reason is not None:
                self._close(seq, reason)

    def _share_prompt_logprobs(self, result: StepResult, by_slot: Mapping[int, Sequence]) -> None:
        """The followers get the leader's rows: they will not compute the prompt themselves."""
        sampled = set(result.slots)
        for slot, rows in result.prompt_logprobs.items():
            if slot in result.errors:
                continue
            seq = by_slot[slot]
            receivers = [seq, *seq.group.followers] if seq.group.leader is seq else [seq]
            for receiver in receivers:
                receiver.num_prompt_logprobs += rows.num_rows
                if receiver is not seq or slot not in sampled:  # else they go along with the token
                    self._rows.add_prompt_logprobs(receiver, rows)

    # --------------------------------------------------------------------------------------------------------- fan-out

    def _prefill_completed(self, seq: Sequence) -> None:
        group = seq.group
        if group.is_computed:
            return
        group.is_computed = True
        group.leader = None
        self._num_prompt_tokens += seq.num_prompt_tokens
        followers, group.followers = group.followers, []
        self._num_followers -= len(followers)
        for follower in followers:
            if seq.chain is not None:
                follower.chain = seq.chain.fork(seq.num_prompt_tokens // self.info.block_size)
            self._scheduler.add(follower)

    def _replace_leader(self, group: PromptGroup) -> None:
        """The leader ended before the prompt was computed: the next one takes over."""
        group.leader = None
        if group.followers:
            group.leader = group.followers.pop(0)
            self._num_followers -= 1
            self._scheduler.add(group.leader)

    # ---------------------------------------------------------------------------------------------------------- endings

    def _end_all(self, sequences: list[Sequence], reason: FinishReason, error: ErrorInfo | None) -> None:
        """Followers first, so that none of them takes over from a leader that ends with it."""
        for seq in reversed(sequences):
            self._end(seq, reason, error)

    def _end(
        self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None, *, is_faulty: bool = False
    ) -> None:
        """Ends a choice without another token."""
        self._rows.add_end(seq, reason, error)
        self._close(seq, reason, is_faulty=is_faulty)

    def _close(self, seq: Sequence, reason: FinishReason, *, is_faulty: bool = False) -> None:
        """The one way into FINISHED. The caller has added the terminal row."""
        group = seq.group
        if seq.state is SequenceState.WAITING and not group.is_computed and group.leader is not seq:
            group.followers.remove(seq)
            self._num_followers -= 1
        else:
            self._scheduler.remove(seq, is_faulty=is_faulty)
        seq.move(SequenceState.FINISHED)
        seq.finish_reason = reason
        if group.leader is seq:
            self._replace_leader(group)
        request = seq.request
        request.num_live -= 1
        if request.num_live == 0:
            self._registry.remove(request)

    # ----------------------------------------------------------------------------------------------------------- status

    def stats(self) -> EngineStats:
        queries, hits = self._scheduler.prefix_counts
        return EngineStats(
            step=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_queued + self._num_followers,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            num_free_blocks=self._kv.num_free,
            num_blocks=self._kv.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_queries=queries,
            prefix_hits=hits,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def check_invariants(self) -> None:
        """Asserts what must hold between two steps; costs a look at every block and sequence."""
        self._registry.check_invariants()
        self._scheduler.check_invariants()
        live = [seq for request in self._registry for seq in request.sequences if seq.is_live]
        followers = [seq for seq in live if seq in seq.group.followers]
        assert len(followers) == self._num_followers
        assert len(live) == len(self._scheduler.running) + self._scheduler.num_queued + len(followers)
        for seq in live:
            group = seq.group
            assert seq.finish_reason is None
            if group.is_computed:
                assert group.leader is None
                assert not group.followers
            else:
                assert group.leader is not None
                assert group.leader.is_live, "followers wait for a leader that has ended"
