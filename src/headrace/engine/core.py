"""The engine: takes requests in, runs them step by step on an executor, and ends each choice exactly once.

`EngineLoop` (loop.py) drives it from one thread; so do tests, without any. It composes the intake, the scheduler, the
KV manager, the registry of live requests and the output rows, and knows no thread, socket, process or tensor. Its own
job is how choices start (fan-out), how they end, and who is told.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.counts import Counts
from headrace.engine.holding import Holding, preparation_error
from headrace.engine.intake import Intake, check_lifecycle, num_refusals
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
    ErrorInfo,
    InternalError,
    RequestError,
    Unavailable,
)
from headrace.executor.base import Executor
from headrace.kv.manager import KVManager
from headrace.transport.messages import Abort, EngineInfo, Lifecycle, StepOutputs, Submit
from headrace.transport.plan import StepResult
from headrace.transport.stats import EngineStats
from headrace.types import FinishReason

logger = logging.getLogger(__name__)

QUIET_REASONS = frozenset({"client", "disconnect", "stop_string", "control"})
"""Abort reasons whose choice just ends with what it has: its sender's own, and a trainer's, who wants partial results.
Any other one is the server's, and an error to the sender."""


class EngineCore:
    """All methods belong to one thread. `step` and `take_outputs` return the rows of each client."""

    def __init__(
        self,
        executor: Executor,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        holds_while_asleep: bool = False,
    ) -> None:
        """`holds_while_asleep`: requests that come meanwhile wait, instead of being refused."""
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
            embedding_size=model.hidden_size,
        )
        self.executor = executor
        self._clock = clock
        self._intake = Intake(self.info, frozenset(model.eos_token_ids), scheduler.priority_ageing_s)
        self._kv = KVManager(num_blocks, cache.block_size)
        self._scheduler = create_scheduler(scheduler, self._kv, max_num_seqs)
        self._registry = RequestRegistry()
        self._rows = OutputRows(model.weights_version)
        self.lifecycle = Lifecycle(version=model.weights_version)
        self.on_lifecycle: Callable[[Lifecycle], None] = lambda _: None
        self._holds_while_asleep = holds_while_asleep
        self._held = Holding()  # accepted, but behind a pause, or not prepared
        self.wake: Callable[[], None] = lambda: None  # called from any thread when something is prepared
        self.counts = Counts()
        self._num_followers = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, client: int, request: Submit) -> None:
        """Takes a request in; one that cannot run is answered with a terminal ERROR for each choice, not raised."""
        try:
            if self._registry.get(client, request.request_id) is not None:
                raise Conflict(f"request id {request.request_id} is in use", param="request_id")
            check_lifecycle(self.lifecycle, self._holds_while_asleep)
            live = self._intake.admit(client, request, self._clock())
        except RequestError as error:
            self._rows.add_refusal(client, request.request_id, num_refusals(request), error.info())
            return
        self._registry.add(live)
        if (grammar := request.params.grammar) is not None:
            live.preparation = self.executor.prepare_grammar(grammar)
            live.preparation.add_done_callback(lambda _: self.wake())
        self._held.keep(live)
        for seq in live.sequences:
            if seq.group.leader is None:
                seq.group.leader = seq
                self._enqueue(seq)
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
        if reason not in QUIET_REASONS:
            error = Unavailable(f"the server ended this request: {reason}", code="aborted").info()
        ending = [seq for seq in request.sequences if seq.is_live and choice in (None, seq.choice)]
        self._end_all(ending, FinishReason.ABORT, error)
        return len(ending)

    def _enqueue(self, seq: Sequence) -> None:
        if seq.request not in self._held:
            self._scheduler.add(seq)

    # ----------------------------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything: choices are alive that may run, or rows wait to be taken."""
        has_some = len(self._registry) > len(self._held) or self._held.has_ready
        return bool(self._rows) or (self.lifecycle.is_serving and has_some)

    def expire(self) -> None:
        """Ends what is past its deadline, or has waited for too long."""
        for request, error in self._registry.pop_expired(self._clock()):
            self._end_all([seq for seq in request.sequences if seq.is_live], FinishReason.ERROR, error.info())

    def take_outputs(self) -> dict[int, StepOutputs]:
        """The rows that need no step: of aborts and refusals since the last one."""
        return self._rows.take()

    def step(self) -> dict[int, StepOutputs]:
        """Ends what is past its deadline, computes one step, and returns all rows since the last look, by client.

        An exception of the executor passes through; the engine is of no use after it.
        """
        self.expire()
        self._let_go()
        num_steps = self.counts.num_steps
        plan = self._scheduler.schedule(num_steps, self._clock()) if self.lifecycle.is_serving else None
        if plan is not None:
            self.counts.count_step(plan.num_batched_tokens)
            self._apply(self.executor.execute(plan))
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
            reason = seq.append(token_id)
            self._rows.add_token(seq, token_id, reason, now_s, logprobs.get(slot), prompt_logprobs.get(slot))
            self._num_generated_tokens += 1
            if reason is not None:
                self._close(seq, reason)
        for slot, embedding in result.embeddings.items():
            seq = by_slot[slot]
            self._rows.add_embedding(seq, embedding, now_s)
            self._close(seq, FinishReason.STOP)

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
            self._enqueue(follower)

    def _replace_leader(self, group: PromptGroup) -> None:
        """The leader ended before the prompt was computed: the next one takes over."""
        group.leader = None
        if group.followers:
            group.leader = group.followers.pop(0)
            self._num_followers -= 1
            self._enqueue(group.leader)

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
        elif seq.request not in self._held:
            self._scheduler.remove(seq, is_faulty=is_faulty)
        seq.move(SequenceState.FINISHED)
        seq.finish_reason = reason
        if group.leader is seq:
            self._replace_leader(group)
        request = seq.request
        request.num_live -= 1
        if request.num_live == 0:
            self._held.drop(request)
            self._registry.remove(request)
            request.sequences = []  # which have it: else all of it would wait for the garbage collector, in a step

    # ------------------------------------------------------------------------------------------ for control operations

    def change_lifecycle(self, **changes: Any) -> None:
        """New facts about weights and memory; tells all, and lets held requests go if they can run."""
        before, self.lifecycle = self.lifecycle, msgspec.structs.replace(self.lifecycle, **changes)
        if self.lifecycle.is_serving:
            self.release()
        else:
            self.hold()
        self._rows.version = self.lifecycle.version
        if self.lifecycle != before:
            self.on_lifecycle(self.lifecycle)

    def hold(self) -> None:
        """Requests that come from now on wait until `release`."""
        self._held.is_closed = True

    def release(self) -> None:
        """Held requests go on as if they had just come, if the engine can serve at all."""
        if not self.lifecycle.is_serving:
            return
        self._held.is_closed = False
        self._let_go()

    def _let_go(self) -> None:
        """Held requests that may run now enter the queue."""
        for request in self._held.ready():
            if (error := preparation_error(request)) is not None:
                self._end_all([seq for seq in request.sequences if seq.is_live], FinishReason.ERROR, error)
                continue
            self._held.drop(request)
            for seq in request.sequences:
                if seq.is_live and seq.group.leader is seq:
                    self._scheduler.add(seq)

    @property
    def num_active(self) -> int:
        """Live choices that are not held."""
        return sum(request.num_live for request in self._registry if request not in self._held)

    @property
    def num_live(self) -> int:
        """Live choices, held ones too."""
        return sum(request.num_live for request in self._registry)

    def active_names(self, most: int) -> list[str]:
        """Public ids of the first of them."""
        active = (request.submit.public_id for request in self._registry if request not in self._held)
        return list(itertools.islice(active, most))

    def abort_all(self, reason: str) -> int:
        """Ends every choice with what it has, held ones too; returns how many there were."""
        return sum(self._abort_request(request, reason) for request in list(self._registry))

    def fail_all(self, message: str, code: str) -> None:
        """Ends every choice with an error: it could not go on."""
        error = Unavailable(message, code=code).info()
        for request in list(self._registry):
            self._end_all([seq for seq in request.sequences if seq.is_live], FinishReason.ERROR, error)

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes; returns how many blocks they had. Sequences that run keep what they hold."""
        return self._kv.reset()

    def drop_kv(self) -> None:
        """The KV memory is about to go: whoever has computed something will compute it again."""
        self._scheduler.preempt_all()
        self._kv.reset()

    def adopt_weights(self, version: str, *, keep_kv: bool) -> None:
        """The executor has other weights. Prompts under way start again, and with `keep_kv` nobody else."""
        self._scheduler.preempt_all(prefills_only=keep_kv)
        self._kv.set_weights_epoch(self._kv.weights_epoch + 1)
        self.change_lifecycle(version=version, epoch=self._kv.weights_epoch)

    # ----------------------------------------------------------------------------------------------------------- status

    def stats(self) -> EngineStats:
        queries, hits = self._scheduler.prefix_counts
        counts = self.counts
        return EngineStats(
            step=counts.num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_queued + self._num_followers + len(self._held),
            num_queued_tokens=self._scheduler.num_queued_tokens,
            num_free_blocks=self._kv.num_free,
            num_blocks=self._kv.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_queries=queries,
            prefix_hits=hits,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_step_tokens=counts.num_step_tokens,
            steps_by_tokens=tuple(counts.steps_by_tokens),
            refreshes=tuple(counts.refreshes),
            refresh_us=tuple(counts.refresh_us),
        )

    def check_invariants(self) -> None:
        """Asserts what must hold between two steps; costs a look at every block and sequence."""
        self._registry.check_invariants()
        self._scheduler.check_invariants()
        live = [seq for request in self._registry for seq in request.sequences if seq.is_live]
        followers = [seq for seq in live if seq in seq.group.followers]
        assert len(followers) == self._num_followers
        num_held = sum(seq.is_live and seq not in followers for request in self._held for seq in request.sequences)
        assert len(live) == len(self._scheduler.running) + self._scheduler.num_queued + len(followers) + num_held
        for seq in live:
            group = seq.group
            assert seq.finish_reason is None
            if group.is_computed:
                assert group.leader is None
                assert not group.followers
            else:
                assert group.leader is not None
                assert group.leader.is_live, "followers wait for a leader that has ended"
