"""FastDeploy's trainers: the explicit control requests, and the older pair that clears and brings back."""

from __future__ import annotations

from typing import Any

from headrace.testing.trainer_clients.base import Trainer


class FastDeploy(Trainer):
    def control(self, path: str, body: Any = None) -> Any:
        reply = self.post(path, body)
        assert reply["status"] == "success", reply
        return reply["result"]

    def is_paused(self) -> bool:
        return bool(self.get("/v1/is_paused")["is_paused"])

    def update(self, path: str, version: str) -> Any:
        self.control("/v1/pause")
        assert self.is_paused()
        result = self.control("/v1/update_weights", {"version": version, "model_path": path, "verify_checksum": True})
        self.control("/v1/resume")
        return result

    def sleep_and_wake(self) -> None:
        self.control("/v1/sleep?tags=weight,kv_cache")
        self.control("/v1/wakeup?tags=weight,kv_cache")

    def clear_and_update(self) -> list[int]:
        """Statuses: gone, gone already, back, back already."""
        paths = ("/clear_load_weight", "/clear_load_weight", "/update_model_weight", "/update_model_weight")
        return [self.http.get(path).status_code for path in paths]
