"""`headrace ctl experts`: loads and placement of the experts of a running server, what moving would bring, moving.

`ctl.py` calls it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from headrace.cli.control_client import ControlClient, Json
from headrace.cli.ctl_output import error_text, print_reply, progress_bar, table_lines
from headrace.cli.help import HelpFormatter
from headrace.config.size import format_size
from headrace.eplb.files import read_rows
from headrace.errors import StartupError

NUM_BUSIEST = 3

AddParser = Callable[[Any, str, Any, str], argparse.ArgumentParser]
"""(subparsers, name, what runs, one line of help)"""


def add_experts(actions: Any, add: AddParser) -> None:
    parser = actions.add_parser(
        "experts",
        help="loads of experts, and where they are",
        description="Loads of experts, what moving them would bring, and moving them.",
        formatter_class=HelpFormatter,
    )
    inner = parser.add_subparsers(title="actions", metavar="ACTION", dest="experts_action", required=True)
    stats = add(inner, "stats", _stats, "loads by layer and expert, and how even ranks are")
    stats.add_argument("--clear", action="store_true", help="begin a new window of loads")
    add(inner, "status", _status, "the balance, the last run and the last decision")
    plan = add(inner, "plan", _plan, "what moving would bring; nothing moves")
    rebalance = add(inner, "rebalance", _rebalance("apply"), "move experts, layer after layer")
    stage = add(inner, "stage", _rebalance("stage"), "bring the weights of a new map, which waits for commit")
    commit = add(inner, "commit", _rebalance("commit"), "put the staged map in force")
    abort = add(inner, "abort", _rebalance("abort"), "forget the staged map")
    pin = add(inner, "pin", _rebalance("pin"), "keep this map, whatever automatic balancing thinks")
    add(inner, "unpin", _rebalance("unpin"), "end that")
    reset = add(inner, "reset", _rebalance("reset"), "the map of the start; ends a pin too")
    for target in (plan, rebalance, stage, pin):
        target.add_argument("--slots", metavar="FILE", help="a map of your own")
    for target in (plan, rebalance, stage):
        target.add_argument("--tokens", metavar="FILE", help="loads to plan for (default: what was measured)")
    for target in (stage, commit, abort):
        target.add_argument(
            "--run", metavar="NAME", help="the run's name (default: a new one, or the one that is there)"
        )
    stage.add_argument(
        "--silence",
        type=float,
        dest="silence_s",
        metavar="X",
        help="seconds without a word that end it (default: none)",
    )
    for target in (rebalance, stage, reset):
        target.add_argument("--timeout", type=float, dest="timeout_s", metavar="X", help="seconds (default: 600)")


def _stats(client: ControlClient, args: argparse.Namespace) -> int:
    reply = client.get(f"{client.url}/v1/experts" + ("?clear=true" if args.clear else ""))
    print_reply(args, reply, stats_lines(reply))
    return 0


def _status(client: ControlClient, args: argparse.Namespace) -> int:
    reply = client.get(f"{client.url}/v1/experts")
    print_reply(args, reply, status_lines(reply))
    return 0


def _plan(client: ControlClient, args: argparse.Namespace) -> int:
    operation = _operate(client, "plan", args)
    result = (operation.get("result") or [{}])[0]
    return _report(args, operation, () if "decision" not in result else plan_lines(result))


def _rebalance(action: str) -> Callable[[ControlClient, argparse.Namespace], int]:
    def rebalance(client: ControlClient, args: argparse.Namespace) -> int:
        operation = _operate(client, action, args)
        result = (operation.get("result") or [{}])[0]
        return _report(args, operation, done_lines(action, result) if "balance" in result else ())

    return rebalance


def _operate(client: ControlClient, action: str, args: argparse.Namespace) -> Json:
    body: Json = {"action": action}
    for name in ("run", "silence_s", "timeout_s"):
        if getattr(args, name, None) is not None:
            body[name] = getattr(args, name)
    for name in ("slots", "tokens"):
        if getattr(args, name, None) is not None:
            body[name] = read_rows(f"--{name}", getattr(args, name), name)
    with progress_bar(f"experts {action}") as bar:
        return client.run("rebalance_experts", body, bar.show_status)


def _report(args: argparse.Namespace, operation: Json, lines: Any) -> int:
    if operation["state"] != "succeeded" and not args.json:
        raise StartupError(f"{operation['kind']} {operation['state']}: {error_text(operation)}")
    print_reply(args, operation, lines)
    return 0 if operation["state"] == "succeeded" else 1


# --------------------------------------------------------------------------------------------------------------- output


def stats_lines(reply: Json) -> Iterator[str]:
    window = reply["window"]
    yield (
        f"{reply['num_layers']} layers of {reply['num_experts']} experts in {reply['num_slots']} slots on "
        f"{_count(reply['num_ranks'], 'rank')}; {_count(window['steps'], 'step')}"
    )
    rows = [("layer", "tokens", "balance", "busiest experts (share)")]
    for layer, tokens, balance in zip(reply["layers"], reply["tokens"], reply["balance"]["per_layer"], strict=True):
        total = sum(tokens)
        busiest = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])[:NUM_BUSIEST]
        shares = ", ".join(f"{expert} ({tokens[expert] / total:.0%})" for expert in busiest if tokens[expert])
        rows.append((str(layer), str(total), f"{balance:.3f}", shares or "none"))
    yield from table_lines(rows, "rrrl")
    yield _balance(reply["balance"])


def status_lines(reply: Json) -> Iterator[str]:
    ranks = _count(reply["num_ranks"], "rank")
    rows = {
        "mode": reply["mode"] if reply["is_expert_parallel"] else "every rank has a part of each expert; none can move",
        "placement": f"{reply['num_slots']} slots of {reply['num_experts']} experts on {ranks}",
        "balance": _balance(reply["balance"]).removeprefix("balance "),
        "run": "none yet" if reply["run"] is None else _run(reply["run"]),
        "decision": "none yet" if reply["last_decision"] is None else _decision(reply["last_decision"]),
        "in all": f"{_count(reply['rebalances'], 'rebalance')}, {_count(reply['failures'], 'failure')}, "
        f"{format_size(reply['bytes_moved'])} moved",
    }
    for name, text in rows.items():
        yield f"{name:<10} {text}"


def plan_lines(result: Json) -> Iterator[str]:
    decision = result["decision"]
    yield f"decision   {_decision(decision)}"
    yield f"to move    {format_size(result['bytes_to_move'])}"
    if decision["balance_now"] is None or decision["balance_predicted"] is None:
        return
    rows = [("", "now", "then", "slots that change")]
    moved, now, then = decision["moved_per_layer"], decision["balance_now"], decision["balance_predicted"]
    for stat in ("mean", "worst"):
        changed = str(sum(moved)) if stat == "mean" else ""
        rows.append((stat, f"{now[stat]:.3f}", f"{then[stat]:.3f}", changed))
    yield from table_lines(rows, "lrrr")


def done_lines(action: str, result: Json) -> Iterator[str]:
    run = result["run"]
    if action in ("apply", "stage", "commit", "abort", "reset") and run is not None:
        yield f"run        {_run(run)}"
    yield f"balance    mean {result['balance']['mean']:.3f}, worst layer {result['balance']['worst']:.3f}"
    yield f"mode       {result['mode']}"


def _run(run: Json) -> str:
    state = run["outcome"] if run["state"] == "free" else run["state"]
    ended = run["ended"] if run["ended"] is not None else time.time()
    layers = _count(run["layers_changed"], "layer")
    text = (
        f"{run['id']} {state}: {format_size(run['bytes_moved'])} moved, {layers} changed, "
        f"{ended - run['started']:.2f} s, of them {run['stall_s']:.3f} s without steps"
    )
    return text if run["error"] is None else f"{text}; {run['error']}"


def _decision(decision: Json) -> str:
    return f"{decision['action']}: {decision['reason']} ({decision['value']:.4g}, limit {decision['limit']:.4g})"


def _balance(balance: Json) -> str:
    return f"balance mean {balance['mean']:.3f}, worst layer {balance['worst']:.3f} (mean over ranks / most; 1 is even)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
