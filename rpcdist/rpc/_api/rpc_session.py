"""Starting and ending RPC in coroutines, and for the time of a `with` block."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rpcdist.errors import NotInitialized
from rpcdist.off_loop import run_in_thread
from rpcdist.rpc._api.initialization import init_rpc
from rpcdist.rpc._current import agent_or_none
from rpcdist.rpc.api import shutdown
from rpcdist.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT

if TYPE_CHECKING:
    from rpcdist.rpc.options import RpcBackendOptions


async def init_rpc_async(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    role: str | None = None,
) -> None:
    """`init_rpc` for coroutines: the event loop goes on while the workers find each other.

    When the task is cancelled, the start goes on beside it until its time is over, and is undone if it succeeds then.
    """
    await _start_in_thread(partial(init_rpc, name, backend, rank, world_size, rpc_backend_options, role=role))


async def shutdown_async(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, str]:  # noqa: ASYNC109  # as `shutdown` has it
    """`shutdown` for coroutines. When the task is cancelled, the worker leaves at once: calls in flight fail."""
    return await run_in_thread(partial(shutdown, graceful, timeout), _leave_at_once, name="rpcdist-shutdown")


def session(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT,
    *,
    role: str | None = None,
) -> RpcSession:
    """Makes this process a worker for the time of a `with` or `async with` block.

        async with rpc.session("worker1"):
            await rpc.rpc_async("worker0", pow, (2, 10))

    The start is `init_rpc`, with its arguments; the end is a graceful `shutdown` with the limit `shutdown_timeout`, or,
    if the block is left by an exception, one that waits for nobody.
    """
    return RpcSession(
        partial(init_rpc, name, backend, rank, world_size, rpc_backend_options, role=role), shutdown_timeout
    )


class RpcSession:
    """The time between `init_rpc` and `shutdown`; made by `session`, and used once."""

    def __init__(self, start: partial[None], shutdown_timeout: float) -> None:
        self._start = start
        self._shutdown_timeout = shutdown_timeout

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            shutdown(timeout=self._shutdown_timeout)
        else:
            _leave_at_once()

    async def __aenter__(self) -> Self:
        await _start_in_thread(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await run_in_thread(partial(self.__exit__, kind, error, traceback), _leave_at_once, name="rpcdist-shutdown")


class _PendingStart:
    """A start that may be given up while it waits for the others."""

    def __init__(self, start: partial[None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._is_done = self._is_abandoned = False

    def run(self) -> None:
        self._start()
        with self._lock:
            self._is_done = True
            is_abandoned = self._is_abandoned
        if is_abandoned:
            _leave_at_once()

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            is_done = self._is_done
        if is_done:
            _leave_at_once()


async def _start_in_thread(start: partial[None]) -> None:
    pending = _PendingStart(start)
    await run_in_thread(pending.run, pending.abandon, name="rpcdist-init")


def _leave_at_once() -> None:
    if agent_or_none() is not None:
        with suppress(NotInitialized):  # another thread's `shutdown` was first
            shutdown(graceful=False)
