"""Worker processes of one test, or of a whole run: started on demand and ended together.

with WorkerPool() as pool:
    worker = pool.start("a", environment={"MY_OPTION": "1"})
    assert worker.run(os.getpid) == worker.pid

The workers of `RankPool` stay alive from test to test and act as the ranks of groups.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from rpcdist.testing.limits import END_LIMIT_S, LIMIT_S
from rpcdist.testing.worker import Pending, Worker, WorkerTimeout

T = TypeVar("T")


class RpcWorld:
    """The workers of one RPC job.

    Args:
        start: starts a process with a given name.
        url: the `init_method` of all workers.
        size: the `world_size`; None if workers may join and leave.
        options: arguments of `RpcOptions`, for all workers.
    """

    def __init__(self, start: Callable[[str], Worker], url: str, size: int | None, options: dict[str, Any]) -> None:
        self.url = url
        self.size = size
        self.options = options
        self._start = start
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def begin_join(self, name: str, rank: int, **options: Any) -> Pending[None]:
        """Starts one more worker, or a replacement, and does not wait until it has joined."""
        worker = self._workers[name] = self._start(name)
        return worker.begin(join, name, rank, self.size, self.url, **{**self.options, **options})

    def join(self, name: str, rank: int, **options: Any) -> Worker:
        """Starts one more worker, or a replacement, and waits until it has joined."""
        self.begin_join(name, rank, **options).result()
        return self._workers[name]

    def shutdown(self, *names: str, **arguments: Any) -> None:
        """Calls `rpc.shutdown(**arguments)` on the named workers, by default all, and waits for them."""
        leaving = [worker.begin(leave, **arguments) for worker in self if not names or worker.name in names]
        for pending in leaving:
            pending.result()


def join(name: str, rank: int, world_size: int | None, url: str, **options: Any) -> None:
    """Joins an RPC job; runs in the worker."""
    from rpcdist import rpc

    options = {"rpc_timeout": LIMIT_S, **options}
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcOptions(init_method=url, **options))


def leave(**arguments: Any) -> None:
    """Leaves the RPC job; runs in the worker."""
    from rpcdist import rpc

    rpc.shutdown(**arguments)


class WorkerPool:
    """Starts workers; the end of the `with` block ends all of them.

    Args:
        environment: variables that all workers get in addition to those of this process; None removes one.

    Attributes:
        environment: the same; a change applies to workers that start afterwards.
        folder: a folder for files of the test; removed at the end.
    """

    def __init__(self, environment: Mapping[str, str | None] | None = None) -> None:
        self.environment: dict[str, str | None] = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="rpcdist-testing-")
        self.folder = Path(self._folder.name)
        self._workers: list[Worker] = []
        self._num_files = 0
        self._num_started = 0
        self._written: dict[Worker, int] = {}  # bytes of output that `outputs` leaves out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self.outputs())
        self.close()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def start(self, name: str, environment: Mapping[str, str | None] | None = None) -> Worker:
        """Starts a process, which does not join a job yet.

        Args:
            name: the name in messages, and of its RPC worker.
            environment: variables that differ from this process's current ones; None removes one.
        """
        variables = {**os.environ, **self.environment, **(environment or {})}
        given = {variable: value for variable, value in variables.items() if value is not None}
        self._num_started += 1
        worker = Worker(name, given, self.folder / f"{self._num_started}-{name}.log")
        self._workers.append(worker)
        return worker

    def discard(self, worker: Worker) -> None:
        """Ends a worker before the others."""
        self._workers.remove(worker)
        worker.end()

    def new_file(self) -> str:
        """An unused path, for a file store, or as a signal that a function runs."""
        self._num_files += 1
        return str(self.folder / f"file{self._num_files}")

    def new_url(self) -> str:
        """An `init_method` for a new job."""
        return f"file://{self.new_file()}"

    def new_world(self, size: int | None, url: str | None = None, **options: Any) -> RpcWorld:
        """An RPC job that no worker has joined yet.

        Args:
            size: its `world_size`; None if workers may join and leave.
            url: its `init_method`; by default a new file.
            options: arguments of `RpcOptions`, for all workers.
        """
        return RpcWorld(self.start, url or self.new_url(), size, options)

    def world(self, *names: str, world_size: int | None = -1, url: str | None = None, **options: Any) -> RpcWorld:
        """Starts workers that join one RPC job; their ranks are in the order of the names.

        Args:
            names: the names of the workers.
            world_size: -1 for the number of names; None if workers may join and leave.
            url: the `init_method`; by default a new file.
            options: arguments of `RpcOptions`, for all workers.
        """
        world = self.new_world(len(names) if world_size == -1 else world_size, url, **options)
        joining = [world.begin_join(name, rank) for rank, name in enumerate(names)]
        for pending in joining:
            pending.result()
        return world

    def outputs(self) -> str:
        """The output of the workers, for a test that fails."""
        texts = {worker: worker.output(self._written.get(worker, 0)) for worker in self}
        return "\n".join(f"--- output of {worker!r}\n{text}" for worker, text in texts.items() if text)

    def close(self) -> None:
        """Ends all workers and removes their files; idempotent."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._folder.cleanup()


