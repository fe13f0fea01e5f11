"""verl's HTTP adapter for SGLang: memory given back between rollouts, tensors as pickles, a flush at the end."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.testing.trainer_clients.base import Trainer


class Verl(Trainer):
    def before_training(self) -> None:
        self.post("/abort_request", {"rid": "", "abort_all": True})
        self.get("/flush_cache")
        self.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def update(self, pickles: Sequence[str]) -> None:
        self.post("/resume_memory_occupation", {"tags": ["weights"]})
        for pickled in pickles:
            body = {"serialized_named_tensors": [pickled], "load_format": None, "flush_cache": False}
            reply = self.post("/update_weights_from_tensor", body)
            assert reply["success"], reply
        self.get("/flush_cache")
        self.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
