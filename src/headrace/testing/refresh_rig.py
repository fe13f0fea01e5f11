"""A harness whose engine runs a real tiny model: for tests of what serves after its weights have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.harness import EngineHarness
from headrace.types import FinishReason
from headrace.weights.tensor import CheckpointTensor

PROMPT = list(b"The water that turns the wheel has passed already")


class RefreshRig(EngineHarness):
    """A harness on a real executor."""

    def __init__(self, path: Path, *, backend: str = "auto", **options: Any) -> None:
        super().__init__(**options)
        self.real = UniprocExecutor(path, create_backend(backend, num_threads=1))
        self.core = EngineCore(
            self.real, CacheConfig(num_kv_blocks=64), SchedulerConfig(max_num_seqs=8), 256, clock=self.clock
        )
        self.core.on_lifecycle = self.lifecycles.append
        self.state.core = self.core
        self.state.remember(path)

    def generate(self, prompt: list[int] = PROMPT, max_tokens: int = 12) -> list[int]:
        request = self.submit(prompt, max_tokens=max_tokens, temperature=0.0)
        self.run()
        assert self.choice(request).finish is FinishReason.LENGTH
        return self.choice(request).token_ids


def manifest(tensors: dict[str, CheckpointTensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [tensor.kind.label for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def raw_source(tensors: dict[str, CheckpointTensor], folder: Path) -> dict[str, Any]:
    file = folder / "body"
    file.write_bytes(b"".join(tensor.data.tobytes() for tensor in tensors.values()))
    return {"kind": "file", "file": str(file), "format": "raw", "delete": True, **manifest(tensors)}
