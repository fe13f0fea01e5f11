"""Perplexity of a model on the text in tests/data, by backend: what rounding weights, activations and KV costs.

`python -m headrace.testing.perplexity smollm2 [--write]` prints a table. The float32 reference takes a minute: the
test compares with what it gave once (`--write` stores that), and checks the beginning of it anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from headrace.kernels import Backend, create_backend
from headrace.models import load_model
from headrace.processing.tokenizer import load_tokenizer
from headrace.testing.steps import Runner
from headrace.weights.hub import cached_alias_path

DATA = Path(__file__).parents[3] / "tests" / "data"
WINDOW, NUM_WINDOWS, CHUNK = 1000, 4, 250


def window_ids(model_path: Path) -> list[list[int]]:
    """The text's first tokens, cut into windows that are scored each on its own."""
    text = (DATA / "perplexity.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(model_path).encode(text, add_special_tokens=False)
    assert len(ids) >= WINDOW * NUM_WINDOWS, "the text is too short"
    return [ids[start : start + WINDOW] for start in range(0, WINDOW * NUM_WINDOWS, WINDOW)]


def negative_log_likelihoods(backend: Backend, model_path: Path, windows: list[list[int]]) -> list[np.ndarray]:
    """Of every token but the first, by window; each is computed in chunks, as a server computes a prompt."""
    runner = Runner(load_model(model_path, backend), backend, num_blocks=-(-WINDOW // 16), block_size=16)
    results = []
    for ids in windows:
        parts = []
        for start in range(0, len(ids), CHUNK):
            logits = runner.step({0: ids[start : start + CHUNK]})[0]
            targets = ids[start + 1 : start + CHUNK + 1]
            parts.append(_score(logits[: len(targets)], targets))
        runner.release(0)
        results.append(np.concatenate(parts))
    return results


def _score(logits: np.ndarray, targets: list[int]) -> np.ndarray:
    chosen = logits[np.arange(len(targets)), targets].astype(np.float64)
    top = logits.max(axis=1)
    logits -= top[:, None]
    sums = np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)
    scores: np.ndarray = np.log(sums) + top - chosen
    return scores


def perplexity(likelihoods: list[np.ndarray]) -> float:
    return float(np.exp(np.concatenate(likelihoods).mean()))


def reference_path(alias: str) -> Path:
    return DATA / f"perplexity-{alias}.json"


def read_reference(alias: str) -> list[np.ndarray]:
    """What the float32 reference gave, by window."""
    return [np.array(window) for window in json.loads(reference_path(alias).read_text(encoding="utf-8"))]


def main(alias: str, *, writes: bool) -> None:
    path = cached_alias_path(alias)
    assert path is not None, f"`headrace pull {alias}` first"
    windows = window_ids(path)
    reference = negative_log_likelihoods(create_backend("reference"), path, windows)
    if writes:
        rows = [[round(float(x), 4) for x in window] for window in reference]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        reference_path(alias).write_text(f"[{lines}]\n", encoding="utf-8")
    print(f"{'reference':24} {perplexity(reference):8.3f}")
    for name, kv_cache_dtype in (("native", "auto"), ("native, int8 KV", "int8")):
        backend = create_backend("native", kv_cache_dtype=kv_cache_dtype)
        found = perplexity(negative_log_likelihoods(backend, path, windows))
        print(f"{name:24} {found:8.3f}  {found / perplexity(reference) - 1:+.2%}")


if __name__ == "__main__":
    main(sys.argv[1], writes="--write" in sys.argv[2:])
