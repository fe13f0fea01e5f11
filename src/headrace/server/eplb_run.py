"""Servers that change their expert maps together: what each does when it is told to, and the one that leads.

    leader        each server (the leader's own too)          its engine's run       FastDeploy's word
                                                              free                   FREE, DONE for 30 s after a commit
    begins        the leader's alone                          open                   DOING
    sums up       /get_per_expert_tokens_stats
    sends sum     /rearrange_experts recv_expert_weight       moving                 DOING
    asks          /check_redundant check_load_weight_result   staged                 LOAD_SUCC
    lets go       /rearrange_experts update_weight_from_tensor free, committed       DONE

All steps go to all servers at the same time. Until the last one, a server that fails or is late ends the run: all are
told to abort, and one that cannot be told gives it up when it has not heard of it for --eplb-timeout. Nothing of a run
is kept in a front end but the leader's task: the state is the engine's, under an id that travels in each body as `run`.
The sequence and its words are FastDeploy's (fastdeploy/eplb); the id, the abort and the time limit are not.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from headrace.errors import HeadraceError, RequestError
from headrace.processing.checks import shown
from headrace.server.context import ServerContext
from headrace.server.operate import control

logger = logging.getLogger(__name__)

DONE_S = 30.0  # for which a committed run shows as DONE
LOAD_TIMEOUT_S = 600.0
COMMIT_TIMEOUT_S = 30.0  # longer than the other calls': from here on there is no way back
FIRST_POLL_S, SLOWEST_POLL_S = 0.05, 0.5
ABORT_TRIES = 5
RUNNING, LOADED, FAILED = 0, 1, -1  # FastDeploy's results of loading
WORDS = {"open": "DOING", "moving": "DOING", "staged": "LOAD_SUCC"}

Report = dict[str, Any]


class RunFailed(HeadraceError):
    """A server could not do its part."""


def new_run_id() -> str:
    return f"run-{uuid.uuid4().hex[:16]}"


# ---------------------------------------------------------------------------------------------------------- each server


async def read_report(context: ServerContext, run_id: str | None = None) -> Report:
    """What the engine says of its experts. Whoever names a run has not gone silent."""
    return await control(context, "experts", **({} if run_id is None else {"run": run_id}))


def status_word(report: Report) -> str:
    run = report["run"]
    if run is None or run["state"] == "free":
        is_done = run is not None and run["outcome"] == "committed" and time.time() - run["ended"] < DONE_S
        return "DONE" if is_done else "FREE"
    return WORDS[run["state"]]


def load_results(report: Report, run_id: str | None) -> list[int]:
    """Of each rank. A run that is not known here has failed."""
    run = report["run"]
    if run is None or (run_id is not None and run["id"] != run_id):
        result = RUNNING if run_id is None else FAILED
    elif run["state"] == "staged" or run["outcome"] == "committed":
        result = LOADED
    else:
        result = FAILED if run["state"] == "free" else RUNNING
    return [result] * int(report["num_ranks"])


async def begin(context: ServerContext, run_id: str) -> None:
    """Takes this server's engine for a run. Raises Conflict if another run has it."""
    silence_s = context.config.eplb.eplb_timeout
    await control(context, "rebalance_experts", action="begin", run=run_id, silence_s=silence_s)


async def stage(context: ServerContext, tokens: list[list[int]], run_id: str | None) -> None:
    """Plans for these loads and brings the weights, after the answer."""
    run_id = run_id or new_run_id()
    await begin(context, run_id)  # a refusal is heard of at once, and no front end thinks this server free any more
    arguments = {"action": "stage", "run": run_id, "tokens": tokens, "timeout_s": LOAD_TIMEOUT_S, "wait": False}
    await control(context, "rebalance_experts", **arguments)


async def commit(context: ServerContext, run_id: str | None) -> None:
    named = {} if run_id is None else {"run": run_id}
    await control(context, "rebalance_experts", action="commit", **named)


async def abort(context: ServerContext, run_id: str) -> None:
    """The old map stays. A run that is over, or that is not known here, is no error."""
    for _ in range(ABORT_TRIES):  # it may go on from one state to the next meanwhile
        run = (await read_report(context))["run"]
        if run is None or run["id"] != run_id or run["state"] == "free":
            return
        if run["state"] != "moving":
            await control(context, "rebalance_experts", action="abort", run=run_id)
            return
        operation = (await control(context, "status"))["operation"]
        if operation is not None and operation["kind"] == "rebalance_experts":
            await control(context, "cancel", id=operation["id"])


