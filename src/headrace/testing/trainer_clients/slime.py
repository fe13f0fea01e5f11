"""slime: SGLang's dialect; pauses, flushes, sends buckets that never flush, and continues."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.testing.trainer_clients.base import Trainer, lists
from headrace.weights.incoming.raw import Manifest

FLUSH_TRIES = 60


class Slime(Trainer):
    version = 0

    def connect(self, port: int, group_name: str) -> None:
        self.http.post("/destroy_weights_update_group", json={"group_name": group_name})  # may fail
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        self.post("/init_weights_update_group", {**body, "group_name": group_name, "backend": "gloo"})

    def update(self, buckets: Sequence[Manifest], group_name: str) -> None:
        self.version += 1
        self.post("/pause_generation", {})
        self.flush()
        for bucket in buckets:
            body = {"group_name": group_name, "flush_cache": False, "weight_version": str(self.version)}
            reply = self.post("/update_weights_from_distributed", {**lists(bucket), **body})
            assert reply["success"], reply
        self.post("/continue_generation", {})

    def flush(self) -> None:
        for _ in range(FLUSH_TRIES):
            if self.http.get("/flush_cache").status_code == 200:
                return
            time.sleep(1.0)
        raise TimeoutError("the cache is not flushed")

    def abort_until_idle(self) -> None:
        """Before it pauses for training: rollouts that are no longer wanted end."""
        until = time.monotonic() + FLUSH_TRIES
        while self.get("/v1/loads?include=core")["loads"][0]["num_reqs"]:
            assert time.monotonic() < until
            self.post("/abort_request", {"abort_all": True})
            time.sleep(0.05)

    def from_disk(self, path: str) -> None:
        self.version += 1
        self.post("/pause_generation", {})
        self.flush()
        self.post("/update_weights_from_disk", {"model_path": path, "weight_version": str(self.version)})
        self.post("/continue_generation", {})
