"""A small real RL trainer: rollouts from a running server, a policy gradient in torch, new weights back to the server.

    python -m headrace.testing.trainer --url http://127.0.0.1:8000 --model FOLDER --rounds 30 --source shared_memory

`policy.py` is the model and its gradient, `rollouts.py` the server as a trainer sees it, `senders.py` the ways in which
weights travel, `loop.py` a round of all three. torch and transformers are loaded when a policy is made.
"""

from headrace.testing.trainer.loop import Round, Task, Trainer
from headrace.testing.trainer.policy import Policy
from headrace.testing.trainer.rollouts import Server
from headrace.testing.trainer.senders import SOURCES, create_sender

__all__ = ["SOURCES", "Policy", "Round", "Server", "Task", "Trainer", "create_sender"]
