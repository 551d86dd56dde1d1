"""Four worker processes that stay alive from test to test, and the verdict on each test.

A test that fails on one rank leaves the others waiting for it, a test that hangs leaves all of them, and one that
crashes leaves three: then all four are killed and replaced.
"""

from __future__ import annotations

import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import rpctest_worker
from rpctest_worker import WORLD_SIZE, Case, Result

from rpcdist.testing import Pending, Worker, WorkerEnded, WorkerPool, WorkerTimeout, wait_for_any

__all__ = ["Fleet", "Outcome"]

# After the first rank failed, the others get this long to come to their own end.
GRACE_S = 4.0
TIDY_LIMIT_S = 30.0
START_LIMIT_S = 120.0
OUTPUT_TAIL_CHARS = 3000


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


class Fleet:
    """Four workers, started when first needed.

    Args:
        peer: whose RPC the tests run on, `rpcdist` or `torch`.
        fresh: start new workers for each test, as torch's own harness does.
    """

    def __init__(self, peer: str, *, fresh: bool = False) -> None:
        self.peer = peer
        self.fresh = fresh
        self.num_starts = 0
        self._pool = WorkerPool({"TORCH_SHOW_CPP_STACKTRACES": "1"})
        self._workers: list[Worker] = []

    def close(self) -> None:
        """Kill the workers and remove their files."""
        self._kill()
        self._pool.close()

    def run(self, suite: str, test: str, limit_s: float) -> Outcome:
        """Run one test on all four workers.

        Args:
            suite: a class of `rpctest_suites`.
            test: one of its methods.
            limit_s: seconds after which the test counts as hung.
        """
        if not self._workers:
            self._start()
        file = Path(self._pool.new_file())
        file.touch()
        case = Case(suite, test, str(file))
        started = time.monotonic()
        written = [worker.num_output_bytes() for worker in self._workers]
        pending = [worker.begin(rpctest_worker.run, case, rank) for rank, worker in enumerate(self._workers)]
        outcome = self._judge(str(case), pending, written, limit_s)
        outcome.seconds = time.monotonic() - started
        if self.fresh:
            self._kill()
        for leftover in file.parent.glob(f"{file.name}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return outcome

    def _judge(self, name: str, pending: list[Pending[Result]], written: list[int], limit_s: float) -> Outcome:
        results = _gather(pending, limit_s)
        used = {part for result in results for part in result.used}
        bad = {rank: result for rank, result in enumerate(results) if result.status in ("error", "crashed", "late")}
        if bad:
            return self._failed(name, bad, written)
        status = "skipped" if results[0].status == "skipped" else "passed"
        outcome = Outcome(name, status, 0.0, results[0].text, used)
        if not self.fresh:
            self._tidy(outcome)
        return outcome

    def _failed(self, name: str, bad: dict[int, Result], written: list[int]) -> Outcome:
        kinds = {result.status for result in bad.values()}
        status = "crashed" if "crashed" in kinds else "failed" if "error" in kinds else "timeout"
        parts = [f"--- rank {rank} ---\n{result.text}" for rank, result in bad.items()]
        for rank, (worker, before) in enumerate(zip(self._workers, written, strict=True)):
            if text := worker.output(before)[-OUTPUT_TAIL_CHARS:].strip():
                parts.append(f"--- output of rank {rank} ---\n{text}")
        self._kill()
        return Outcome(name, status, 0.0, "\n".join(parts))

    def _tidy(self, outcome: Outcome) -> None:
        """Have the workers clean up; a worker that cannot turns a passed test into a failed one."""
        tidying = [worker.begin(rpctest_worker.tidy, self.peer) for worker in self._workers]
        problems = {rank: text for rank, pending in enumerate(tidying) if (text := _problems(pending))}
        if problems:
            outcome.status = "failed"
            outcome.details = "\n".join(f"--- rank {rank}, after the test ---\n{t}" for rank, t in problems.items())
            self._kill()

    def _start(self) -> None:
        self.num_starts += 1
        environment = {"RPCDIST_TOKEN": secrets.token_hex(16)}
        self._workers = [self._pool.start(f"rank{rank}", environment) for rank in range(WORLD_SIZE)]
        try:
            for pending in [worker.begin(rpctest_worker.prepare, self.peer) for worker in self._workers]:
                pending.result(START_LIMIT_S)
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.alive:
                worker.kill()
            self._pool.discard(worker)
        self._workers.clear()


def _gather(pending: list[Pending[Result]], limit_s: float) -> list[Result]:
    """Wait for the answer of every rank; a rank that gave none is `crashed` or `late`."""
    limit = time.monotonic() + limit_s
    results: dict[Pending[Result], Result] = {}
    while left := [one for one in pending if one not in results]:
        for one in wait_for_any(left, max(0.0, limit - time.monotonic())) or left:
            results[one] = _result(one)
            if results[one].status in ("error", "crashed"):
                limit = min(limit, time.monotonic() + GRACE_S)
    return [results[one] for one in pending]


def _result(pending: Pending[Result]) -> Result:
    try:
        return pending.result(0.0)
    except WorkerEnded as exc:
        return Result("crashed", str(exc))
    except WorkerTimeout as exc:
        return Result("late", str(exc))


def _problems(pending: Pending[list[str]]) -> str:
    """The errors of one rank after it has cleaned up."""
    try:
        return "\n".join(pending.result(TIDY_LIMIT_S))
    except (WorkerEnded, WorkerTimeout) as exc:
        return str(exc)
