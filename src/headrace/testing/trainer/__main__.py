"""`python -m headrace.testing.trainer`: trains against a running server and prints a line per round."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from headrace.testing.trainer.loop import Task, Trainer
from headrace.testing.trainer.policy import Policy
from headrace.testing.trainer.rollouts import Server
from headrace.testing.trainer.senders import SOURCES, create_sender


def main() -> None:
    arguments = _parser().parse_args()
    first, last = map(int, arguments.wanted.split("-"))
    wanted = frozenset(range(first, last + 1))
    task = Task(wanted=wanted, n=arguments.n, num_tokens=arguments.tokens, seed=arguments.seed, dtype=arguments.dtype)
    policy = Policy(arguments.model, learning_rate=arguments.learning_rate, trained=arguments.trained)
    present = policy.weights(task.dtype)
    with (
        closing(Server(arguments.url)) as server,
        closing(create_sender(arguments.source, server, arguments.model, present)) as sender,
    ):
        for result in Trainer(policy, server, sender, task).run(arguments.rounds):
            print(result, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.testing.trainer", description=__doc__)
    parser.add_argument("--url", required=True, help="of a server that has just started with --model")
    parser.add_argument("--model", required=True, type=Path, help="folder or GGUF file of a Llama")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--source", choices=SOURCES, default="shared_memory", help="how weights travel")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="in which they travel")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--trained", default="", metavar="PART", help="train only tensors with this in their names")
    parser.add_argument("--wanted", default="97-122", metavar="FIRST-LAST", help="token ids that are rewarded")
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--tokens", type=int, default=16, help="per sample")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
