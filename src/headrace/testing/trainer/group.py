"""Rank 0 of a torch process group whose other member is the server, formed as trainers form it.

The trainer's broadcasts and the server's operation need each other, so the operation is asked for in a thread.
"""

from __future__ import annotations

import datetime
import importlib
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.testing.trainer.rollouts import Server

WORLD_SIZE = 2
TIMEOUT_S = 60.0


class TrainerGroup:
    """Made when both have met."""

    def __init__(self, server: Server) -> None:
        self.name = f"trainer-{secrets.token_hex(4)}"
        self._server = server
        self._thread = ThreadPoolExecutor(1)
        self._c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        make_store = importlib.import_module("torch.distributed").TCPStore
        store = make_store("127.0.0.1", 0, WORLD_SIZE, True, timeout, wait_for_workers=False)
        place = {"host": "127.0.0.1", "port": store.port, "rank_offset": 1, "world_size": WORLD_SIZE}
        joining = self._thread.submit(server.control, "join_group", **place, group_name=self.name, timeout_s=TIMEOUT_S)
        self._group, _ = self._c10d._new_process_group_helper(
            WORLD_SIZE,
            0,
            [],
            self._c10d.Backend("gloo"),
            self._c10d.PrefixStore(self.name, store),
            group_name=self.name,
            timeout=timeout,
        )
        self._c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(WORLD_SIZE)}
        joining.result()

    def broadcast(self, tensors: Sequence[Any], source: Mapping[str, Any], version: str) -> None:
        """One refresh. `source` says what comes, in the tensors' order."""
        refreshing = self._thread.submit(self._server.control, "refresh_weights", source=dict(source), version=version)
        for tensor in tensors:
            self._c10d.broadcast(tensor, src=0, group=self._group)
        refreshing.result()

    def close(self) -> None:
        """Both leave."""
        self._server.control("leave_group", group_name=self.name)
        self._c10d.destroy_process_group(self._group)
        self._thread.shutdown()
