"""A harness for control operations beside requests: slow work without threads, and what each choice may generate."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

from headrace.errors import RequestError
from headrace.testing.harness import EngineHarness, Key
from headrace.testing.strict import next_state
from headrace.transport.messages import Lifecycle, StepOutputs


class SlowWork:
    """`Background` without a thread: it works when rules let it, and goes on by itself when it is left."""

    is_slow: ClassVar[bool] = False
    is_done_when_left: ClassVar[bool] = False
    orphans: ClassVar[list[SlowWork]] = []

    def __init__(self, work: Callable[[], Any], on_done: Callable[[], None]) -> None:
        self._work = work
        self._result: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Generator[None, None, Any]:
        try:
            while SlowWork.is_slow:
                yield
        except Exception:  # thrown in by the control plane; an abandoned generator is nobody's business
            if SlowWork.is_done_when_left:
                self.run()
            else:
                self.orphans.append(self)
            raise
        self.run()
        if self.error is not None:
            raise self.error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._work()
        except RequestError as error:
            self.error = error


class ControlHarness(EngineHarness):
    """Follows what each choice may generate.

    The KV of a choice is what some weights have made of its tokens. A refresh that recomputes makes it anew; one that
    keeps leaves it to those that decode, and whoever loses its memory computes it anew at any time. `_possible` holds
    the states in which it may be; every token narrows them down.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts: dict[Key, list[int]] = {}
        self.versions = [self.core.lifecycle.version]  # in the order in which they came
        self._possible: dict[Key, set[int]] = {}
        adopt = self.core.adopt_weights

        def adopt_weights(version: str, *, keep_kv: bool) -> None:
            adopt(version, keep_kv=keep_kv)
            if not keep_kv:
                self._possible.clear()

        self.core.adopt_weights = adopt_weights  # type: ignore[method-assign]
        self.core.on_lifecycle = self._hear

    def _hear(self, lifecycle: Lifecycle) -> None:
        self.lifecycles.append(lifecycle)
        if lifecycle.version != self.versions[-1]:
            self.versions.append(lifecycle.version)

    def step(self, times: int = 1) -> dict[int, StepOutputs]:
        assert times == 1
        num_plans, may_compute = len(self.executor.plans), self.core.lifecycle.is_serving
        outputs = super().step()
        assert may_compute or len(self.executor.plans) == num_plans, "a step while nothing may be computed"
        for client, rows in outputs.items():
            keys = zip(rows.request_ids, rows.choices, rows.num_tokens, strict=True)
            for key in [(client, request, choice) for request, choice, num_tokens in keys if num_tokens]:
                self._check_last_token(key)
        return outputs

    def _check_last_token(self, key: Key) -> None:
        tokens, epoch = [*self.prompts[key], *self.records[key].token_ids], self.executor.epoch
        anew = 0
        for token_id in tokens[:-1]:
            anew = next_state(anew, token_id, epoch)
        states = {anew} | {next_state(state, tokens[-2], epoch) for state in self._possible.get(key, ())}
        self._possible[key] = {state for state in states if state % self.core.info.vocab_size == tokens[-1]}
        assert self._possible[key], f"{key}: token {tokens[-1]} is none that weights {epoch} give"
