"""Processes that stay alive and act as the ranks of groups. A killed one is replaced when it is needed again.

A test calls `pool.run(size, function, *arguments)`: every one of the first `size` processes calls
`function(rank, size, *arguments)`, a function at the top of a module of this folder. Results come back by rank; what a
rank raised comes back as an exception. A process keeps what its functions store in `group_ranks.state`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import group_ranks
import pytest

RUN_LIMIT_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["__main__", "torch", "rpcdist.collectives", "rpcdist.collectives.tcp"])
"""Importing torch takes seconds. A process that has done so, and nothing else, is forked for every new rank."""


class RankDied(Exception):
    """The process ended before it answered."""


class RankProcess:
    """One process, which takes requests and answers them."""

    def __init__(self, number: int, folder: Path) -> None:
        self.log = folder / f"rank{number}-{time.monotonic_ns()}.log"
        self._asked = 0
        self._connection, theirs = _context.Pipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # for the process that is forked, at the first time
            self.process = _context.Process(
                target=group_ranks.serve, args=(theirs, str(self.log), str(folder / "flight")), name=f"rank {number}"
            )
            self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process.is_alive()

    def wait(self, limit_s: float) -> int | None:
        """Waits for its end; the exit code, or minus the signal that ended it, or None if it lives on."""
        self.process.join(limit_s)
        return self.process.exitcode

    def ask(self, request: tuple[object, ...]) -> None:
        self._asked += 1
        self._connection.send_bytes(pickle.dumps((self._asked, *request)))

    def answer(self, limit: float) -> Any:
        """What the newest function returned, or the exception that it raised, or `RankDied` or `TimeoutError`."""
        ends: list[Connection | int] = [self._connection, self.process.sentinel]
        while True:
            if not multiprocessing.connection.wait(ends, max(0.0, limit - time.monotonic())):
                return self._too_late()
            try:
                if not self._connection.poll():
                    raise EOFError
                number, answer = pickle.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionError):
                return RankDied(f"the process ended with {self.wait(5)}")
            if number == self._asked:  # a test that failed may have left others
                return answer

    def _too_late(self) -> TimeoutError:
        os.kill(self.pid, signal.SIGUSR1)  # the stacks of its threads go to its log
        time.sleep(0.3)
        self.kill()
        error = TimeoutError("a rank did not answer in time")
        error.add_note(self.log.read_text(errors="replace")[-6000:])
        return error

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        self._connection.close()
        if self.wait(10) is None:
            self.kill()
        self.process.close()


class GroupPool:
    """The processes."""

    def __init__(self, folder: Path, exempt: Callable[[int], object]) -> None:
        self.folder = folder
        self.ranks: list[RankProcess] = []
        self._exempt = exempt
        self._rendezvous = 0

    def new_file(self) -> str:
        """A path for a file store that nobody used before."""
        self._rendezvous += 1
        return str(self.folder / f"store{self._rendezvous}")

    def prepare(self, size: int) -> None:
        """Sees to it that the first `size` processes live."""
        for number in range(size):
            if number < len(self.ranks) and self.ranks[number].alive():
                continue
            fresh = RankProcess(number, self.folder)
            server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
            self._exempt(server)
            if number < len(self.ranks):
                self.ranks[number].close()
                self.ranks[number] = fresh
            else:
                self.ranks.append(fresh)

    def start(self, size: int, function: Callable[..., object], *arguments: object) -> None:
        """Asks the ranks; `finish` collects the answers."""
        self.prepare(size)
        for rank in range(size):
            self.ranks[rank].ask((function.__module__, function.__qualname__, rank, size, arguments))

    def finish(self, size: int, limit_s: float = RUN_LIMIT_S) -> list[Any]:
        limit = time.monotonic() + limit_s
        return [self.ranks[rank].answer(limit) for rank in range(size)]

    def run(self, size: int, function: Callable[..., object], *arguments: object, limit_s: float = RUN_LIMIT_S) -> Any:
        """Results by rank; raises the first exception of a rank."""
        self.start(size, function, *arguments)
        answers = self.finish(size, limit_s)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="session")
def group_pool(job_token: str, leak_guard: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupPool]:
    pool = GroupPool(tmp_path_factory.mktemp("groups"), leak_guard.exempt_child)
    yield pool
    pool.close()
