"""The work of `headrace run-batch`: so many lines at once are sent, and each answer is written as soon as it is there.

What a request gets as its answer, good or bad, is a result. What says nothing about the request (a full queue, a server
that is starting or gone) is tried again for a while, and then ends the run, so that the line stays open for the next.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Final

import httpx

from headrace.cli.run_batch_lines import BadLine, Job, Result, refusal, result_of
from headrace.cli.run_batch_output import OutputLines
from headrace.errors import StartupError

TRY_AGAIN: Final = frozenset({429, 502, 503})
FINAL_CODES: Final = frozenset({"engine_dead", "insufficient_quota"})  # of those: no use in trying again
FIRST_RETRY_S: Final = 1.0
SLOWEST_RETRY_S: Final = 30.0
REQUEST_ID: Final = "X-Request-Id"


async def answer_all(
    lines: Iterable[Job | BadLine],
    output: OutputLines,
    http: httpx.AsyncClient,
    *,
    concurrency: int,
    retries: int,
    on_line: Callable[[], None],
) -> None:
    """Writes a result for each line that has none. `on_line`: one more is done. Raises StartupError, as above."""
    todo = iter(lines)

    async def work() -> None:
        for line in todo:
            if not output.has(line):
                output.write(await _answer(http, line, retries))
            on_line()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer(http: httpx.AsyncClient, line: Job | BadLine, retries: int) -> Result:
    if isinstance(line, BadLine):
        return refusal(line)
    response = await _send(http, line, retries)
    return result_of(line, response.status_code, response.headers.get(REQUEST_ID, ""), response.content)


async def _send(http: httpx.AsyncClient, job: Job, retries: int) -> httpx.Response:
    for attempt in itertools.count():
        response: httpx.Response | None = None
        try:
            response = await http.post(job.url, content=job.body, headers={"Content-Type": "application/json"})
            if response.status_code not in TRY_AGAIN:
                break
            why, is_final = _refusal_of(response)
        except httpx.TransportError as error:
            why, is_final = str(error) or type(error).__name__, False
        if is_final or attempt == retries:
            raise StartupError(f"the server takes no more requests: {why} (the same command goes on from here)")
        await asyncio.sleep(_pause_s(response, attempt))
    assert response is not None, "the loop ends with one"
    return response


def _refusal_of(response: httpx.Response) -> tuple[str, bool]:
    """(why, whether it will stay so)."""
    try:
        error = response.json()["error"]
        return str(error["message"]), error.get("code") in FINAL_CODES
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"status {response.status_code}", False


def _pause_s(response: httpx.Response | None, attempt: int) -> float:
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    seconds = float(asked) if asked.isdecimal() else FIRST_RETRY_S * 2.0 ** min(attempt, 10)
    return min(seconds, SLOWEST_RETRY_S)
