"""FastDeploy's three routes of expert balancing; `server/eplb_run.py` has the run that they are steps of.

    {"code": 0 or 1, "msg"} with "data" or "status". Refused in this order: expert parallelism is off (400), wrong
    `user` and `passwd` (401), then what the body asks (400; 500 where FastDeploy's buffer of addresses would overflow)

An admin key opens them as well. Without any of the two they answer on loopback alone, like every control route. What
is additional: `run` in a body names the run that is meant, and the action `abort` ends it. FastDeploy also refuses
ranks other than 0; here a front end always speaks for all ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from typing import Any, TypeVar

import httpx
import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from headrace.eplb import ExpertMap
from headrace.errors import AuthenticationFailed, ErrorInfo, InvalidRequest
from headrace.processing.checks import refusal, shown
from headrace.server import eplb_run
from headrace.server.body import decode_object, parse_model
from headrace.server.context import ServerContext, context_of
from headrace.server.dialects.errors import answering
from headrace.server.errors import error_response, json_response
from headrace.server.keys import is_admin, require_admin
from headrace.server.operate import control
from headrace.server.protocol.common import RequestModel

MAX_ADDRESS_BYTES = 1024  # joined by semicolons: FastDeploy's default
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MAX_PORT = 65535

Model = TypeVar("Model", bound=RequestModel)


def _reply(status: int = 200, msg: str = "ok", **fields: Any) -> Response:
    return json_response({"code": 0 if status == 200 else 1, "msg": msg, **fields}, status)


def _error_reply(info: ErrorInfo) -> Response:
    if info.status == 403:
        return error_response(info)  # nobody is let in here: the server's own refusal
    return _reply(400 if info.status == 409 else info.status, info.message)


router = APIRouter(route_class=answering(_error_reply, own_access=True), include_in_schema=False)


class Credentials(RequestModel):
    user: str | None = None
    passwd: str | None = None
    run: str | None = Field(None, min_length=1, max_length=128)


class RearrangeRequest(Credentials):
    action: str | None = None
    ips: Any = None
    data: Any = None


class StatsRequest(Credentials):
    clear_stat: bool | int | None = None


class CheckRequest(Credentials):
    action: str | None = None
    check_get_workloads: bool | int | None = None


@router.post("/rearrange_experts")
async def rearrange(request: Request) -> Response:
    body = await _admitted(request, RearrangeRequest)
    context = context_of(request)
    match body.action or "":
        case "":
            return await _start(request, body.ips)
        case "recv_expert_weight":
            if not isinstance(body.data, list):
                raise InvalidRequest("data is missing or no list.", param="data")
            report = await eplb_run.read_report(context)
            _need_status(report, "FREE", "DONE", begun=body.run)
            await eplb_run.stage(context, _loads(body.data, report), body.run)
        case "update_weight_from_tensor":
            _need_status(await eplb_run.read_report(context), "LOAD_SUCC")
            await eplb_run.commit(context, body.run)
        case "abort":
            if body.run is None:
                raise InvalidRequest("run, which names the run to abort, is missing.", param="run")
            await eplb_run.abort(context, body.run)
        case unknown:
            raise refusal(
                "action", unknown, "recv_expert_weight, update_weight_from_tensor, abort, or empty together with ips"
            )
    return _reply()


@router.post("/get_per_expert_tokens_stats")
async def token_stats(request: Request) -> Response:
    """By rank, since they were last cleared: [ranks][layers with experts][experts]."""
    body = await _admitted(request, StatsRequest)
    reply = await control(context_of(request), "expert_tokens", clear=bool(body.clear_stat))
    return _reply(data=reply["tokens"])


@router.post("/check_redundant")
async def check(request: Request) -> Response:
    body = await _admitted(request, CheckRequest)
    context = context_of(request)
    if body.action not in (None, "", "check_load_weight_result"):
        raise refusal("action", body.action, "check_load_weight_result, or empty")
    report = await eplb_run.read_report(context, body.run)
    if body.action:
        return _reply(data=eplb_run.load_results(report, body.run))
    workloads = {"data": _workloads(context, report)} if body.check_get_workloads else {}
    return json_response({"code": 0, "msg": "ok", "status": eplb_run.status_word(report), **workloads})


# --------------------------------------------------------------------------------------------------------- who may call


async def _admitted(request: Request, model: type[Model]) -> Model:
    """The body, of somebody who may."""
    context = context_of(request)
    parallel, eplb = context.config.engine.parallel, context.config.eplb
    has_login = eplb.eplb_user is not None
    if not has_login and not context.keys.has_admin_keys:
        await require_admin(request)  # on loopback alone
    if not parallel.enable_expert_parallel or parallel.tensor_parallel_size == 1:
        raise InvalidRequest(
            "Experts are not balanced here: it needs --enable-expert-parallel and several ranks.",
            code="not_expert_parallel",
        )
    raw = await request.body()
    data = decode_object(raw) if raw.strip() else {}
    if has_login and not is_admin(request):
        wanted = (eplb.eplb_user, eplb.eplb_password)
        matches = [_same(data.get(name), value) for name, value in zip(("user", "passwd"), wanted, strict=True)]
        if not all(matches):
            raise AuthenticationFailed("user or passwd is wrong.")
    elif not has_login:
        await require_admin(request)
    return parse_model(request, model, data)


def _same(given: Any, wanted: str | None) -> bool:
    """In constant time."""
    texts = (given if isinstance(given, str) else "", wanted or "")
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in texts)
    return hmac.compare_digest(*digests)


# ------------------------------------------------------------------------------------------------------------ the start


async def _start(request: Request, ips: Any) -> Response:
    context = context_of(request)
    _need_status(await eplb_run.read_report(context), "FREE", "DONE")
    if ips is None:
        raise InvalidRequest("ips, the addresses of all servers, is missing.", param="ips")
    addresses = _addresses(ips)
    num_bytes = len(";".join(addresses))
    if num_bytes > MAX_ADDRESS_BYTES:
        return _reply(500, f"ips take {num_bytes} bytes; {MAX_ADDRESS_BYTES} is the most.")
    run_id = eplb_run.new_run_id()
    await eplb_run.begin(context, run_id)
    task = asyncio.create_task(_lead(context, addresses, run_id, _forwarded(request)), name=run_id)
    context.tasks.add(task)
    task.add_done_callback(context.tasks.discard)
    return _reply()


async def _lead(context: ServerContext, addresses: list[str], run_id: str, headers: dict[str, str]) -> None:
    eplb = context.config.eplb
    login = {"user": eplb.eplb_user or "", "passwd": eplb.eplb_password or ""}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:  # Peers keeps the time
        peers = eplb_run.Peers(
            http=http,
            addresses=addresses,
            run_id=run_id,
            timeout_s=eplb.eplb_call_timeout,
            credentials=login,
            headers=headers,
        )
        await eplb_run.lead(context, peers)


def _forwarded(request: Request) -> dict[str, str]:
    """Where there is no login, the caller's key opens the other servers as it did this one."""
    has_login = context_of(request).config.eplb.eplb_user is not None
    names = () if has_login else ("authorization", "x-api-key")
    return {name: request.headers[name] for name in names if name in request.headers}


