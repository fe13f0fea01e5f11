"""Rounds of training: sample, reward, step, refresh.

The toy reward is the share of a sample's tokens that are wanted, so its mean rises if and only if the weights that
sample are the ones that learn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.testing.trainer.policy import Policy
from headrace.testing.trainer.rollouts import Sample, Server
from headrace.testing.trainer.senders import Sender

PROMPTS = (b"the mill turns", b"water rises in", b"stones are cut", b"a wheel of oak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is sampled and what is wanted of it."""

    prompts: tuple[tuple[int, ...], ...] = tuple(tuple(prompt) for prompt in PROMPTS)
    wanted: frozenset[int] = frozenset(range(ord("a"), ord("z") + 1))
    n: int = 8
    num_tokens: int = 16
    seed: int = 1
    dtype: str = "float32"  # in which weights are sent

    def reward(self, sample: Sample) -> float:
        return sum(token_id in self.wanted for token_id in sample.token_ids) / len(sample.token_ids)


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    reward: float  # mean over all samples
    refresh_s: float
    version: str | None  # of the weights that sampled
    drift: float  # the largest difference between the server's log probabilities and the policy's

    def __str__(self) -> str:
        return (
            f"round {self.number:3d}  reward {self.reward:.4f}  refresh {self.refresh_s:.3f} s"
            f"  version {self.version}  drift {self.drift:.5f}"
        )


class Trainer:
    """A policy, the server that samples for it, and the way from one to the other."""

    def __init__(self, policy: Policy, server: Server, sender: Sender, task: Task | None = None) -> None:
        self.policy = policy
        self.server = server
        self.sender = sender
        self.task = task or Task()
        self._number = 0

    def run(self, num_rounds: int) -> Iterator[Round]:
        for _ in range(num_rounds):
            yield self.run_round()

    def run_round(self) -> Round:
        """Afterwards the server has the policy's weights, as version `round-N`."""
        task = self.task
        self._number += 1
        seed = task.seed + self._number * len(task.prompts) * task.n  # a sample's seed is this and its place
        groups, version = self.server.sample(task.prompts, n=task.n, num_tokens=task.num_tokens, seed=seed)
        rewards = [[task.reward(sample) for sample in group.samples] for group in groups]
        drift = self.policy.step(groups, rewards)
        start = time.perf_counter()
        self.sender.send(self.policy.weights(task.dtype), f"round-{self._number}")
        refresh_s = time.perf_counter() - start
        mean = sum(map(sum, rewards)) / sum(map(len, rewards))
        return Round(self._number, mean, refresh_s, version, drift)
