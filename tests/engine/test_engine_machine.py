"""A Hypothesis state machine drives the engine at random and proves the first promise: every choice of every request
ends exactly once, every block is given back exactly once, and nobody's output depends on who ran beside it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.testing.harness import EngineHarness
from headrace.testing.strict import expected_output
from headrace.types import FinishReason

VOCAB = 24
FAIL_TOKEN = 23
EOS = 0

prompts = st.lists(st.integers(1, 2), min_size=1, max_size=22)  # two letters: prefixes collide often


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness: EngineHarness
        self.accepted: dict[tuple[int, int, int], dict[str, Any]] = {}  # live or ended choices that must end once
        self.gone: set[tuple[int, int, int]] = set()  # their client left: nobody is told
        self.next_id = 0
        self.num_conflicts = 0

    @initialize(
        num_blocks=st.integers(8, 14),
        block_size=st.sampled_from([2, 3, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 8, 40]),
        prefix_caching=st.booleans(),
    )
    def build(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, prefix_caching: bool) -> None:
        self.harness = EngineHarness(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            prefix_caching=prefix_caching,
            vocab_size=VOCAB,
            fail_token_id=FAIL_TOKEN,
        )

    @rule(
        client=st.integers(0, 1),
        texts=st.lists(prompts, min_size=1, max_size=2),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (5,), (5, 9)]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.integers(-1, 2),
        timeout_s=st.sampled_from([None, None, None, 0.5, 5.0]),
        cache_salt=st.sampled_from([None, None, "a"]),
    )
    def submit(self, client: int, texts: list[list[int]], n: int, priority: int, timeout_s: Any, **fields: Any) -> None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        salt = fields.pop("cache_salt")
        self.harness.submit(
            *texts,
            client=client,
            request_id=request_id,
            aliases=(f"alias-{request_id % 3}",),
            n=n,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=salt,
            **fields,
        )
        for choice in range(len(texts) * n):
            self.accepted[client, request_id, choice] = {"prompt": texts[choice // n], **fields}

    @rule(letter=st.integers(1, 2), lengths=st.lists(st.integers(1, 8), min_size=3, max_size=4))
    def submit_burst(self, letter: int, lengths: list[int]) -> None:
        """Short prompts with long outputs: they are all admitted and then outgrow the memory together."""
        for length in lengths:
            self.submit(
                0, [[letter] * length], 1, 0, None, cache_salt=None, max_tokens=20, min_tokens=0,
                ignore_eos=True, stop_token_ids=(), prompt_logprobs=None,
            )  # fmt: skip

    @rule(client=st.integers(0, 1), bad=st.sampled_from(["empty", "vocabulary", "length", "n", "none"]))
    def submit_bad(self, client: int, bad: str) -> None:
        request_id, self.next_id = self.next_id, self.next_id + 1
        texts = {"empty": [[]], "vocabulary": [[1], [VOCAB]], "length": [[1] * 60], "n": [[1]], "none": []}[bad]
        self.harness.submit(*texts, client=client, request_id=request_id, n=0 if bad == "n" else 2)
        for choice in range(max(1, len(texts) * (1 if bad == "n" else 2))):
            self.accepted[client, request_id, choice] = {"bad": True}

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def submit_duplicate(self, data: st.DataObject) -> None:
        client, request_id, _ = data.draw(st.sampled_from(self.open()))
        self.harness.submit([1, 2], client=client, request_id=request_id, n=2)
        self.num_conflicts += 2

    @rule()
    def step(self) -> None:
        self.harness.step()

    @rule(times=st.integers(2, 12))
    def steps(self, times: int) -> None:
        self.harness.step(times)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), reason=st.sampled_from(["client", "operator"]), one=st.booleans())
    def abort_by_id(self, data: st.DataObject, reason: str, one: bool) -> None:
        client, request_id, choice = data.draw(st.sampled_from(list(self.accepted)))
        expected = sum(key[:2] == (client, request_id) and (not one or key[2] == choice) for key in self.open())
        fields = {"choice": choice} if one else {}
        assert self.harness.abort(request_id, client=client, reason=reason, **fields) == expected
        assert self.harness.abort(request_id, client=client, reason=reason, **fields) == 0

    @rule(name=st.sampled_from(["alias-0", "alias-1", "public-0-1", "nobody"]))
    def abort_by_name(self, name: str) -> None:
        self.harness.abort(names=(name,))
        assert self.harness.abort(names=(name,)) == 0

    @rule()
    def abort_all(self) -> None:
        num_open = len(self.open())
        assert self.harness.abort() == num_open
        assert self.harness.core.stats().num_free_blocks == self.harness.core.stats().num_blocks

    @rule(client=st.integers(0, 1))
    def client_leaves(self, client: int) -> None:
        self.harness.record(self.harness.core.take_outputs())
        leaving = [key for key in self.open() if key[0] == client]
        assert self.harness.core.abort_client(client) == len(leaving)
        self.harness.core.check_invariants()
        self.gone.update(leaving)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.core.reset_prefix_cache()
        self.harness.core.check_invariants()

    def open(self) -> list[tuple[int, int, int]]:
        """Choices that are alive, once the rows that wait are looked at."""
        self.harness.record(self.harness.core.take_outputs())
        told = self.harness
        return [
            (client, request_id, choice)
            for client, request_id, choice in self.accepted
            if (client, request_id, choice) not in self.gone and told.choice(request_id, choice, client).finish is None
        ]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        self.harness.assert_idle()
        assert self.harness.num_conflicts == self.num_conflicts
        for (client, request_id, choice), asked in self.accepted.items():
            record = self.harness.choice(request_id, choice, client)
            if (client, request_id, choice) in self.gone:
                assert record.finish is None
            elif "bad" in asked:
                assert (record.finish, record.error_status) == (FinishReason.ERROR, 400)
            else:
                self.check_output(record, asked)
        assert set(self.harness.records) <= set(self.accepted)

    def check_output(self, record: Any, asked: dict[str, Any]) -> None:
        prompt, max_tokens = asked["prompt"], asked["max_tokens"]
        info = self.harness.core.info
        limit = min(info.max_model_len, info.max_kv_tokens)
        if record.finish is FinishReason.ERROR and record.error_status == 400:
            assert len(prompt) + asked["min_tokens"] >= limit or record.error_code == "context_length_exceeded"
            return
        stops = frozenset(asked["stop_token_ids"]) | (frozenset() if asked["ignore_eos"] else {EOS})
        room = min(max_tokens, limit - len(prompt))
        expected = expected_output(prompt, room, stops, VOCAB, asked["min_tokens"])
        if FAIL_TOKEN in expected:
            expected = expected[: expected.index(FAIL_TOKEN)]
            complete = (FinishReason.ERROR,)
        else:
            complete = (FinishReason.STOP, FinishReason.LENGTH)
        assert record.finish is not None
        assert record.token_ids == expected[: len(record.token_ids)]
        if record.finish in (FinishReason.STOP, FinishReason.LENGTH) or record.error_status == 500:
            assert record.finish in complete
            assert record.token_ids == expected
        if record.finish is FinishReason.STOP:
            assert record.stop_token_id == record.token_ids[-1]
        if record.finish is FinishReason.ABORT and record.error_code is not None:
            assert (record.error_code, record.error_status) == ("aborted", 503)
        if asked["prompt_logprobs"] is not None:
            assert record.scored_ids == prompt[1 : 1 + len(record.scored_ids)]
            assert not record.token_ids or record.scored_ids == prompt[1:]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
