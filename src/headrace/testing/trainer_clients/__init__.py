"""What RL trainers do over HTTP when their weights have changed: one small class each, in the trainers' order of calls.

Written from the trainers' contracts, not from the server's code, so that tests can hold one against the other. They
carry no tensors: a sender broadcasts beside them, a folder is on disk, and pickles are made by the test.
"""

from headrace.testing.trainer_clients.areal import Areal, ArealVllm
from headrace.testing.trainer_clients.base import Trainer
from headrace.testing.trainer_clients.checkpoint_engine import CheckpointEngine
from headrace.testing.trainer_clients.fastdeploy import FastDeploy
from headrace.testing.trainer_clients.lmdeploy import LmDeploy
from headrace.testing.trainer_clients.openrlhf import OpenRlhf
from headrace.testing.trainer_clients.slime import Slime
from headrace.testing.trainer_clients.trl import TrlAsync
from headrace.testing.trainer_clients.verl import Verl

__all__ = [
    "Areal",
    "ArealVllm",
    "CheckpointEngine",
    "FastDeploy",
    "LmDeploy",
    "OpenRlhf",
    "Slime",
    "Trainer",
    "TrlAsync",
    "Verl",
]
