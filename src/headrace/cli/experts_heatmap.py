"""The picture of `headrace experts heatmap`: layers by experts, layers by ranks, balance of each layer.

A cell's colour is its load against an even share of its layer, on a logarithmic scale: white is even, red above, blue
below, grey nothing. The page is one file without scripts; pointing at a cell tells its numbers. The PNG has the same
panels without text.

Shapes: L layers, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.cli.experts_png import encode_png
from headrace.eplb.layout import ExpertMap, MapData
from headrace.eplb.stats import Balance, balance, rank_loads, summarise
from headrace.errors import RequestError, StartupError

Floats = NDArray[np.float64]
Colours = NDArray[np.uint8]

# Blue, white, red: stays readable for people who cannot tell red from green.
STOPS = np.array([[5, 48, 97], [67, 147, 195], [247, 247, 247], [214, 96, 77], [103, 0, 31]], dtype=np.float64)
NOTHING = np.array([200, 200, 200], dtype=np.uint8)
TRACK = np.array([230, 230, 230], dtype=np.uint8)
EXPERT_SPAN, RANK_SPAN = 3.0, 1.0  # powers of two to either end of the scale: experts 1/8 to 8, ranks 1/2 to 2
NUM_SHADES = 32
ROW, WIDTH, LEFT, GAP, BAR = 12, 1280, 44, 40, 160  # pixels of the page


class Window(msgspec.Struct, frozen=True):
    start: float | None
    end: float | None
    steps: int
    tokens: int


class Reply(msgspec.Struct, frozen=True):
    """What GET /v1/experts answers, as far as it is drawn."""

    num_experts: int
    num_ranks: int
    layers: list[int]
    slots: list[list[int]]
    tokens: list[list[int]]
    window: Window
    last_decision: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Picture:
    """What is drawn. `layers` are the numbers to show; tokens are [L, E]."""

    title: str
    layers: list[int]
    tokens_LE: NDArray[np.int64]
    expert_map: ExpertMap

    @cached_property
    def loads_LR(self) -> Floats:
        return rank_loads(self.tokens_LE, self.expert_map)

    @cached_property
    def balance(self) -> Balance:
        return summarise(balance(self.loads_LR))


def picture_of_reply(body: bytes, where: str) -> Picture:
    """Raises StartupError if this is no answer of GET /v1/experts."""
    try:
        reply = msgspec.json.decode(body, type=Reply)
        expert_map = ExpertMap.from_data(MapData(reply.num_experts, reply.num_ranks, reply.slots))
        tokens_LE = np.array(reply.tokens, dtype=np.int64)
        if tokens_LE.shape != (len(reply.layers), reply.num_experts) or len(reply.slots) != len(reply.layers):
            raise ValueError(f"tokens of the shape {list(tokens_LE.shape)} for {len(reply.layers)} layers")
        if tokens_LE.min() < 0:
            raise ValueError("a negative number of tokens")
    except (msgspec.MsgspecError, RequestError, ValueError, OverflowError) as error:
        raise StartupError(f"{where} answered something else than loads of experts: {error}") from error
    title = f"{where}: {reply.window.steps} steps, {reply.window.tokens} tokens"
    if reply.last_decision is not None:
        action, reason = reply.last_decision.get("action"), reply.last_decision.get("reason")
        title += f"; last decision: {action} ({reason})"
    return Picture(title, reply.layers, tokens_LE, expert_map)


def colours_of(load_LX: Floats, span: float) -> tuple[Colours, Floats]:
    """(RGB of each cell [L, X, 3], its load against an even share [L, X])."""
    even_L1 = load_LX.mean(axis=1, keepdims=True)
    ratio_LX: Floats = np.divide(load_LX, even_L1, out=np.zeros_like(load_LX), where=even_L1 > 0)
    power_LX = np.log2(np.maximum(ratio_LX, 2.0**-span))
    colour_LX3 = _colour(np.clip(power_LX / span, -1, 1))
    colour_LX3[ratio_LX == 0] = NOTHING
    return colour_LX3, ratio_LX


def draw_png(picture: Picture) -> bytes:
    """Experts above, ranks with the layers' balance below, each layer a row of pixels of its own height."""
    experts, ranks = (_blocks(*pair) for pair in _panels(picture))
    width = max(experts.shape[1], ranks.shape[1] + GAP + BAR)
    canvas = np.full((len(experts) + GAP + len(ranks), width, 3), 255, dtype=np.uint8)
    canvas[: len(experts), : experts.shape[1]] = experts
    lower = canvas[len(experts) + GAP :]
    lower[:, : ranks.shape[1]] = ranks
    left = ranks.shape[1] + GAP
    for layer, value in enumerate(picture.balance.per_layer):
        bar = lower[layer * ROW : (layer + 1) * ROW - 1, left : left + BAR]
        bar[...] = TRACK
        bar[:, : round(value * BAR)] = STOPS[1]
    return encode_png(canvas)


