"""Chooses one token per row of logits. `model_runner.py` calls it once a step, with the rows that sample.

Order of the transforms: a grammar's mask (`constraints.py`), then as in vLLM edits (`edits.py`: bias, bad words, min
tokens, penalties), temperature, min-p, top-k, top-p, draw. Order of tokens is that of `ordering.py` (ties by lower
id): top-k keeps exactly the first k; top-p keeps the shortest run of first tokens whose probability, after min-p and
top-k, reaches top_p, and always the best one; min-p keeps tokens at least min_p times as likely as the best.

A row's token never depends on the rows beside it: each is drawn alone, along its own contiguous axis. Greedy rows cost
nothing beyond the backend's argmax, rows with a temperature alone no sort. `draw` says in numpy what a draw is; the
compiled kernels have their own, which gives the same tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.kernels.ops import Draw, DrawTokens
from headrace.runner.constraints import Mask
from headrace.runner.edits import LogitEdits
from headrace.runner.ordering import falling, top_ids
from headrace.runner.random import uniform
from headrace.types import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's bound): dividing by them would only overflow."""
_HIGHEST_TEMPERATURE = 1e30
_TILE = 256  # elements whose sum is one step of the outer CDF

NOT_FINITE = "the model gave logits that are not finite"
ALL_BANNED = "every token that could come next is banned by bad_words or min_tokens"


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled, as columns."""

    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]  # tokens before the sampled one
    edits: dict[int, tuple[LogitEdits, np.ndarray]] = field(
        default_factory=dict
    )  # by row, with the row's tokens so far
    masks: dict[int, Mask] = field(default_factory=dict)  # by row, of a grammar


def sample(
    logits: np.ndarray, rows: SamplingRows, best: list[int], finite: list[bool], draw_tokens: DrawTokens
) -> tuple[list[int], dict[int, str]]:
    """Token ids, and by row the reason why it has none (its id is then meaningless). Leaves logits alone.

    `best` and `finite` are what the backend says of these logits; `draw_tokens` is its own, or `draw`.
    """
    token_ids, errors = list(best), {}
    drawn: list[int] = []
    draws: list[Draw] = []
    for i, params in enumerate(rows.params):
        if not finite[i]:
            errors[i] = NOT_FINITE
            continue
        row = logits[i]
        mask = rows.masks.get(i)
        if isinstance(mask, str):
            errors[i] = mask
            continue
        if i in rows.edits or mask is not None:
            row = _edited(row, rows.edits.get(i), mask)
            token_ids[i] = int(row.argmax())
            if row[token_ids[i]] == -np.inf:
                errors[i] = ALL_BANNED
                continue
        if params.temperature >= GREEDY_BELOW:
            chance = uniform(rows.seeds[i], rows.positions[i])
            drawn.append(i)
            draws.append(Draw(row, token_ids[i], params.temperature, params.top_k, params.top_p, params.min_p, chance))
    for i, token_id in zip(drawn, draw_tokens(draws) if draws else (), strict=True):
        token_ids[i] = token_id
    return token_ids, errors


def _edited(logits: np.ndarray, edits: tuple[LogitEdits, np.ndarray] | None, mask: np.ndarray | None) -> np.ndarray:
    """A row after edits and grammar; takes the mask's memory. Where min_tokens leaves nothing that the grammar allows,
    the grammar wins."""
    row = logits.copy() if mask is None else np.add(logits, mask, out=mask)
    if edits is None:
        return row
    banned = None if mask is None else row.copy()
    edits[0].apply(row, edits[1])
    if banned is not None and row.max() == -np.inf:
        row = banned
        edits[0].apply(row, edits[1], bans_end=False)
    return row


def draw(draws: list[Draw]) -> list[int]:
    """A token for each, for backends that have no compiled way."""
    if not draws:
        return []
    tiles = np.zeros((-(-draws[0].row_V.shape[0] // _TILE), _TILE), np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return [_draw(each, tiles) for each in draws]


def _draw(draw: Draw, tiles: np.ndarray) -> int:
    """`tiles` is room for the weights of a row, zero behind them."""
    row = draw.row_V
    if 0 < draw.top_k < row.shape[0]:
        return _draw_sorted(*_top_k(draw), draw.top_p, draw.chance)
    weights = tiles.reshape(-1)[: row.shape[0]]
    _weigh(row, draw, weights)
    if draw.top_p < 1.0:
        return _draw_sorted(*_nucleus(row, weights, draw.top_p), draw.top_p, draw.chance)
    return _draw_plain(tiles, draw.chance)


def _weigh(logits: np.ndarray, draw: Draw, weights: np.ndarray) -> None:
    """Probabilities over that of the likeliest token, after temperature and min-p."""
    np.subtract(logits, draw.row_V[draw.best], out=weights)
    if draw.temperature != 1.0:
        np.divide(weights, np.float32(min(draw.temperature, _HIGHEST_TEMPERATURE)), out=weights)
    np.exp(weights, out=weights)
    if draw.min_p > 0.0:
        weights[weights < np.float32(draw.min_p)] = 0.0


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


def _top_k(draw: Draw) -> tuple[np.ndarray, np.ndarray, float]:
    """The k most likely tokens, in order, with their running weights and the weight of all of them."""
    ids = top_ids(draw.row_V, draw.top_k)
    weights = np.empty(ids.shape[0], np.float32)
    _weigh(draw.row_V[ids], draw, weights)
    running = np.cumsum(weights, dtype=np.float64)
    return ids, running, float(running[-1])


def _nucleus(row: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Enough of the most likely tokens to reach top_p, in order, with their running weights and the weight of all.

    The order is that of the logits: the weights that they become are rounded, and not alike in every backend. Tokens
    that together weigh less than 1 - top_p cannot be among them, so only what is heavy enough is sorted.
    """
    total = float(weights.sum())
    lightest = 0.5 * (1.0 - top_p) * total / weights.shape[0]  # half: room for the sum's rounding
    heavy = np.flatnonzero(weights > np.float32(lightest))
    ids = heavy[falling(row[heavy])]
    return ids, np.cumsum(weights[ids], dtype=np.float64), total
