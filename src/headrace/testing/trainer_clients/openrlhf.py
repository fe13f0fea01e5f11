"""OpenRLHF: worker methods by name, one call per tensor, and a reset of the prefix cache at the end."""

from __future__ import annotations

from typing import Any

from headrace.testing.trainer_clients.base import Trainer
from headrace.weights.incoming.raw import Manifest

GROUP = "openrlhf"


class OpenRlhf(Trainer):
    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = self.post("/collective_rpc", {"method": method, "args": args, "kwargs": kwargs})["results"]
        return results

    def connect(self, port: int) -> None:
        self.call("init_process_group", "127.0.0.1", port, 1, 2, GROUP, "gloo", False)

    def update(self, manifest: Manifest) -> None:
        self.post("/pause", params={"mode": "keep"})
        named = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
        for name, dtype, shape in named:
            self.call("update_weight", name, dtype=f"torch.{dtype}", shape=list(shape), empty_cache=False)
        self.post("/reset_prefix_cache")
        self.post("/resume")
