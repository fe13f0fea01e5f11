"""A Hypothesis state machine drives the control operations at random beside requests, on an executor that checks every
plan. It proves that each choice ends once, that no step meets weights or memory which are not there, that tokens are
what the weights of their time give, and that no operation and no request is left behind for ever.

Slow work runs when a rule says so, in no thread: what fails fails again when it is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.config.options import ControlConfig
from headrace.testing.control_harness import ControlHarness, SlowWork
from headrace.testing.harness import Key
from headrace.testing.tiny import write_safetensors, write_tiny_model
from headrace.transport.messages import ControlDone
from headrace.types import FinishReason
from headrace.weights.tensor import CheckpointTensor

VOCAB = 24
ANSWERED_AT_ONCE = ("resume", "set_version", "abort_refresh", "reset_prefix_cache")

modes = st.sampled_from(["keep", "keep", "wait", "abort"])
tags = st.sampled_from([None, ["weights"], ["kv_cache"]])
timeouts = st.sampled_from([None, None, 2.0])
sources = st.sampled_from(["folder", "folder", "a", "b", "nan", "none"])
kv_modes = st.sampled_from(["recompute", "keep"])
stagings = st.sampled_from(["always", "never", "never", "auto"])


class ControlMachine(RuleBasedStateMachine):
    """Operations of a trainer, well and badly ordered, and requests that they meet."""

    files: ClassVar[dict[str, dict[str, Any]]]  # sources by their names
    folder: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        SlowWork.is_slow = SlowWork.is_done_when_left = False
        SlowWork.orphans.clear()
        self.harness: ControlHarness
        self.calls: dict[int, tuple[str, dict[str, Any]]] = {}  # not answered yet
        self.behind: set[Key] = set()  # accepted while a pause waits for those before them
        self.num_before: int | None = None
        self.next_id = 0

    @initialize(
        num_blocks=st.integers(10, 16),
        max_num_seqs=st.integers(1, 4),
        budget=st.sampled_from([4, 40]),
        holds=st.booleans(),
        has_path=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def build(self, budget: int, holds: bool, has_path: bool, **options: Any) -> None:
        self.harness = ControlHarness(
            block_size=3,
            max_num_batched_tokens=budget,
            max_model_len=30,
            control=ControlConfig(refresh_timeout=8.0),
            weights_path=self.folder if has_path else None,
            holds_while_asleep=holds,
            vocab_size=VOCAB,
            **options,
        )

    # -------------------------------------------------------------------------------------------------------- requests

    @rule(
        client=st.integers(0, 1),
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 14),
        timeout_s=st.sampled_from([None, None, None, 1.0, 5.0]),
    )
    def submit(self, client: int, prompt: list[int], n: int, **fields: Any) -> None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        keys = [(client, request_id, choice) for choice in range(n)]
        self.harness.prompts |= dict.fromkeys(keys, prompt)
        if self.is_waiting:
            self.behind.update(keys)
        self.harness.submit(prompt, client=client, request_id=request_id, n=n, **fields)

    @precondition(lambda self: self.harness.core.lifecycle.is_serving)
    @rule(
        letter=st.integers(1, 2), lengths=st.lists(st.integers(1, 14), min_size=2, max_size=3), times=st.integers(0, 4)
    )
    def start_some(self, letter: int, lengths: list[int], times: int) -> None:
        """So that operations meet prompts in the middle, and decodes, and a queue."""
        for length in lengths:
            self.submit(0, [letter] * length, 1, max_tokens=12)
        self.turns(times)

    @rule(times=st.sampled_from([1, 1, 3, 10]))
    def turns(self, times: int) -> None:
        for _ in range(times):
            self.harness.turn()
            self.look_at_answers()

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)
        self.harness.turn()

    @precondition(lambda self: self.open())
    @rule(data=st.data(), one=st.booleans())
    def abort(self, data: st.DataObject, one: bool) -> None:
        client, request_id, choice = data.draw(st.sampled_from(self.open()))
        assert self.harness.abort(request_id, client=client, choice=choice if one else None) >= 1

    @rule()
    def abort_all(self) -> None:
        num_open = len(self.open())
        assert self.harness.abort(reason="control") == num_open
        assert not self.open()

    # ------------------------------------------------------------------------------------------------------ operations

    @rule(mode=modes, clear_cache=st.booleans(), timeout_s=timeouts)
    def pause(self, **arguments: Any) -> None:
        self.start("pause", **arguments)

    @rule(tags=tags, mode=modes, timeout_s=timeouts)
    def sleep(self, **arguments: Any) -> None:
        self.start("sleep", **arguments)

    @rule(tags=tags)
    def wake(self, **arguments: Any) -> None:
        self.start("wake", **arguments)

    @rule(staged=stagings, delta=st.sampled_from([False, False, True]), mode=modes, silence_s=timeouts)
    def begin_refresh(self, **arguments: Any) -> None:
        self.start("begin_refresh", **arguments)

    @property
    def num_staged(self) -> int | None:
        refresh = self.harness.state.refresh
        return None if refresh is None else refresh.stage.num_tensors

    @rule(source=sources, timeout_s=timeouts)
    def apply_refresh(self, source: str, **arguments: Any) -> None:
        self.num_before = self.num_staged
        self.start("apply_refresh", source=self.files[source], **arguments)

    @rule(mode=modes, kv=kv_modes, timeout_s=timeouts, is_named=st.booleans())
    def commit_refresh(self, is_named: bool, **arguments: Any) -> None:
        self.start("commit_refresh", version=self.new_version() if is_named else None, **arguments)

    @rule(source=sources, staged=stagings, mode=modes, kv=kv_modes, timeout_s=timeouts)
    def refresh_weights(self, source: str, **arguments: Any) -> None:
        self.start("refresh_weights", source=self.files[source], version=self.new_version(), **arguments)

    @precondition(lambda self: self.harness.core.lifecycle.is_serving)
    @rule(lengths=st.lists(st.integers(4, 14), min_size=2, max_size=3), times=st.integers(1, 5), kv=kv_modes)
    def refresh_in_the_middle(self, lengths: list[int], times: int, kv: str) -> None:
        """Of prompts, decodes and a queue: the likeliest way to KV of other weights."""
        self.start_some(1, lengths, times)
        self.refresh_weights("folder", staged="always", mode="keep", kv=kv, timeout_s=None)
        self.turns(3)

    @precondition(lambda self: self.harness.core.lifecycle.is_serving)
    @rule(cancels=st.booleans())
    def wait_for_some(self, cancels: bool) -> None:
        """Others come meanwhile, and must neither run nor be forgotten."""
        self.start_some(2, [3, 5], 1)
        self.pause(mode="wait", clear_cache=False, timeout_s=None)
        self.submit(1, [2], 1, max_tokens=3)
        self.turns(2)
        if cancels and self.harness.plane.is_busy:
            self.cancel()

    @precondition(lambda self: self.harness.core.lifecycle.is_serving and not self.harness.plane.is_busy)
    @rule(tags=tags)
    def sleep_in_the_middle(self, tags: list[str] | None) -> None:
        self.start_some(1, [4, 6], 2)
        self.sleep(tags=tags, mode="keep", timeout_s=None)
        if not self.harness.core.lifecycle.is_serving:  # else a refresh is open
            self.make_ready()
        self.turns(3)

    @rule()
    def set_version(self) -> None:
        self.start("set_version", version=self.new_version())

    @rule(operation=st.sampled_from(["resume", "abort_refresh", "reset_prefix_cache", "checksum"]))
    def without_arguments(self, operation: str) -> None:
        self.start(operation)

    @precondition(lambda self: not (self.harness.plane.is_busy or self.harness.core.lifecycle.is_serving))
    @rule()
    def make_ready(self) -> None:
        """What makes any engine serve, whatever has become of it."""
        SlowWork.is_slow = False
        self.harness.control("abort_refresh")
        self.harness.control("wake")
        if self.harness.core.lifecycle.state == "poisoned":
            self.harness.control("refresh_weights", source=self.files["folder"])
        self.harness.control("resume")
        assert self.harness.core.lifecycle.is_serving

    @precondition(lambda self: self.harness.plane.is_busy)
    @rule()
    def cancel(self) -> None:
        assert self.harness.start("cancel") in self.harness.answers
        assert not self.harness.plane.is_busy, "a cancelled operation goes on"
        self.look_at_answers()

    @rule(is_slow=st.booleans())
    def set_pace(self, is_slow: bool) -> None:
        SlowWork.is_slow = is_slow

    @rule(is_done=st.booleans())
    def set_ends(self, is_done: bool) -> None:
        SlowWork.is_done_when_left = is_done

    @precondition(lambda self: SlowWork.orphans)
    @rule()
    def finish_orphans(self) -> None:
        """Threads of operations that have ended come to their ends; what is open now must not be theirs."""
        before = self.num_staged
        while SlowWork.orphans:
            SlowWork.orphans.pop().run()
        assert self.num_staged == before, "a stage is written to by an ended operation"

    def start(self, operation: str, **arguments: Any) -> None:
        was_busy = self.harness.plane.is_busy
        call = self.harness.start(operation, **arguments)
        self.calls[call] = operation, arguments
        self.look_at_answers()
        if was_busy:
            error = self.harness.answers[call].error
            assert error is not None
            assert error.code == "operation_running"
        assert was_busy or operation not in ANSWERED_AT_ONCE or call in self.harness.answers

    def new_version(self) -> str:
        self.next_id += 1
        return f"v{self.next_id}"

    @property
    def is_waiting(self) -> bool:
        """Whether a pause waits for requests to end."""
        return any(
            (operation, arguments.get("mode")) == ("pause", "wait") for operation, arguments in self.calls.values()
        )

    # ---------------------------------------------------------------------------------------------------------- checks

    def open(self) -> list[Key]:
        """Choices that are alive, once the rows that wait are looked at."""
        harness = self.harness
        harness.record(harness.core.take_outputs())
        return [key for key in harness.prompts if harness.choice(key[1], key[2], key[0]).finish is None]

    @invariant()
    def engine_is_sound(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness, lifecycle = self.harness, self.harness.core.lifecycle
        harness.core.check_invariants()
        self.look_at_answers()
        assert (harness.executor._weights is not None) == harness.state.has_weights
        assert harness.executor.has_kv == ("kv_cache" not in lifecycle.asleep)
        assert lifecycle.state != "ready" or not lifecycle.asleep
        assert lifecycle.state != "asleep" or lifecycle.asleep
        assert (lifecycle.state == "poisoned") == (lifecycle.reason is not None)
        refresh = harness.state.refresh
        assert (lifecycle.state == "updating") == (refresh is not None and not refresh.is_staged)
        assert lifecycle.state != "poisoned" or not self.open(), "requests wait for weights that nobody brings"
        assert not any(harness.choice(key[1], key[2], key[0]).token_ids for key in self.behind), "not held"
        if not harness.plane.is_busy and lifecycle.is_serving:
            assert harness.core.num_active == len(self.open()), "a request is held although everything is ready"

    @invariant()
    def versions_come_in_order(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        epochs = [it.epoch for it in harness.lifecycles]
        assert epochs == sorted(epochs)
        for key, record in harness.records.items():
            told = [harness.versions.index(it.weights_version) for it in record.details if it.weights_version]
            assert told == sorted(set(told)), f"{key} was told of versions {told}"
            assert bool(told) == bool(record.token_ids)

    def look_at_answers(self) -> None:
        for call in [call for call in self.calls if call in self.harness.answers]:
            operation, arguments = self.calls.pop(call)
            self.check_answer(operation, arguments, self.harness.answers[call])
            if (operation, arguments.get("mode")) == ("pause", "wait") and not self.is_waiting:
                self.behind.clear()
        assert len(self.calls) == self.harness.plane.is_busy

    def check_answer(self, operation: str, arguments: dict[str, Any], done: ControlDone) -> None:
        """Where it may not have been followed by another, what an operation says has happened has happened."""
        if done.error is not None:
            assert done.error.status in (400, 404, 409, 504), done.error
            if operation == "apply_refresh" and done.error.code != "operation_running":
                assert self.num_staged in (None, self.num_before), "tensors of a call that has failed"
            return
        assert done.result is not None
        assert done.result["state"] == "succeeded"
        state, lifecycle, asked = self.harness.state, self.harness.core.lifecycle, arguments.get("tags")
        match operation:
            case "pause":
                assert lifecycle.pause_mode == arguments["mode"]
            case "resume":
                assert not lifecycle.is_paused
            case "sleep":
                assert set(asked or ("weights", "kv_cache")) <= set(lifecycle.asleep)
            case "wake":
                assert not set(asked or ("weights", "kv_cache")) & set(lifecycle.asleep)
            case "begin_refresh" | "apply_refresh":
                assert state.refresh is not None, "an open refresh went while it was used"
            case "commit_refresh" | "refresh_weights":
                assert state.refresh is None
                assert lifecycle.version == (arguments["version"] or str(lifecycle.epoch))
                assert lifecycle.epoch == done.result["result"][0]["epoch"]

    def teardown(self) -> None:
        """Everything that runs ends by itself, then a whole refresh and a resume make any engine serve."""
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        SlowWork.is_slow = False
        for _ in range(1000 + 50 * len(harness.prompts)):  # one after the other, where one at a time may run
            if not harness.plane.is_busy:
                break
            harness.turn()
        assert not harness.plane.is_busy, "an operation waits for what cannot come"
        self.look_at_answers()
        self.make_ready()
        harness.run()
        harness.assert_idle()
        assert not self.open(), "a choice never ended"
        assert set(harness.records) == set(harness.prompts)
        for key, record in harness.records.items():
            if record.finish is FinishReason.ERROR:
                assert record.error_code in ("deadline_exceeded", "asleep", "weights_poisoned")
            else:
                assert record.error_code is None, key


@pytest.fixture(scope="module", autouse=True)
def no_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.engine.control.state.Background", SlowWork)
        yield


@pytest.fixture(scope="module", autouse=True)
def weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sources of weights: two that complement each other, a folder, one with NaN, one that is not there."""
    root = tmp_path_factory.mktemp("weights")
    ControlMachine.folder = write_tiny_model(root / "folder", num_layers=1)
    ControlMachine.files = {
        "folder": {"kind": "path", "path": str(ControlMachine.folder)},
        "none": {"kind": "path", "path": str(root / "none")},
    }
    for name, value in (("a", 1.0), ("b", 2.0), ("nan", np.nan)):
        file = root / f"{name}.safetensors"
        write_safetensors(file, [CheckpointTensor.from_floats(name, np.full((2,), value, np.float32))])
        ControlMachine.files[name] = {"kind": "file", "file": str(file), "format": "safetensors"}


TestControlMachine = ControlMachine.TestCase
TestControlMachine.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
