"""The parts that clusters share: names of workers, blocks, their forms for event loops, and how a worker joins."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rpcdist._launch.progress import interrupted
from rpcdist._launch.reports import main_has_a_file
from rpcdist.errors import ConfigError
from rpcdist.ids import check_worker_name
from rpcdist.waiters import run_in_thread

if TYPE_CHECKING:
    from rpcdist.rpc import RpcOptions


def worker_names(workers: int | Sequence[str]) -> tuple[str, ...]:
    """The names of the workers, by rank; raises `ConfigError`."""
    if isinstance(workers, int):
        names = [f"worker{rank}" for rank in range(workers)]
    else:
        names = [] if isinstance(workers, str) or not isinstance(workers, Iterable) else list(workers)
    if not names:
        raise ConfigError(f"workers={workers!r}: give the number of workers, at least 1, or a list of their names")
    for name in names:
        check_worker_name(name)
        if names.count(name) > 1:
            raise ConfigError(f"workers={workers!r}: the name {name!r} is there twice; give every worker its own")
    return tuple(names)


class ClusterBlock(ABC):
    """A cluster whose `start` and `close` are also the ends of a block, and have forms for coroutines and notebooks."""

    @abstractmethod
    def start(self) -> Self:
        """Starts the workers."""

    @abstractmethod
    def close(self) -> None:
        """Ends the job."""

    @abstractmethod
    def _abandon(self) -> None:
        """Ends what is left of the job at once."""

    def _cancel(self) -> None:
        """Ends a start that is under way on another thread."""
        self._abandon()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._abandon()
        if kind is KeyboardInterrupt:
            raise interrupted() from None

    async def start_async(self) -> Self:
        """`start` for coroutines and notebooks: the event loop goes on. Cancelled, it leaves nothing behind."""
        await run_in_thread(self.start, self._cancel, name="rpcdist-cluster-start")
        return self

    async def close_async(self) -> None:
        """`close` for coroutines and notebooks. Cancelled while it waits for the others, the job ends at once."""
        await run_in_thread(self.close, self._abandon, name="rpcdist-cluster-end")

    async def __aenter__(self) -> Self:
        return await self.start_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await run_in_thread(partial(self.__exit__, kind, error, traceback), self._abandon, name="rpcdist-cluster-end")


def join_cluster(rank: int, names: Sequence[str], address: str, given: RpcOptions | None, serve: bool = False) -> None:
    """Joins as worker `rank` of `names` at `address`, with the options that the user gave; `serve` until the end."""
    from rpcdist import rpc  # this module is imported before the new processes start; torch, after

    options = rpc.RpcOptions() if given is None else copy.copy(given)
    options.init_method = address
    if not main_has_a_file():
        options.by_value = True
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if serve:
        rpc.shutdown()