def _addresses(ips: Any) -> list[str]:
    if not isinstance(ips, list) or not ips:
        raise refusal("ips", ips, "a list of host:port, at least one")
    for index, address in enumerate(ips):
        match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 1 <= int(match[2]) <= MAX_PORT:
            raise refusal(f"ips[{index}]", address, "host:port")
        if address in ips[:index]:
            raise InvalidRequest(f"ips[{index}], {shown(address)}, is there twice.", param=f"ips[{index}]")
    return ips


# --------------------------------------------------------------------------------------------------------------- bodies


def _need_status(report: eplb_run.Report, *wanted: str, begun: str | None = None) -> None:
    """`begun`: the run that may have been begun here already."""
    word, run = eplb_run.status_word(report), report["run"]
    is_begun = begun is not None and run is not None and run["id"] == begun and run["state"] == "open"
    if word not in wanted and not is_begun:
        raise InvalidRequest(f"The status is {word}; it must be {' or '.join(wanted)}.", code="wrong_status")


def _loads(data: list[Any], report: eplb_run.Report) -> list[list[int]]:
    num_layers, num_experts = report["num_layers"], report["num_experts"]
    try:
        tokens = msgspec.convert(data, list[list[int]])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"data: {error}.", param="data") from None
    if len(tokens) != num_layers or any(len(row) != num_experts for row in tokens):
        raise InvalidRequest(
            f"data must be {num_layers} lists (layers with experts) of {num_experts} numbers (experts).", param="data"
        )
    if any(not 0 <= value < 1 << 53 for row in tokens for value in row):
        raise InvalidRequest("data must hold numbers from 0 to 2^53.", param="data")
    return tokens


def _workloads(context: ServerContext, report: eplb_run.Report) -> dict[str, Any]:
    """FastDeploy's file of the last rearrangement; here of the map in force."""
    run = report["run"]
    current = ExpertMap(report["slots"], report["num_experts"], report["num_ranks"])
    return {
        "update_timestamp": context.created if run is None else run["ended"] or run["started"],
        "tokens_per_expert_stats_list": report["tokens"],
        "ep_rank_to_expert_id_list": report["slots"],
        "expert_id_to_ep_rank_array": current.replicas_LEC.tolist(),
        "expert_in_rank_num_list": current.num_replicas_LE.tolist(),
        "cost_milliseconds": 0 if run is None else round(run["stall_s"] * 1000),
    }
