"""checkpoint-engine: handles of CUDA memory through a socket, which no engine without a GPU can take."""

from __future__ import annotations

import httpx

from headrace.testing.trainer_clients.base import Trainer


class CheckpointEngine(Trainer):
    def update(self) -> httpx.Response:
        assert self.http.get("/health").status_code == 200
        handles = {"GPU-0000": "ipc://@checkpoint-engine-0.sock"}
        body = {"method": "update_weights_from_ipc", "args": [handles], "timeout": 300.0}
        return self.http.post("/collective_rpc", json=body)

    def update_sglang(self) -> httpx.Response:
        body = {"zmq_handles": {"GPU-0000": "ipc://@checkpoint-engine-0.sock"}, "flush_cache": True}
        return self.http.post("/update_weights_from_ipc", json=body)
