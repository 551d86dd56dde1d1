"""Workers that stay alive from test to test and act as the ranks of groups; a dead or hung one is replaced.

    ranks = RankPool()
    ranks.run(3, my_module.all_reduce_ones, ranks.new_file())   # calls all_reduce_ones(rank, 3, path) on ranks 0, 1, 2

A worker keeps what its functions store in their modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rpcdist.testing.limits import END_LIMIT_S, LIMIT_S
from rpcdist.testing.worker import Pending, Worker, WorkerTimeout
from rpcdist.testing.worker_pool import WorkerPool

__all__ = ["RankPool"]

T = TypeVar("T")


class RankPool:
    """Workers by rank; they start when they are first needed.

    Args:
        environment: variables that all workers get in addition to those of this process; None removes one.

    Attributes:
        workers: the process of each rank.
    """

    def __init__(self, environment: Mapping[str, str | None] | None = None) -> None:
        self.workers: list[Worker] = []
        self._pool = WorkerPool(environment)
        self._written: dict[Worker, int] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def new_file(self) -> str:
        """A path that nobody has used before, for a file store."""
        return self._pool.new_file()

    def new_url(self) -> str:
        """An `init_method` for a new job."""
        return self._pool.new_url()

    def prepare(self, size: int) -> list[Worker]:
        """The workers of the first `size` ranks, all alive and idle."""
        while len(self.workers) < size:
            self.workers.append(self._new(len(self.workers)))
        for rank, worker in enumerate(self.workers[:size]):
            if not worker.alive or not worker.is_idle(END_LIMIT_S):  # what a failed test has left hanging is killed
                self._pool.discard(worker)
                self.workers[rank] = self._new(rank)
        self._written = {worker: worker.num_output_bytes() for worker in self.workers[:size]}
        return self.workers[:size]

    def begin(self, size: int, function: Callable[..., T], *args: Any) -> list[Pending[T]]:
        """Has the first `size` ranks call `function(rank, size, *args)`, and does not wait."""
        return [worker.begin(function, rank, size, *args) for rank, worker in enumerate(self.prepare(size))]

    def run(self, size: int, function: Callable[..., T], *args: Any, limit_s: float = LIMIT_S) -> list[T]:
        """Has the first `size` ranks call `function(rank, size, *args)`; the results by rank.

        Raises:
            Exception: that of the first rank that raised one.
            WorkerTimeout: a rank did not return in time; it is killed, and replaced when it is needed again.
        """
        return self.finish(self.begin(size, function, *args), limit_s)

    def finish(self, pending: Sequence[Pending[T]], limit_s: float = LIMIT_S) -> list[T]:
        """The results of what `begin` began; raises as `run`."""
        outcomes = self.outcomes(pending, limit_s)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def outcomes(self, pending: Sequence[Pending[T]], limit_s: float = LIMIT_S) -> list[T | Exception]:
        """The results or errors of all ranks, in their order; waits for all."""
        limit = time.monotonic() + limit_s
        return [_outcome(one, limit) for one in pending]

    def outputs(self) -> str:
        """The output of the workers since `begin`, for a test that fails."""
        texts = {worker: worker.output(before) for worker, before in self._written.items()}
        return "\n".join(f"--- output of {worker!r}\n{text}" for worker, text in texts.items() if text)

    def close(self) -> None:
        """Ends all workers; idempotent."""
        self._pool.close()
        self.workers.clear()

    def _new(self, rank: int) -> Worker:
        return self._pool.start(f"rank{rank}")


def _outcome(pending: Pending[Any], limit: float) -> Any:
    try:
        return pending.result(max(0.0, limit - time.monotonic()))
    except WorkerTimeout as exc:
        pending.worker.kill()
        return exc
    except Exception as exc:
        return exc
