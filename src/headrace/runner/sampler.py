"""Chooses one token per row of logits. `model_runner.py` calls it once a step, with the rows that sample.

Order of the transforms, as in vLLM: edits (`edits.py`: bias, bad words, min tokens, penalties), temperature, min-p,
top-k, top-p, draw. Order of tokens is that of `ordering.py` (ties by lower id): top-k keeps exactly the first k; top-p
keeps the shortest run of first tokens whose probability, after min-p and top-k, reaches top_p, and always the best
one; min-p keeps tokens at least min_p times as likely as the best.

A row's token never depends on the rows beside it: each is drawn alone, along its own contiguous axis, by few numpy
functions over and over. Greedy rows cost nothing beyond the backend's argmax, rows with a temperature alone no sort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.runner.edits import LogitEdits
from headrace.runner.ordering import falling, top_ids
from headrace.runner.random import uniform
from headrace.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would only overflow."""
_HIGHEST_TEMPERATURE = 1e30
_TILE = 256  # elements whose sum is one step of the outer CDF

NOT_FINITE = "the model gave logits that are not finite"
ALL_BANNED = "every token of the vocabulary is banned by bad_words or min_tokens"


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled, as columns."""

    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]  # tokens before the sampled one
    edits: dict[int, tuple[LogitEdits, np.ndarray]] = field(
        default_factory=dict
    )  # by row, with the row's tokens so far


def sample(
    logits: np.ndarray, rows: SamplingRows, best: list[int], finite: list[bool]
) -> tuple[list[int], dict[int, str]]:
    """Token ids, and by row the reason why it has none (its id is then meaningless). Leaves logits alone.

    `best` and `finite` are the backend's `best_tokens` of these logits.
    """
    token_ids, errors = list(best), {}
    tiles = np.zeros((-(-logits.shape[1] // _TILE), _TILE), np.float32)
    with np.errstate(over="ignore", under="ignore"):
        for i, params in enumerate(rows.params):
            if not finite[i]:
                errors[i] = NOT_FINITE
                continue
            row = logits[i]
            if i in rows.edits:
                edits, known = rows.edits[i]
                row = row.copy()
                edits.apply(row, known)
                token_ids[i] = int(row.argmax())
                if row[token_ids[i]] == -np.inf:
                    errors[i] = ALL_BANNED
                    continue
            if params.temperature >= GREEDY_BELOW:
                chance = uniform(rows.seeds[i], rows.positions[i])
                token_ids[i] = _draw(row, row[token_ids[i]], params, chance, tiles)
    return token_ids, errors


def _draw(row: np.ndarray, highest: np.float32, params: SamplingParams, chance: float, tiles: np.ndarray) -> int:
    """One token of a row whose largest logit is `highest`. `tiles` is room for its weights, zero behind them."""
    if 0 < params.top_k < row.shape[0]:
        return _draw_sorted(*_top_k(row, params), params.top_p, chance)
    weights = tiles.reshape(-1)[: row.shape[0]]
    _weigh(row, highest, params, weights)
    if params.top_p < 1.0:
        return _draw_sorted(*_nucleus(weights, params.top_p), params.top_p, chance)
    return _draw_plain(tiles, chance)


def _weigh(row: np.ndarray, highest: np.float32, params: SamplingParams, weights: np.ndarray) -> None:
    """Probabilities over that of the likeliest token, after temperature and min-p."""
    np.subtract(row, highest, out=weights)
    if params.temperature != 1.0:
        np.divide(weights, np.float32(min(params.temperature, _HIGHEST_TEMPERATURE)), out=weights)
    np.exp(weights, out=weights)
    if params.min_p > 0.0:
        weights[weights < np.float32(params.min_p)] = 0.0


def _draw_plain(tiles: np.ndarray, chance: float) -> int:
    """Inverse CDF over the whole vocabulary, in two levels: find the tile, then the token in it."""
    outer = np.cumsum(tiles.sum(axis=1), dtype=np.float64)
    target = _below(chance * float(outer[-1]), outer)
    tile = int(outer.searchsorted(target, side="right"))
    inner = np.cumsum(tiles[tile], dtype=np.float64)
    # The tile's float32 sum and its float64 running sum differ by roundings; the clip keeps the draw inside the tile.
    rest = _below(target - float(outer[tile - 1]) if tile else target, inner)
    return tile * _TILE + int(inner.searchsorted(rest, side="right"))


def _below(target: float, running: np.ndarray) -> float:
    """Clips into [0, total): then the first running sum above the target exists and belongs to a weight above 0."""
    return min(target, math.nextafter(float(running[-1]), 0.0))


def _draw_sorted(ids: np.ndarray, running: np.ndarray, total: float, top_p: float, chance: float) -> int:
    """Inverse CDF over tokens in falling order, as far as they are needed to reach top_p of the total weight."""
    num_kept = min(int(running.searchsorted(top_p * total, side="left")) + 1, running.shape[0])
    kept = running[:num_kept]
    return int(ids[kept.searchsorted(_below(chance * float(kept[-1]), kept), side="right")])


def _top_k(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, float]:
    """The k most likely tokens, in order, with their running weights and the weight of all of them."""
    ids = top_ids(row, params.top_k)
    weights = np.empty(ids.shape[0], np.float32)
    _weigh(row[ids], row[ids[0]], params, weights)
    running = np.cumsum(weights, dtype=np.float64)
    return ids, running, float(running[-1])


def _nucleus(weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Enough of the most likely tokens to reach top_p, in order, with their running weights and the weight of all.

    Tokens that together weigh less than 1 - top_p cannot be among them, so only what is heavy enough is sorted.
    """
    total = float(weights.sum())
    lightest = 0.5 * (1.0 - top_p) * total / weights.shape[0]  # half: room for the sum's rounding
    heavy = np.flatnonzero(weights > np.float32(lightest))
    ids = heavy[falling(weights[heavy])]
    return ids, np.cumsum(weights[ids], dtype=np.float64), total
