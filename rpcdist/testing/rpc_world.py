"""The workers of one RPC job, by name: they join, leave, die and are replaced on command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rpcdist.testing.limits import LIMIT_S
from rpcdist.testing.worker import Pending, Worker

__all__ = ["RpcWorld", "join", "leave"]


class RpcWorld:
    """The workers of one RPC job.

    Args:
        start: starts a process of a name.
        url: the `init_method` of all.
        size: `world_size`; None for workers that come and go.
        options: of `RpcOptions`, for all workers.
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
        """Starts one more worker, or the replacement of one, and does not wait until it has joined."""
        worker = self._workers[name] = self._start(name)
        return worker.begin(join, name, rank, self.size, self.url, **{**self.options, **options})

    def join(self, name: str, rank: int, **options: Any) -> Worker:
        """Starts one more worker, or the replacement of one, and waits until it has joined."""
        self.begin_join(name, rank, **options).result()
        return self._workers[name]

    def shutdown(self, *names: str, **arguments: Any) -> None:
        """Has the named workers, by default all, call `rpc.shutdown(**arguments)`, and waits for them."""
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
