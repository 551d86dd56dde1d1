"""Groups on shared memory whose members are the ranks of `rank_pool`."""

from __future__ import annotations

import secrets
import signal
import socket
from typing import Any

import shm_members

from rpcdist.collectives._transports.shm.routes import Layout
from rpcdist.testing import LIMIT_S, Pending, RankPool
from rpcdist.transport import shared_memory
from rpcdist.transport.shared_memory import Segment

__all__ = ["ShmGroup"]


class ShmGroup:
    """The newest group; its methods call those of `shm_members.Member` on the ranks."""

    def __init__(self, rank_pool: RankPool) -> None:
        self._pool = rank_pool
        self._pending: dict[int, Pending[Any]] = {}

    def open(self, size: int, buffer_bytes: int) -> None:
        """The first `size` ranks are a new group."""
        address = f"\0rpcdist-test-{secrets.token_hex(8)}"
        with Segment.create(Layout(size, buffer_bytes).total_bytes) as segment, socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(size)
            server.settimeout(LIMIT_S)
            joining = self._pool.begin(size, shm_members.join, address, buffer_bytes)
            for _ in range(size):
                sock, _ = server.accept()
                with sock:
                    shared_memory.offer(sock, segment)
            self._pool.finish(joining)

    def start(self, rank: int, name: str, *arguments: object) -> None:
        """Calls a method on one rank; `result` waits for it."""
        self._pending[rank] = self._pool[rank].begin(shm_members.call, rank, 0, name, *arguments)

    def result(self, rank: int) -> Any:
        return self._pending.pop(rank).result()

    def call(self, size: int, name: str, *arguments: object) -> list[Any]:
        """Calls a method on the first `size` ranks; the results by rank."""
        return self._pool.run(size, shm_members.call, name, *arguments)

    def pid(self, rank: int) -> int:
        return self._pool[rank].pid

    def kill(self, rank: int) -> None:
        """Kills a rank in whatever it does; the next group has another process in its place."""
        self._pool[rank].signal(signal.SIGKILL)
