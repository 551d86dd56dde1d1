"""Four worker processes that stay alive from test to test, and the verdict on each test.

The process that uses this module forks the workers, so it has to have one thread only and no RPC of its own: run it
through `run_conformance.py`. A test that fails on one rank leaves the others waiting for it, a test that hangs leaves
all of them, and one that crashes leaves three: then all four are killed, by their ids, and started anew.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from rpctest_worker import WORLD_SIZE, Case, Result, Tidy, serve

__all__ = ["Fleet", "Outcome"]

# After the first rank failed, the others get this long to come to their own end.
GRACE_S = 4.0
TIDY_LIMIT_S = 30.0
START_LIMIT_S = 120.0
LOG_TAIL_CHARS = 3000
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Outcome:
    """The verdict on one test: `passed`, `skipped`, `failed`, `timeout` or `crashed`."""

    name: str
    status: str
    seconds: float
    details: str = ""
    used: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Whether it neither passed nor was skipped."""
        return self.status not in ("passed", "skipped")


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    connection: Connection
    log: Path
    log_start: int = 0
    reaped: bool = False

    def how_it_ended(self) -> str:
        """Wait for the end of a process that closed its connection, and say how it ended."""
        _, status = os.waitpid(self.pid, 0)
        self.reaped = True
        code = os.waitstatus_to_exitcode(status)
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        self.connection.close()
        if not self.reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.reaped = True


class Fleet:
    """Four workers, started when first needed.

    Args:
        peer: whose RPC the tests run on, `rpcdist` or `torch`.
        fresh: start the workers anew for each test, as torch's own harness does.
    """

    def __init__(self, peer: str, *, fresh: bool = False) -> None:
        self.peer = peer
        self.fresh = fresh
        self.num_starts = 0
        self._workers: list[_Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="rpcdist-conformance-"))

    def close(self) -> None:
        """Kill the workers and remove their files."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, suite: str, test: str, limit_s: float) -> Outcome:
        """Run one test on all four workers.

        Args:
            suite: a class of `rpctest_suites`.
            test: one of its methods.
            limit_s: seconds after which the test counts as hung.
        """
        if not self._workers:
            self._start()
        file = self._folder / f"init-{self.num_starts}-{secrets.token_hex(4)}"
        file.touch()
        case = Case(suite, test, str(file))
        started = time.monotonic()
        for worker in self._workers:
            worker.log_start = worker.log.stat().st_size
            worker.connection.send(case)
        outcome = self._judge(str(case), limit_s)
        outcome.seconds = time.monotonic() - started
        if self.fresh:
            self._kill()
        for leftover in self._folder.glob(f"{file.name}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return outcome

    def _judge(self, name: str, limit_s: float) -> Outcome:
        results, late = self._gather(limit_s)
        used = {part for result in results.values() if isinstance(result, Result) for part in result.used}
        errors = {rank: result.text for rank, result in results.items() if result.status == "error"}
        crashed = {rank: result.text for rank, result in results.items() if result.status == "crashed"}
        if errors or crashed or late:
            return self._failed(name, {**errors, **crashed}, late, bool(crashed), bool(errors))
        status = "skipped" if results[0].status == "skipped" else "passed"
        outcome = Outcome(name, status, 0.0, results[0].text, used)
        if not self.fresh:
            self._tidy(outcome)
        return outcome

    def _failed(self, name: str, texts: dict[int, str], late: list[_Worker], crashed: bool, failed: bool) -> Outcome:
        for worker in late:
            texts[worker.rank] = "did not finish; its threads:\n" + self._stacks(worker)
        status = "crashed" if crashed else "failed" if failed else "timeout"
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(texts.items())]
        parts += [f"--- output of rank {w.rank} ---\n{text}" for w in self._workers if (text := _tail(w))]
        self._kill()
        return Outcome(name, status, 0.0, "\n".join(parts))

    def _gather(self, limit_s: float) -> tuple[dict[int, Result], list[_Worker]]:
        """Wait for the answer of every rank; return the answers, and the workers that gave none."""
        deadline = time.monotonic() + limit_s
        results: dict[int, Result] = {}
        pending = list(self._workers)
        while pending and (left_s := deadline - time.monotonic()) > 0:
            ready = wait([worker.connection for worker in pending], left_s)
            for worker in [worker for worker in pending if worker.connection in ready]:
                pending.remove(worker)
                results[worker.rank] = result = self._receive(worker)
                if result.status in ("error", "crashed"):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return results, pending

    def _receive(self, worker: _Worker) -> Result:
        try:
            result = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            return Result("crashed", f"the process ended by itself, {worker.how_it_ended()}")
        assert isinstance(result, Result)
        return result

    def _tidy(self, outcome: Outcome) -> None:
        """Have the workers clean up; a worker that cannot turns a passed test into a failed one."""
        deadline = time.monotonic() + TIDY_LIMIT_S
        problems: dict[int, str] = {}
        for worker in self._workers:
            worker.connection.send(Tidy())
        for worker in self._workers:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                problems[worker.rank] = "did not finish cleaning up; its threads:\n" + self._stacks(worker)
                continue
            try:
                found = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                found = [f"ended while cleaning up, {worker.how_it_ended()}"]
            if found:
                problems[worker.rank] = "\n".join(found)
        if problems:
            outcome.status = "failed"
            outcome.details = "\n".join(f"--- rank {rank}, after the test ---\n{t}" for rank, t in problems.items())
            self._kill()

    def _start(self) -> None:
        self.num_starts += 1
        token = secrets.token_hex(16)
        try:
            for rank in range(WORLD_SIZE):
                self._workers.append(self._fork(rank, token))
            for worker in self._workers:
                if not worker.connection.poll(START_LIMIT_S):
                    raise RuntimeError(f"rank {worker.rank} did not start:\n{self._stacks(worker)}")
                try:
                    worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    raise RuntimeError(f"rank {worker.rank} did not start:\n{worker.log.read_text()}") from None
        except BaseException:
            self._kill()
            raise

    def _fork(self, rank: int, token: str) -> _Worker:
        mine, theirs = Pipe()
        log = self._folder / f"rank{rank}.log"
        log.write_bytes(b"")
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(rank, pid, mine, log)
        # The child. It never returns into the parent's code, whatever happens.
        code = 1
        try:
            mine.close()
            for other in self._workers:
                other.connection.close()
            self._become_worker(log, token)
            serve(theirs, rank, self.peer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_worker(self, log: Path, token: str) -> None:
        # A worker that hangs in a test has to end with the process that would have killed it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ["RPCDIST_TOKEN"] = token
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"

    def _stacks(self, worker: _Worker) -> str:
        """Ask a worker for the stacks of its threads, which it writes to its log."""
        before = worker.log.stat().st_size
        os.kill(worker.pid, signal.SIGUSR1)
        # The signal's handler is C code that runs at once; there is nothing that reports its end.
        size, end = before, time.monotonic() + 2.0
        while time.monotonic() < end:
            time.sleep(0.1)
            grown = worker.log.stat().st_size
            if grown == size > before:
                break
            size = grown
        with worker.log.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


def _tail(worker: _Worker) -> str:
    with worker.log.open("rb") as file:
        file.seek(worker.log_start)
        return file.read().decode(errors="replace")[-LOG_TAIL_CHARS:].strip()