def draw_html(picture: Picture) -> str:
    """One page: both panels as SVG, with a tooltip for each cell and a legend."""
    even, expert_map = picture.balance, picture.expert_map
    facts = (
        f"{expert_map.num_layers} layers, {expert_map.num_experts} experts in {expert_map.num_slots} slots on "
        f"{expert_map.num_ranks} ranks. Balance (mean / max over ranks, 1 is even): {even.mean:.3f}, "
        f"worst layer {even.worst:.3f}."
    )
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load of experts</title><style>',
            "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}h2{font-size:16px}",
            "svg text{font:9px system-ui,sans-serif;fill:#444}",
            *_shades(),
            "</style></head><body><h1>Load of experts</h1>",
            f"<p>{escape(picture.title)}<br>{facts}</p>",
            "<h2>Layers by experts</h2>",
            *_experts_svg(picture),
            *_legend(EXPERT_SPAN),
            "<h2>Layers by ranks, and the balance of each layer</h2>",
            *_ranks_svg(picture),
            *_legend(RANK_SPAN),
            "<p>Colours: load against an even share of the layer; grey: none. Point at a cell for its numbers.</p>",
            "</body></html>",
        ]
    )


def _experts_svg(picture: Picture) -> Iterator[str]:
    expert_map = picture.expert_map
    _, ratio_LE = colours_of(picture.tokens_LE.astype(np.float64), EXPERT_SPAN)
    rank_LEC = np.where(expert_map.replicas_LEC < 0, -1, expert_map.replicas_LEC // expert_map.slots_per_rank)
    cell = _cell_width(expert_map.num_experts)
    yield _open_svg(LEFT + cell * expert_map.num_experts, len(picture.layers))
    yield from _axis(picture.layers, expert_map.num_experts, cell)
    for layer, name in enumerate(picture.layers):
        for expert in range(expert_map.num_experts):
            ranks = ", ".join(str(rank) for rank in rank_LEC[layer, expert].tolist() if rank >= 0)
            text = (
                f"layer {name}, expert {expert}: {picture.tokens_LE[layer, expert]} tokens, "
                f"{ratio_LE[layer, expert]:.2f} x even, on rank {ranks}"
            )
            yield _cell(layer, expert, cell, shade=_shade(ratio_LE[layer, expert], EXPERT_SPAN), text=text)
    yield "</svg>"


def _ranks_svg(picture: Picture) -> Iterator[str]:
    expert_map = picture.expert_map
    _, ratio_LR = colours_of(picture.loads_LR, RANK_SPAN)
    cell = _cell_width(expert_map.num_ranks)
    bars_left = LEFT + cell * expert_map.num_ranks + GAP
    yield _open_svg(bars_left + BAR + GAP, len(picture.layers))
    yield from _axis(picture.layers, expert_map.num_ranks, cell)
    for layer, name in enumerate(picture.layers):
        for rank in range(expert_map.num_ranks):
            experts = ", ".join(map(str, expert_map.slots_LRS[layer, rank].tolist()))
            text = (
                f"layer {name}, rank {rank}: {picture.loads_LR[layer, rank]:.0f} tokens, "
                f"{ratio_LR[layer, rank]:.2f} x even, experts {experts}"
            )
            yield _cell(layer, rank, cell, shade=_shade(ratio_LR[layer, rank], RANK_SPAN), text=text)
        value, top = picture.balance.per_layer[layer], (layer + 1) * ROW
        for width, fill in ((BAR, "#e6e6e6"), (value * BAR, "#4393c3")):  # all of it would be even
            yield f'<rect x="{bars_left}" y="{top}" width="{width:.1f}" height="{ROW - 1}" fill="{fill}"/>'
        yield f'<text x="{bars_left + BAR + 4}" y="{top + ROW - 3}">{value:.3f}</text>'
    yield "</svg>"


def _open_svg(width: int, num_layers: int) -> str:
    height = (num_layers + 1) * ROW
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" shape-rendering="crispEdges">'


def _axis(layers: list[int], num_columns: int, cell: int) -> Iterator[str]:
    for layer, name in enumerate(layers):
        yield f'<text x="{LEFT - 6}" y="{(layer + 2) * ROW - 3}" text-anchor="end">{name}</text>'
    step = max(1, 2 ** int(np.ceil(np.log2(28 / cell))))  # a number needs some 28 pixels
    for column in range(0, num_columns, step):
        yield f'<text x="{LEFT + column * cell}" y="{ROW - 3}">{column}</text>'


def _cell(layer: int, column: int, cell: int, *, shade: str, text: str) -> str:
    return (
        f'<rect class="{shade}" x="{LEFT + column * cell}" y="{(layer + 1) * ROW}" width="{cell}" height="{ROW - 1}">'
        f"<title>{text}</title></rect>"
    )


def _legend(span: float) -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + NUM_SHADES * 8 + GAP}" height="30">'
    for shade in range(NUM_SHADES):
        yield f'<rect class="s{shade}" x="{LEFT + shade * 8}" y="4" width="8" height="10"/>'
    for place, power in ((0.0, -span), (0.5, 0.0), (1.0, span)):
        label = f"{2**power:g} x" if power >= 0 else f"1/{2**-power:g} x"
        yield f'<text x="{LEFT + place * NUM_SHADES * 8}" y="26" text-anchor="middle">{label}</text>'
    yield "</svg>"


