"""Who runs in the next step. `base.py` is the interface, `continuous.py` the policy, `queue.py` the waiting line."""

from headrace.config.options import SchedulerConfig
from headrace.engine.scheduler.base import Scheduler
from headrace.engine.scheduler.continuous import ContinuousScheduler
from headrace.kv.manager import KVManager

__all__ = ["Scheduler", "create_scheduler"]


def create_scheduler(config: SchedulerConfig, kv: KVManager, max_num_seqs: int) -> Scheduler:
    return ContinuousScheduler(config, kv, max_num_seqs)
