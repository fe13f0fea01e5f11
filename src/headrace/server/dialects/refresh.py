"""One weight refresh out of many calls of a trainer, as every dialect needs it.

Several front ends share the engine, so nothing is remembered here: whether a refresh is open, what runs and how it
ended are questions to the engine. A call that fails ends the open refresh, and its error says which weights serve on.
Routes call these functions; the engine holds the rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headrace.errors import FailedRequest, InvalidRequest, RequestError
from headrace.server.context import ServerContext
from headrace.server.operate import control

POLL_S = 0.02
IN_BACKGROUND = frozenset({"apply_refresh", "join_group"})
CONFLICT = 409

Result = dict[str, Any]


async def engine_status(context: ServerContext) -> dict[str, Any]:
    return await control(context, "status")


async def weights_version(context: ServerContext) -> str:
    return str((await engine_status(context))["version"])


async def operate(context: ServerContext, operation: str, **arguments: Any) -> Result:
    """Runs an operation, without the arguments that are None; what its first rank says."""
    given = {name: value for name, value in arguments.items() if value is not None}
    done = await control(context, operation, **given)
    result: Result = (done.get("result") or [{}])[0]
    return result


async def join_group(context: ServerContext, arguments: dict[str, Any], *, wait: bool = True) -> None:
    """Meets a trainer. One that comes again has seldom left the group of its name, so that is done here."""
    await operate(context, "leave_group", group_name=arguments["group_name"])
    await operate(context, "join_group", **arguments, wait=None if wait else False)


async def add_tensors(
    context: ServerContext, source: dict[str, Any], *, mode: str | None = None, wait: bool = True
) -> Result:
    """Takes in some tensors; opens a refresh if none is. `wait=False`: the tensors come after the answer."""
    if (await engine_status(context))["refresh"] is None:
        await operate(context, "begin_refresh", mode=mode)
    async with ends_refresh(context):
        return await operate(context, "apply_refresh", source=source, wait=None if wait else False)


async def commit(context: ServerContext, *, version: str | None = None, mode: str | None = None) -> Result:
    """The new weights serve. KV that the old ones computed is computed again, whatever a dialect says about caches."""
    async with ends_refresh(context):
        return await operate(context, "commit_refresh", version=version, mode=mode)


async def commit_if_open(context: ServerContext, *, version: str | None = None) -> Result | None:
    """For calls that come after the last tensor in some dialects; None when no refresh is open."""
    if (await engine_status(context))["refresh"] is None:
        return None
    return await commit(context, version=version)


async def load_path(
    context: ServerContext, path: str, *, version: str | None = None, mode: str | None = None, kv: str | None = None
) -> Result:
    """A whole refresh from a folder or file that the engine can read."""
    async with ends_refresh(context):
        source = {"kind": "path", "path": path}
        return await operate(context, "refresh_weights", source=source, version=version, mode=mode, kv=kv)


async def wait_for_background(context: ServerContext) -> None:
    """Until what was begun with `wait=False` has ended. Raises InvalidRequest if the newest of it has failed."""
    while True:
        running = (await engine_status(context))["operation"]
        if running is None or running["kind"] not in IN_BACKGROUND:
            break
        await asyncio.sleep(POLL_S)
    operations = (await control(context, "operations"))["operations"]
    newest = operations[0] if operations else None
    if newest is not None and newest["kind"] in IN_BACKGROUND and newest["state"] != "succeeded":
        error = newest["error"]
        reason = error["message"] if isinstance(error, dict) else error
        raise InvalidRequest(f"{newest['kind']} {newest['id']} {newest['state']}: {reason}")


@asynccontextmanager
async def ends_refresh(context: ServerContext) -> AsyncIterator[None]:
    """What fails inside ends the open refresh. A conflict does not: the refresh may be another caller's."""
    try:
        yield
    except RequestError as error:
        info = error.info()
        if info.status == CONFLICT:
            raise
        message = f"{info.message.rstrip('.')}. {await _abort_refresh(context)}"
        raise FailedRequest(msgspec.structs.replace(info, message=message)) from error


async def _abort_refresh(context: ServerContext) -> str:
    """Which weights serve on after it, as a sentence."""
    try:
        await operate(context, "abort_refresh")
        status = await engine_status(context)
    except RequestError as error:
        return f"The refresh could not be aborted: {error.message}"
    if status["state"] == "poisoned":
        return f"The refresh was aborted and the weights are poisoned: {status['reason']}; send all of them again."
    return f"The refresh was aborted; the old weights (version {status['version']}) serve on."