def _shades() -> Iterator[str]:
    """A class of each shade, so that a cell needs no colour of its own."""
    colours = _colour((np.arange(NUM_SHADES) + 0.5) / NUM_SHADES * 2 - 1)
    for shade, (red, green, blue) in enumerate(colours.tolist()):
        yield f".s{shade}{{fill:#{red:02x}{green:02x}{blue:02x}}}"
    yield ".none{fill:#c8c8c8}"


def _shade(ratio: float, span: float) -> str:
    if ratio == 0:
        return "none"
    place = (np.log2(ratio) / span + 1) / 2 * NUM_SHADES
    return f"s{int(np.clip(place, 0, NUM_SHADES - 1))}"


def _colour(position: Floats) -> Colours:
    """RGB of positions from -1 (blue) to 1 (red)."""
    place = (position + 1) / 2 * (len(STOPS) - 1)
    channels = [np.interp(place, np.arange(len(STOPS)), STOPS[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=-1)).astype(np.uint8)


def _panels(picture: Picture) -> tuple[tuple[Colours, int], tuple[Colours, int]]:
    expert_map = picture.expert_map
    experts, _ = colours_of(picture.tokens_LE.astype(np.float64), EXPERT_SPAN)
    ranks, _ = colours_of(picture.loads_LR, RANK_SPAN)
    return (experts, _cell_width(expert_map.num_experts)), (ranks, _cell_width(expert_map.num_ranks))


def _blocks(colours: Colours, cell: int) -> Colours:
    """Each cell as a block of `ROW` by `cell` pixels."""
    return np.repeat(np.repeat(colours, ROW, axis=0), cell, axis=1)


def _cell_width(num_columns: int) -> int:
    return int(np.clip(WIDTH // num_columns, 3, 24))
