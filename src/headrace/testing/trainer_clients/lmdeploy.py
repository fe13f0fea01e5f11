"""LMDeploy's flow, as XTuner uses it: sleep, wake the weights, pickles of which the last says finished, wake the KV."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.testing.trainer_clients.base import Trainer


class LmDeploy(Trainer):
    def update(self, pickles: Sequence[str]) -> None:
        self.post("/sleep?tags=weights&tags=kv_cache&level=2")
        self.post("/wakeup?tags=weights")
        for index, pickled in enumerate(pickles):
            finished = index == len(pickles) - 1
            body = {"serialized_named_tensors": pickled, "load_format": None, "finished": finished}
            assert self.post("/update_weights", body) is None
        self.post("/wakeup?tags=kv_cache")
