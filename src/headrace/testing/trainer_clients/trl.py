"""TRL's asynchronous trainer: vLLM's dialect. Of the calls of an update it looks at no status; here a test does."""

from __future__ import annotations

from headrace.testing.trainer_clients.base import Trainer, lists
from headrace.weights.incoming.raw import Manifest


class TrlAsync(Trainer):
    def connect(self, port: int) -> None:
        assert self.http.get("/health").status_code == 200
        world_size = self.get("/get_world_size")["world_size"] + 1
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
        self.post("/init_weight_transfer_engine", {"init_info": info})

    def max_model_len(self) -> int:
        return int(self.get("/v1/models")["data"][0]["max_model_len"])

    def update(self, manifest: Manifest, *, packed: bool = True) -> list[int]:
        """The status of each call."""
        named = lists(manifest)
        info = {"names": named["names"], "dtype_names": named["dtypes"], "shapes": named["shapes"], "packed": packed}
        calls = (
            self.http.post("/pause", params={"mode": "keep"}),
            self.http.post("/start_weight_update", json={"is_checkpoint_format": True}),
            self.http.post("/update_weights", json={"update_info": info}),
            self.http.post("/finish_weight_update"),
            self.http.post("/resume"),
        )
        return [response.status_code for response in calls]
