"""`call_each`: calls many workers, given by name or role, in parallel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar, overload

from rpcdist.errors import ConfigError, listed
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._calling.new_calls import Invocation, NewCall
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import check_off_loop
from rpcdist.rpc._futures.waiting import wait_all, wait_all_from
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.functions import IDEMPOTENT_MARK
from rpcdist.rpc.future import Future
from rpcdist.rpc.rref import Later, RRef

T = TypeVar("T")


def chosen_workers(workers: str | Iterable[Destination]) -> list[Destination]:
    """Returns the living workers with a role (a string), or the given workers.

    Raises:
        ConfigError: no living worker has the role.
    """
    if not isinstance(workers, str):
        return list(workers)
    living = current_agent().directory.living()
    found: list[Destination] = [member.identity.name for member in living if member.role == workers]
    if not found:
        there = listed(f"{member.identity.name} ({member.role or 'no role'})" for member in living)
        raise ConfigError(
            f"no worker has the role {workers!r}; the job has these workers: {there}. Pass several workers as a list "
            "of names; init_rpc(..., role=...) sets a worker's role"
        )
    return found


@overload
def call_each(
    workers: str | Iterable[Destination],
    func: Callable[..., Later[T]],
    /,
    *args: Any,
    return_exceptions: bool = ...,
    timeout: float = ...,
    **kwargs: Any,
) -> list[T]: ...
@overload
def call_each(
    workers: str | Iterable[Destination],
    func: Callable[..., T],
    /,
    *args: Any,
    return_exceptions: bool = ...,
    timeout: float = ...,
    **kwargs: Any,
) -> list[T]: ...
def call_each(
    workers: str | Iterable[Destination],
    func: Callable[..., Any],
    /,
    *args: Any,
    return_exceptions: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function on several workers in parallel, and returns the results in the order of the workers.

        rpc.call_each(["worker1", "worker2"], load, path)
        rpc.call_each("generator", set_temperature, 0.7)  # all workers of a role

    Plain values and tensors in the arguments are encoded only once.

    Args:
        workers: names, ranks or `WorkerInfo`; or a role, as a string, for all living workers with that role.
        func: as for `rpc_sync`.
        args: positional arguments.
        return_exceptions: as for `asyncio.gather`: return a call's exception in place of its result. Otherwise the
            first exception is raised at once, while the other calls continue.
        timeout: limit for all calls together, in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.
        kwargs: keyword arguments.

    Raises:
        ConfigError: no worker has the role.
        UnknownWorker: a worker is not in the job; no call was made.
        DeadlineExceeded, WorkerLost: the named worker did not answer in time, or died.
        Exception: the function's own exception, with the remote traceback as `__cause__`.
    """
    check_off_loop("call_each", "await rpc.call_each_async(...)")
    unsent: list[NewCall] | None = None if return_exceptions else []
    futures = _start(workers, Invocation(func, args, kwargs, timeout), unsent)
    if unsent:
        return current_agent().caller.send_each(unsent, partial(wait_all_from, futures, None))
    if not return_exceptions:
        return wait_all(futures)
    # Exceptions are not raised here: their tracebacks would refer to this frame, and so to all results.
    return [future.wait() if not isinstance(exc := future.exception(None), Exception) else exc for future in futures]


@overload
def call_each_async(
    workers: str | Iterable[Destination],
    func: Callable[..., Later[T]],
    /,
    *args: Any,
    return_exceptions: bool = ...,
    timeout: float = ...,
    **kwargs: Any,
) -> Coroutine[Any, Any, list[T]]: ...
@overload
def call_each_async(
    workers: str | Iterable[Destination],
    func: Callable[..., T],
    /,
    *args: Any,
    return_exceptions: bool = ...,
    timeout: float = ...,
    **kwargs: Any,
) -> Coroutine[Any, Any, list[T]]: ...
async def call_each_async(
    workers: str | Iterable[Destination],
    func: Callable[..., Any],
    /,
    *args: Any,
    return_exceptions: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,  # noqa: ASYNC109  # it travels with the calls
    **kwargs: Any,
) -> list[Any]:
    """`call_each` for coroutines. Cancelling the task cancels all calls."""
    chosen = chosen_workers(workers)
    await current_agent().directory.look_up(chosen)
    futures = _start(chosen, Invocation(func, args, kwargs, timeout))
    return await asyncio.gather(*futures, return_exceptions=return_exceptions)


def _start(
    workers: str | Iterable[Destination], what: Invocation, unsent: list[NewCall] | None = None
) -> list[Future[Any]]:
    agent = current_agent()
    chosen = chosen_workers(workers)
    if getattr(what.func, IDEMPOTENT_MARK, None) is not True:
        return agent.caller.start_each(chosen, what, unsent)
    ids = [agent.directory.resolve(worker) for worker in chosen]
    return [agent.retries.start_call(worker_id, what) for worker_id in ids]


class AllGatherStates:
    """torch's state of a gathering, for compatibility; rpcdist never changes one.

    Attributes:
        gathered_objects: objects by worker.
        proceed_signal: set when all have arrived.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal = threading.Event()


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """Returns a function that calls the method `method_name` of its first argument, a reference."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method: Final = method_factory("to_here", RRef.to_here.__doc__ or "")
"""A leftover loop variable in torch's module, kept for compatibility."""