# ----------------------------------------------------------------------------------------------------------- the leader


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The servers of a run, and how to be let in there."""

    http: httpx.AsyncClient
    addresses: Sequence[str]  # host:port
    run_id: str
    timeout_s: float
    credentials: dict[str, str] = field(default_factory=dict, repr=False)  # fields of each body
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    async def ask(self, path: str, **fields: Any) -> list[Report]:
        """All at once; the replies in the addresses' order. Raises RunFailed at the first that fails."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._ask(address, path, fields, self.timeout_s)) for address in self.addresses
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def tell(self, path: str, timeout_s: float, **fields: Any) -> list[str]:
        """All at once, however the others fare; what went wrong."""
        calls = [self._ask(address, path, fields, timeout_s) for address in self.addresses]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]

    async def _ask(self, address: str, path: str, fields: dict[str, Any], timeout_s: float) -> Report:
        body = {**self.credentials, "run": self.run_id, **fields}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.http.post(f"http://{address}{path}", json=body, headers=self.headers)
            reply = response.json()
        except TimeoutError:
            raise RunFailed(f"{address} did not answer {path} within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise RunFailed(f"{address} did not answer {path}: {type(error).__name__}: {error}") from None
        if response.status_code != 200 or not isinstance(reply, dict) or reply.get("code") != 0:
            raise RunFailed(f"{address} refused {path}: {response.status_code}, {shown(reply)}")
        return reply


async def lead(context: ServerContext, peers: Peers) -> None:
    """The whole run; this server's engine has begun it. It ends in the log, and in every server's state."""
    started_s = time.monotonic()
    names = ", ".join(peers.addresses)
    logger.info("experts: %s begins on %s", peers.run_id, names)
    try:
        await _bring(context, peers)
        failures = await peers.tell("/rearrange_experts", COMMIT_TIMEOUT_S, action="update_weight_from_tensor")
        if failures:
            logger.error("experts: %s is in force, but not where %s", peers.run_id, "; ".join(failures))
        else:
            logger.info("experts: %s is in force after %.2f s", peers.run_id, time.monotonic() - started_s)
    except HeadraceError as error:
        logger.error("experts: %s failed, the old maps stay: %s", peers.run_id, error)
        await peers.tell("/rearrange_experts", peers.timeout_s, action="abort")
        await _give_up(context, peers.run_id)
    else:
        await _give_up(context, peers.run_id, only_open=True)


async def _bring(context: ServerContext, peers: Peers) -> None:
    """Until the new map lies ready everywhere."""
    replies = await peers.ask("/get_per_expert_tokens_stats")
    stats = [_tokens(address, reply) for address, reply in zip(peers.addresses, replies, strict=True)]
    if len({tokens_LE.shape for tokens_LE in stats}) > 1:
        shapes = ", ".join(str(list(tokens_LE.shape)) for tokens_LE in stats)
        raise RunFailed(f"the servers have other layers and experts than one another: {shapes}")
    total: list[list[int]] = np.sum(stats, axis=0).tolist()
    await peers.ask("/rearrange_experts", action="recv_expert_weight", data=total)
    ends_s, pause_s = time.monotonic() + LOAD_TIMEOUT_S, FIRST_POLL_S
    while True:
        await read_report(context, peers.run_id)  # the leader lives
        replies = await peers.ask("/check_redundant", action="check_load_weight_result")
        results: list[Any] = [reply.get("data") for reply in replies]
        for address, result in zip(peers.addresses, results, strict=True):
            if not isinstance(result, list) or not result or FAILED in result:
                raise RunFailed(f"{address} could not bring the weights: {shown(result)}")
        if all(each == LOADED for result in results for each in result):
            return
        if time.monotonic() > ends_s:
            raise RunFailed(f"the weights were not there after {LOAD_TIMEOUT_S:g} s: {shown(results)}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, SLOWEST_POLL_S)


def _tokens(address: str, reply: Report) -> np.ndarray:
    """Over a server's ranks: [layers, experts]. Raises RunFailed."""
    try:
        tokens_RLE = np.array(reply.get("data"))
    except ValueError:  # rows of different lengths
        tokens_RLE = np.zeros(0)
    if tokens_RLE.ndim != 3 or not tokens_RLE.size or tokens_RLE.dtype.kind not in "iu" or tokens_RLE.min() < 0:
        raise RunFailed(f"{address} answered something else than [ranks][layers][experts] of counts")
    tokens_LE: np.ndarray = tokens_RLE.sum(axis=0)
    return tokens_LE


async def _give_up(context: ServerContext, run_id: str, *, only_open: bool = False) -> None:
    """Where this server is not among the addresses, nobody has ended what it began."""
    try:
        if not only_open or status_word(await read_report(context)) == "DOING":
            await abort(context, run_id)
    except RequestError as error:
        logger.warning("experts: %s could not be aborted here: %s", run_id, error.message)
