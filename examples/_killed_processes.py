"""Processes that are killed and replaced, for the examples that show what the others do meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from socket import socket
from typing import NoReturn, Self, TypeVar

from _shared import ONE_THREAD, ExampleOptions, announce

T = TypeVar("T")

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["rpcdist.rpc", "sklearn.datasets"])  # once, so a process starts in milliseconds


def replace_when_killed(function: Callable[[int, T], None], rank: int, options: T) -> NoReturn:
    """Calls the function in a new process, and in another one whenever that was killed; exits as the last one did."""
    while True:
        process = PROCESSES.Process(target=function, args=(rank, options))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            sys.exit(process.exitcode)


class KilledProcesses:
    """Calls `function(rank, *args)` in a process for each of `options.names`, which `replace` kills and starts again.

    They find each other as under any launcher, by MASTER_ADDR, MASTER_PORT and WORLD_SIZE.
    """

    def __init__(self, function: Callable[..., None], args: tuple[object, ...], options: ExampleOptions) -> None:
        self.function, self.args, self.options = function, args, options
        self.processes: list[ForkServerProcess] = []

    def start(self, rank: int) -> ForkServerProcess:
        process = PROCESSES.Process(target=self.function, args=(rank, *self.args))
        process.start()
        return process

    def __enter__(self) -> Self:
        announce(self.options)
        with socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(ONE_THREAD, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.processes = [self.start(rank) for rank in range(len(self.options.names))]
        return self

    def replace(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()
        self.processes[rank] = self.start(rank)

    def has_ended(self, rank: int, limit_s: float | None = None) -> bool:
        """Waits for a process. When one has failed, the program ends."""
        self.processes[rank].join(limit_s)
        for each, process in enumerate(self.processes):
            if process.exitcode not in (None, 0):
                raise SystemExit(f"the process of {self.options.names[each]} failed; see above")
        return self.processes[rank].exitcode == 0

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
