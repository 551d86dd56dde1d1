"""Processes that stay alive and act as the ranks of groups. A killed one is replaced when it is needed again.

A test calls `pool.run(size, function, *arguments)`: every one of the first `size` processes calls
`function(rank, size, *arguments)`, a function at the top of a module of this folder. Results come back by rank; what a
rank raised comes back as an exception. A process keeps what its functions store in `group_ranks.state`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 60.0
RUN_LIMIT_S = 60.0


class RankDied(Exception):
    """The process ended before it answered."""


class RankProcess:
    """One process; its standard input takes requests, a pipe of its own brings results."""

    def __init__(self, number: int, folder: Path) -> None:
        self.log = folder / f"rank{number}-{time.monotonic_ns()}.log"
        reading, writing = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RPCDIST_FLIGHT_RECORDER_DIR": str(folder / "flight")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("group_ranks.py")), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                cwd="/",
                env=environment,
            )
        os.close(writing)
        self._reading = reading

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: tuple[object, ...]) -> None:
        assert self.process.stdin is not None
        data = pickle.dumps(request)
        self.process.stdin.write(struct.pack("<Q", len(data)) + data)
        self.process.stdin.flush()

    def answer(self, limit: float) -> Any:
        """What the function returned, or the exception that it raised."""
        try:
            (size,) = struct.unpack("<Q", self._read(8, limit))
            return pickle.loads(self._read(size, limit))
        except RankDied as exc:
            return exc
        except TimeoutError as exc:
            if self.alive():
                self.process.send_signal(signal.SIGUSR1)  # the stacks of its threads go to its log
                time.sleep(0.3)
            self.kill()
            exc.add_note(self.log.read_text(errors="replace")[-6000:])
            return exc

    def _read(self, size: int, limit: float) -> bytes:
        data = b""
        while len(data) < size:
            if not select.select([self._reading], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise TimeoutError("a rank did not answer in time")
            part = os.read(self._reading, size - len(data))
            if not part:
                raise RankDied(f"the process ended with {self.process.wait(5)}")
            data += part
        return data

    def kill(self) -> None:
        if self.alive():
            self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (subprocess.TimeoutExpired, OSError):
            self.kill()
        os.close(self._reading)


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
            self._exempt(fresh.pid)
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
