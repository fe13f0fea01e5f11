"""What some work leaves for the garbage collector: objects in cycles, which stay until it comes and stops all else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

TRIES = 3
_OURS = ("headrace/", "uvicorn/", "fastapi/", "starlette/")


@contextmanager
def collecting() -> Iterator[list[str]]:
    """At its end the list has the names of what the block has left that is the product's, or its server's.

    Work that is done for the first time leaves things that are made once: do it before. What somebody else lets go
    meanwhile is found too, once; what the work itself leaves, it leaves each of `TRIES` times.
    """
    names: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield names
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names += filter(None, map(_name, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name(found: object) -> str | None:
    code = getattr(found, "f_code", None) or getattr(found, "cr_code", None)
    where = code.co_filename if code is not None else type(found).__module__.replace(".", "/") + "/"
    if not any(package in where for package in _OURS):
        return None
    name: str = type(found).__qualname__ if code is None else code.co_qualname
    return name
