"""AReaL: SGLang's dialect with ports as strings and aborts everywhere, and its own routes on vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.testing.trainer_clients.base import Trainer, lists
from headrace.weights.incoming.raw import Manifest


class Areal(Trainer):
    """On SGLang. It never says flush_cache."""

    prefix = ""

    def connect(self, port: int, group_name: str) -> None:
        body = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
        reply = self.post(
            f"/{self.prefix}init_weights_update_group", {**body, "group_name": group_name, "backend": "gloo"}
        )
        assert reply["success"], reply

    def pause(self) -> None:
        self.post(f"/{self.prefix}pause_generation", {})

    def resume(self) -> None:
        self.post(f"/{self.prefix}continue_generation", {})

    def update(self, buckets: Sequence[Manifest], group_name: str) -> None:
        self.pause()
        for bucket in buckets:
            self.send(bucket, group_name)
        self.resume()

    def send(self, bucket: Manifest, group_name: str) -> None:
        body = {**lists(bucket), "group_name": group_name, "abort_all_requests": True}
        reply = self.post("/update_weights_from_distributed", body)
        assert reply["success"], reply

    def from_disk(self, path: str) -> None:
        self.pause()
        self.post("/update_weights_from_disk", {"model_path": path, "abort_all_requests": True})
        self.resume()


class ArealVllm(Areal):
    """On vLLM."""

    prefix = "areal_"

    def send(self, bucket: Manifest, group_name: str) -> None:
        for path, body in (
            ("/areal_set_update_weight_meta", {**lists(bucket), "group_name": group_name}),
            ("/areal_update_weights_xccl", {}),
        ):
            reply = self.post(path, body)
            assert reply["success"], reply

    def from_disk(self, path: str) -> None:
        self.pause()
        self.post("/areal_update_weights", {"model_path": path})
        self.resume()
