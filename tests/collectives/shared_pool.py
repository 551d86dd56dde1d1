"""A pool of processes that form groups on shared memory; see `shared_worker`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from shared_worker import receive, send

from rpcdist.collectives._transports.shm import Layout
from rpcdist.transport import shared_memory
from rpcdist.transport.shared_memory import Segment

__all__ = ["SharedPool"]

LIMIT_S = 60.0


class SharedPool:
    """Workers start when they are first needed and stay. Use it in a `with` block."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._workers: list[socket.socket] = []
        program = Path(__file__).with_name("shared_worker.py")
        self._parent = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self._workers, self._control):
            sock.close()
        try:
            self._parent.wait(LIMIT_S)
        finally:
            self._parent.kill()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    def group(self, size: int, buffer_bytes: int) -> None:
        """The first `size` workers are a new group."""
        while len(self._workers) < size:
            self._workers.append(self._start())
        with Segment.create(Layout(size, buffer_bytes).total_bytes) as segment:
            for rank, sock in enumerate(self._workers[:size]):
                send(sock, ("join", (rank, size, buffer_bytes)))
                shared_memory.offer(sock, segment)
        assert [self.result(rank) for rank in range(size)] == [None] * size

    def start(self, rank: int, name: str, *arguments: object) -> None:
        """Calls a method of `Worker` on a rank; `result` waits for it."""
        send(self._workers[rank], (name, arguments))

    def result(self, rank: int) -> Any:
        outcome, value = receive(self._workers[rank])
        assert outcome == "result", f"rank {rank}: {value}"
        return value

    def call(self, size: int, name: str, *arguments: object) -> list[Any]:
        """The same on the first `size` ranks; results by rank."""
        for rank in range(size):
            self.start(rank, name, *arguments)
        return [self.result(rank) for rank in range(size)]

    def kill(self, rank: int) -> None:
        """Kills the worker; the next group has another one."""
        self.start(rank, "pid")
        os.kill(self.result(rank), signal.SIGKILL)
        self._workers.pop(rank).close()
