"""Chooses one token per row of logits. `model_runner.py` calls it once a step, with the rows that sample.

Order of the transforms, as in vLLM: edits (`edits.py`: bias, bad words, min tokens, penalties), temperature, min-p,
top-k, top-p, draw. Order of tokens is that of `ordering.py` (ties by lower id): top-k keeps exactly the first k; top-p
keeps the shortest run of first tokens whose probability, after min-p and top-k, reaches top_p, and always the best
one; min-p keeps tokens at least min_p times as likely as the best.

A row's token never depends on the rows beside it: reductions run along a row's own contiguous axis. Rows are grouped by
what they need: greedy rows cost an argmax, rows with a temperature alone no sort.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.runner.edits import LogitEdits
from headrace.runner.logprobs import rows_per_block
from headrace.runner.ordering import falling, top_ids
from headrace.runner.random import uniforms

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would only overflow."""
_HIGHEST_TEMPERATURE = 1e30
_TILE = 256  # elements whose sum is one step of the outer CDF

NOT_FINITE = "the model gave logits that are not finite"
ALL_BANNED = "every token of the vocabulary is banned by bad_words or min_tokens"


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled, as columns."""

    temperature: np.ndarray  # float64
    top_k: np.ndarray  # int64, 0: off
    top_p: np.ndarray  # float64, 1: off
    min_p: np.ndarray  # float64, 0: off
    seeds: np.ndarray  # uint64
    positions: np.ndarray  # int64, tokens before the sampled one
    edits: dict[int, tuple[LogitEdits, np.ndarray]] = field(
        default_factory=dict
    )  # by row, with the row's tokens so far


def sample(
    logits: np.ndarray, rows: SamplingRows, best: np.ndarray, finite: np.ndarray
) -> tuple[np.ndarray, dict[int, str]]:
    """Token ids int64 [R], and by row the reason why it has none (its id is then meaningless). Leaves logits alone.

    `best` and `finite` are the backend's `best_tokens` of these logits.
    """
    errors = {int(i): NOT_FINITE for i in np.flatnonzero(~finite)}
    greedy = rows.temperature < GREEDY_BELOW
    if not errors and not rows.edits and greedy.all():
        return best, errors
    with np.errstate(over="ignore", under="ignore"):
        return _sample_groups(logits, rows, finite, greedy, errors)


def _sample_groups(
    logits: np.ndarray, rows: SamplingRows, finite: np.ndarray, greedy: np.ndarray, errors: dict[int, str]
) -> tuple[np.ndarray, dict[int, str]]:
    num_rows, vocab_size = logits.shape
    view = list(logits)
    usable = finite.copy()
    for i, (edits, token_ids) in rows.edits.items():
        if finite[i]:
            view[i] = logits[i].copy()
            edits.apply(view[i], token_ids)
            if view[i].max() == -np.inf:
                usable[i], errors[i] = False, ALL_BANNED
    token_ids = np.zeros(num_rows, np.int64)
    for i in np.flatnonzero(usable & greedy).tolist():
        token_ids[i] = view[i].argmax()
    drawn = usable & ~greedy
    if drawn.any():
        chances = uniforms(rows.seeds, rows.positions)
        truncated = (rows.top_p < 1.0) | ((rows.top_k > 0) & (rows.top_k < vocab_size))
        plain = np.flatnonzero(drawn & ~truncated)
        step = rows_per_block(vocab_size)
        for start in range(0, plain.shape[0], step):
            block = plain[start : start + step]
            token_ids[block] = _draw_plain([view[i] for i in block.tolist()], rows, block, chances[block])
        for i in np.flatnonzero(drawn & truncated).tolist():
            token_ids[i] = _draw_truncated(view[i], rows, i, float(chances[i]))
    return token_ids, errors


def _divisors(temperature: np.ndarray) -> np.ndarray:
    divisors: np.ndarray = np.minimum(temperature, _HIGHEST_TEMPERATURE).astype(np.float32)
    return divisors


def _draw_plain(block: list[np.ndarray], rows: SamplingRows, index: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Inverse CDF over the whole vocabulary, in two levels: find the tile, then the token in it."""
    num_rows, vocab_size = len(block), block[0].shape[0]
    num_tiles = -(-vocab_size // _TILE)
    padded = np.zeros((num_rows, num_tiles * _TILE), np.float32)
    weights = padded[:, :vocab_size]
    np.stack(block, out=weights)
    weights -= weights.max(axis=1, keepdims=True)
    weights /= _divisors(rows.temperature[index])[:, None]
    np.exp(weights, out=weights)
    min_p = rows.min_p[index]
    if min_p.any():
        weights[weights < min_p.astype(np.float32)[:, None]] = 0.0
    tiles = padded.reshape(num_rows, num_tiles, _TILE)
    outer = np.cumsum(tiles.sum(axis=2), axis=1, dtype=np.float64)
    target = _below(chances * outer[:, -1], outer[:, -1])
    tile = (outer > target[:, None]).argmax(axis=1)
    each = np.arange(num_rows)
    before = np.where(tile > 0, outer[each, tile - 1], 0.0)
    inner = np.cumsum(tiles[each, tile], axis=1, dtype=np.float64)
    # The tile's float32 sum and its float64 running sum differ by roundings; the clip keeps the draw inside the tile.
    rest = _below(target - before, inner[:, -1])
    token_ids: np.ndarray = tile * _TILE + (inner > rest[:, None]).argmax(axis=1)
    return token_ids


def _below(target: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Clips into [0, total): then the first running sum above the target exists and belongs to a weight above 0."""
    clipped: np.ndarray = np.minimum(target, np.nextafter(total, 0.0))
    return clipped


def _draw_truncated(row: np.ndarray, rows: SamplingRows, i: int, chance: float) -> int:
    """Inverse CDF over the tokens that min-p, top-k and top-p leave, in falling order."""
    vocab_size = row.shape[0]
    top_k, top_p = int(rows.top_k[i]), float(rows.top_p[i])
    divisor = _divisors(rows.temperature[i : i + 1])[0]
    min_p = np.float32(rows.min_p[i])
    if 0 < top_k < vocab_size:
        ids = top_ids(row, top_k)
        weights = np.exp((row[ids] - row[ids[0]]) / divisor)
        weights[weights < min_p] = 0.0
        running = np.cumsum(weights, dtype=np.float64)
        reach = top_p * running[-1]
    else:
        ids, running, reach = _nucleus(row, divisor, min_p, top_p)
    num_kept = min(int(np.searchsorted(running, reach, side="left")) + 1, running.shape[0])
    total = running[num_kept - 1]
    target = min(chance * total, np.nextafter(total, 0.0))
    return int(ids[np.searchsorted(running[:num_kept], target, side="right")])


def _nucleus(
    row: np.ndarray, divisor: np.float32, min_p: np.float32, top_p: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Enough of the most likely tokens to reach top_p, in order, with their running weights and the weight to reach.

    Tokens that together weigh less than 1 - top_p cannot be among them, so only what is heavy enough is sorted.
    """
    weights = np.exp((row - row.max()) / divisor)
    if min_p > 0.0:
        weights[weights < min_p] = 0.0
    total = float(weights.sum())
    lightest = 0.5 * (1.0 - top_p) * total / row.shape[0]  # half: room for the sum's rounding
    heavy = np.flatnonzero(weights > np.float32(lightest))
    ids = heavy[falling(weights[heavy])]
    return ids, np.cumsum(weights[ids], dtype=np.float64), top_p * total
