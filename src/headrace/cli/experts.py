"""`headrace experts`: what balancing experts over ranks would bring (simulate), and a picture of their load (heatmap).

Loads come from a file of counts, [steps, layers, experts], from Zipf's law, or from a running server.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from headrace.cli.help import HelpFormatter
from headrace.errors import ConfigError, StartupError

STRATEGIES = ("hierarchical", "global", "intra_node")
PICTURES = (".html", ".png")
QUERY_TIMEOUT_S = 30.0
MOST_NUMBERS = 10_000  # that dots may stand for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    _add_simulate(actions)
    _add_heatmap(actions)


def run(args: argparse.Namespace) -> int:
    return int(args.run_action(args))


def _add_simulate(actions: Any) -> None:
    parser = actions.add_parser(
        "simulate",
        help="balance for several numbers of redundant experts, without a cluster",
        description="Plans on one window of loads, judges on the next, and prints how evenly ranks are loaded.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run_action=_simulate)
    parser.add_argument("--ranks", default="64", metavar="LIST", help="one or several: 8,16,32 (default: %(default)s)")
    parser.add_argument(
        "--redundant",
        default="0,8,...,64",
        metavar="LIST",
        help="redundant experts; what does not divide among the ranks is left out (default: %(default)s)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="that the ranks are on (default: 1)")
    parser.add_argument(
        "--groups",
        type=int,
        metavar="N",
        help="of experts, that the router chooses from first; none: the plan is global",
    )
    parser.add_argument(
        "--policy", choices=STRATEGIES, default="hierarchical", help="how to plan (default: %(default)s)"
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=0.02,
        metavar="X",
        help="of the mean load, that a rank may carry more so that less has to move (default: %(default)s)",
    )
    parser.add_argument("--loads", default="zipf", metavar="FILE", help="an .npz or .npy of counts, or zipf (default)")
    parser.add_argument("--window", type=int, metavar="N", help="steps that are planned on (default: a quarter)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    zipf = parser.add_argument_group("Loads by Zipf's law")
    zipf.add_argument("--experts", type=int, default=256, metavar="N", help="(default: %(default)s)")
    zipf.add_argument("--layers", type=int, default=61, metavar="N", help="(default: %(default)s)")
    zipf.add_argument("--steps", type=int, default=400, metavar="N", help="(default: %(default)s)")
    zipf.add_argument("--tokens", type=int, default=4096, metavar="N", help="of a step (default: %(default)s)")
    zipf.add_argument("--top-k", type=int, default=8, metavar="N", help="experts of a token (default: %(default)s)")
    zipf.add_argument("--zipf-exponent", type=float, default=0.5, metavar="X", help="0: even (default: %(default)s)")
    zipf.add_argument(
        "--drift",
        type=float,
        default=0.03,
        metavar="X",
        help="0 to 1: what is new after a window (default: %(default)s)",
    )
    zipf.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")


def _add_heatmap(actions: Any) -> None:
    parser = actions.add_parser(
        "heatmap",
        help="a picture of the load of experts and ranks",
        description="Draws layers by experts, coloured by load, and under it the load of each rank.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run_action=_heatmap)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", metavar="URL", help="a running server")
    source.add_argument("--loads", metavar="FILE", help="an .npz or .npy of counts")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="out.html or out.png")
    parser.add_argument("--key", "--api-key", metavar="KEY", help="with --url: admin key (or HEADRACE_ADMIN_KEY)")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --loads (default: 8)")
    parser.add_argument("--redundant", type=int, metavar="N", help="with --loads: redundant experts (default: 0)")
    parser.add_argument(
        "--map", metavar="FILE", help="with --loads: an expert map as JSON, in place of the initial one"
    )


def _simulate(args: argparse.Namespace) -> int:
    from headrace.eplb.placement import Cluster, Strategy
    from headrace.eplb.simulate import possible_counts, published_example, simulate, windows_of

    if not 0 <= args.slack <= 1:
        raise ConfigError(f"--slack is {args.slack}; it must be 0 to 1")
    loads_TLE = _zipf(args) if args.loads == "zipf" else read_loads(args.loads)
    window_steps = max(len(loads_TLE) // 4, 1) if args.window is None else args.window
    window_WLE = windows_of(loads_TLE, window_steps)
    rows, left_out = [], []
    redundant = numbers_of("--redundant", args.redundant)
    for num_ranks in numbers_of("--ranks", args.ranks):
        cluster = Cluster(num_ranks=num_ranks, num_nodes=args.nodes, num_groups=args.groups)
        possible, why = possible_counts(window_WLE.shape[2], redundant, num_ranks)
        rows += [simulate(window_WLE, count, cluster, Strategy(args.policy), args.slack) for count in possible]
        left_out += [why] if why else []
    if not rows:
        raise ConfigError(left_out[0])
    num_steps, num_layers, num_experts = loads_TLE.shape
    report = {
        "loads": args.loads,
        "steps": num_steps,
        "layers": num_layers,
        "experts": num_experts,
        "window": window_steps,
        "nodes": args.nodes,
        "policy": args.policy,
        "slack": args.slack,
        "rows": [_fields(row) for row in rows],
        "left_out": left_out,
        "published_example": [_fields(example) for example in published_example()],
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_simulation(report)
    return 0


def _zipf(args: argparse.Namespace) -> Any:
    from headrace.eplb.simulate import ZipfLoads

    loads = ZipfLoads(
        num_steps=args.steps,
        num_layers=args.layers,
        num_experts=args.experts,
        window_steps=max(args.steps // 4, 1) if args.window is None else args.window,
        tokens_per_step=args.tokens,
        top_k=args.top_k,
        exponent=args.zipf_exponent,
        drift=args.drift,
        seed=args.seed,
    )
    return loads.generate()


def _print_simulation(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    window = report["window"]
    console.print(
        f"{report['layers']} layers of {report['experts']} experts; loads: {report['loads']}, {report['steps']} steps. "
        f"Policy {report['policy']}, nodes: {report['nodes']}, slack {report['slack']:g}.\n"
        f"Planned on {window} steps, judged on the next {window}. Balance is mean / max over ranks: 1 is even.",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("ranks", "redundant", "slots/rank", "not balanced", "worst", "balanced", "worst", "same window"):
        table.add_column(heading, justify="right")
    table.add_column("moved", justify="right")
    table.add_column("plan", justify="right")
    for row in report["rows"]:
        counts = [str(row[name]) for name in ("num_ranks", "num_redundant", "slots_per_rank")]
        names = ("plain_mean", "plain_worst", "mean", "worst", "planned_mean")
        figures = [f"{row[name]:.3f}" for name in names]
        table.add_row(*counts, *figures, f"{row['moved_share']:.0%}", f"{row['plan_s'] * 1e3:.0f} ms")
    console.print(table)
    console.print(
        "worst: the worst layer of any window; same window: judged on what it was planned on\n"
        "moved: slots that a new plan fills from another rank; plan: the time for all layers"
    )
    for why in report["left_out"]:
        console.print(f"left out: {why}", markup=False)
    console.print("\nDeepSeek's published example, two layers (computed here, published):")
    for example in report["published_example"]:
        pairs = zip(example["computed"], example["published"], strict=True)
        console.print(f"  {example['name']:<34}" + "   ".join(f"{one:.3f} ({other:.3f})" for one, other in pairs))


def _heatmap(args: argparse.Namespace) -> int:
    from headrace.cli.experts_heatmap import draw_html, draw_png

    output = Path(args.output)
    if output.suffix not in PICTURES:
        raise ConfigError(f"--output is {args.output}; it must end in {' or '.join(PICTURES)}")
    picture = _served(args) if args.url is not None else _recorded(args)
    data = draw_html(picture).encode() if output.suffix == ".html" else draw_png(picture)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise StartupError(f"cannot write {output}: {error.strerror}") from error
    even = picture.balance
    print(f"{output}: balance {even.mean:.3f}, worst layer {even.worst:.3f}")
    return 0


def _served(args: argparse.Namespace) -> Any:
    import httpx

    from headrace.cli.experts_heatmap import picture_of_reply
    from headrace.cli.sources import api_base, raise_status

    for name in ("ranks", "redundant", "map"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for --loads; a server knows its own")
    base = api_base(args.url)
    key = args.key or os.environ.get("HEADRACE_ADMIN_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{base}/experts", headers=headers, timeout=QUERY_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise StartupError(f"cannot reach {base.removesuffix('/v1')}: {error}") from error
    raise_status(response)
    return picture_of_reply(response.content, str(response.url))


def _recorded(args: argparse.Namespace) -> Any:
    from headrace.cli.experts_heatmap import Picture
    from headrace.eplb.layout import ExpertMap, initial_map

    loads_TLE = read_loads(args.loads)
    num_steps, num_layers, num_experts = loads_TLE.shape
    if args.map is None:
        expert_map = initial_map(num_layers, num_experts, args.redundant or 0, 8 if args.ranks is None else args.ranks)
    else:
        if args.ranks is not None or args.redundant is not None:
            raise ConfigError("--map says how many ranks and redundant experts there are; leave the options out")
        try:
            expert_map = ExpertMap.from_json(Path(args.map).read_bytes())
        except OSError as error:
            raise StartupError(f"cannot read --map {args.map}: {error.strerror}") from error
    title = f"{Path(args.loads).name}: {num_steps} steps"
    return Picture(title, list(range(num_layers)), loads_TLE.sum(axis=0), expert_map)


def read_loads(name: str) -> Any:
    """Counts of a file, int64 [steps, layers, experts]; an .npz has one array, or one named `loads`.

    Raises ConfigError.
    """
    import zipfile
    import zlib

    import numpy as np

    try:
        with Path(name).open("rb") as file:
            loads = np.load(file, allow_pickle=False)
            if isinstance(loads, np.lib.npyio.NpzFile):
                names = loads.files
                if "loads" not in names and len(names) != 1:
                    raise ConfigError(f"--loads {name} holds the arrays {names}; it must hold one, or one named loads")
                loads = loads["loads" if "loads" in names else names[0]]
    except OSError as error:
        raise ConfigError(f"cannot read --loads {name}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"--loads {name} is no .npz or .npy file of numbers") from error
    if loads.ndim != 3 or 0 in loads.shape or loads.dtype.kind not in "iu":
        raise ConfigError(
            f"--loads {name} holds {loads.dtype} of the shape {list(loads.shape)}; "
            "it must be integers, steps x layers x experts"
        )
    if loads.min() < 0:
        raise ConfigError(f"--loads {name} holds {loads.min()}; tokens are counted from 0")
    return loads.astype(np.int64)


def numbers_of(option: str, text: str) -> list[int]:
    """ "0,8,16", or "0,8,...,64" with the step of the two numbers before the dots. Raises ConfigError."""
    wrong = ConfigError(f"{option} is {text!r}; it must be numbers such as 0,8,16 or 0,8,...,64")
    start, dots, end = text.partition(",...,")
    try:
        numbers = [int(part) for part in start.split(",")]
        if not dots:
            return numbers
        last, step = int(end), numbers[-1] - numbers[-2]
    except (ValueError, IndexError) as error:
        raise wrong from error
    if step < 1 or last < numbers[-1] or (last - numbers[-1]) // step >= MOST_NUMBERS:
        raise wrong
    return numbers + list(range(numbers[-1] + step, last + 1, step))


def _fields(struct: Any) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(struct)