class RankPool(WorkerPool):
    """Workers by rank; they start when they are first needed, and dead or hung ones are replaced.

    ranks = RankPool()
    ranks.run(3, my_module.all_reduce_ones, ranks.new_file())   # calls all_reduce_ones(rank, 3, path) on ranks 0, 1, 2

    A worker keeps the objects that its functions store in their modules.

    Attributes:
        workers: the process of each rank.
    """

    def __init__(self, environment: Mapping[str, str | None] | None = None) -> None:
        super().__init__(environment)
        self.workers: list[Worker] = []

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def prepare(self, size: int) -> list[Worker]:
        """The workers of the first `size` ranks, all alive and idle."""
        while len(self.workers) < size:
            self.workers.append(self.start(f"rank{len(self.workers)}"))
        for rank, worker in enumerate(self.workers[:size]):
            if not worker.alive or not worker.is_idle(END_LIMIT_S):  # kills workers that a failed test has left hanging
                self.discard(worker)
                self.workers[rank] = self.start(f"rank{rank}")
        self._written = {worker: worker.num_output_bytes() for worker in self}
        return self.workers[:size]

    def begin(self, size: int, function: Callable[..., T], *args: Any) -> list[Pending[T]]:
        """Makes the first `size` ranks call `function(rank, size, *args)`, and does not wait."""
        return [worker.begin(function, rank, size, *args) for rank, worker in enumerate(self.prepare(size))]

    def run(self, size: int, function: Callable[..., T], *args: Any, limit_s: float = LIMIT_S) -> list[T]:
        """Makes the first `size` ranks call `function(rank, size, *args)`; returns the results by rank.

        Raises:
            Exception: the error of the first rank that raised one.
            WorkerTimeout: a rank did not return in time; it is killed, and replaced when it is needed again.
        """
        return self.finish(self.begin(size, function, *args), limit_s)

    def finish(self, pending: Sequence[Pending[T]], limit_s: float = LIMIT_S) -> list[T]:
        """Waits for the calls that `begin` started, and returns their results; raises as `run`."""
        outcomes = self.outcomes(pending, limit_s)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]

    def outcomes(self, pending: Sequence[Pending[T]], limit_s: float = LIMIT_S) -> list[T | Exception]:
        """The results or errors of all ranks, in their order; waits for all."""
        limit = time.monotonic() + limit_s
        return [_outcome(one, limit) for one in pending]

    def close(self) -> None:
        """Ends all workers; idempotent."""
        super().close()
        self.workers.clear()


def _outcome(pending: Pending[Any], limit: float) -> Any:
    try:
        return pending.result(max(0.0, limit - time.monotonic()))
    except WorkerTimeout as exc:
        pending.worker.kill()
        return exc
    except Exception as exc:
        return exc
