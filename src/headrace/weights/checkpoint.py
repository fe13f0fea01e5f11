"""Opens a checkpoint: a GGUF file, or a folder with config.json and safetensors.

Called by `models/` to load weights. Says what the files hold in one form; what the metadata means is the business of
`models/`, and tokenizers are read by `processing/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import CheckpointError
from headrace.weights.gguf import GGUFFile
from headrace.weights.safetensors import read_folder, read_json
from headrace.weights.tensor import CheckpointTensor

Source = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint.

    `metadata` is the GGUF key-value part or config.json; `generation` is generation_config.json (empty for GGUF).
    """

    path: Path
    source: Source
    architecture: str  # general.architecture, or config.json's model_type
    metadata: Mapping[str, Any]
    generation: Mapping[str, Any]
    tensors: Mapping[str, CheckpointTensor]

    @property
    def name(self) -> str:
        """The file's or folder's own name."""
        return self.path.stem if self.source == "gguf" else self.path.resolve().name


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads headers and maps the data; raises CheckpointError, in one line, for anything that cannot be served."""
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the folder that holds this file and config.json")
    file = GGUFFile(path)
    return Checkpoint(path, "gguf", file.architecture, file.metadata, {}, file.tensors)


def fingerprint(path: Path) -> str:
    """What changes when somebody writes to a checkpoint's files: their names, sizes and times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    marks = [(file.name, file.stat()) for file in files if file.exists()]
    return " ".join(f"{name}:{status.st_size}:{status.st_mtime_ns}" for name, status in marks)


def _open_folder(folder: Path) -> Checkpoint:
    config_path = folder / "config.json"
    if not config_path.exists():
        raise CheckpointError(f"{folder}: no config.json; needed: a safetensors folder with it, or a GGUF file")
    config = read_json(config_path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{config_path}: model_type is missing or not a string")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{config_path}: quantised weights ({str(method)[:40]}) are not supported; allowed: F32, F16, BF16, or GGUF"
        )
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return Checkpoint(folder, "safetensors", model_type, config, generation, read_folder(folder))
