"""The functions of `rpcdist.rpc`, with torch's names and signatures."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from rpcdist.deadline import checked_timeout
from rpcdist.errors import AlreadyInitialized, ConfigError, NotInitialized, RRefError
from rpcdist.inspection import ReferenceFacts, WorkerFacts
from rpcdist.rpc import backend_registry
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._api.call_functions import (
    call,
    call_async,
    get_actor,
    get_actor_async,
    remote,
    remote_async,
    rpc_async,
    rpc_stream,
    rpc_sync,
)
from rpcdist.rpc._api.many_workers import AllGatherStates, method_factory, new_method
from rpcdist.rpc._current import agent_or_none, current_agent, end_agent, set_current_agent, start_lock
from rpcdist.rpc._executors.blocking import check_off_loop
from rpcdist.rpc._futures.waiting import collecting as _thread_local_var
from rpcdist.rpc._inspection.inspector import Inspector
from rpcdist.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcdist.rpc.internal import _internal_rpc_pickler
from rpcdist.rpc.options import RpcBackendOptions
from rpcdist.rpc.rref import PyRRef, RRef
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import RREF_DELETION_LIMIT_S

__all__ = [
    "AllGatherStates", "PyRRef", "RRef", "call", "call_async", "debug_info", "debug_rrefs", "enable_gil_profiling",
    "get_actor", "get_actor_async", "get_rpc_timeout", "get_worker_info", "inspect_worker", "is_available",
    "method_factory", "new_method", "remote", "remote_async", "rpc_async", "rpc_stream", "rpc_sync", "shutdown",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

# torch's tests and programs patch these, so the code reads them at each use.
_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler


def is_available() -> bool:
    """Always true; torch's function says whether torch was built with RPC."""
    return True


def _is_current_rpc_agent_set() -> bool:
    return agent_or_none() is not None


def _require_initialized(func: Callable[P, T]) -> Callable[P, T]:
    """Makes a function raise `NotInitialized` while RPC is not initialized."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if agent_or_none() is None:
            raise NotInitialized
        return func(*args, **kwargs)

    return wrapper


def _to_worker_info(to: str | int | WorkerInfo) -> WorkerInfo:
    """Name and id of the worker that a call names."""
    return current_agent().get_worker_info(to.id if isinstance(to, WorkerInfo) else to)


def _get_current_rpc_agent() -> Any:
    agent = agent_or_none()
    if agent is None:
        raise NotInitialized(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return agent


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Makes a running agent the agent of this process. A registered backend may supply any agent."""
    set_current_agent(agent)


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Starts the agent of a backend with an existing store."""
    if backend is None:
        backend = backend_registry.BackendType["TENSORPIPE"]
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    with start_lock:
        if agent_or_none() is not None:
            raise AlreadyInitialized("RPC is already initialized; call shutdown() first")
        if name is None:
            raise ConfigError("init_rpc needs a name")
        agent = backend_registry.init_backend(
            backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
        )
        _set_and_start_rpc_agent(agent)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of a worker, this one by default. Raises `UnknownWorker`."""
    return current_agent().get_worker_info(worker_name)


# ---------------------------------------------------------------- together


def _all_gather(obj: T, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, T]:
    """Exchanges one object per worker; see `rpcdist.rpc._membership.barrier.Gatherings`."""
    agent = current_agent()
    return agent.gatherings.all_gather(obj, worker_names, agent.caller.timeout_of(timeout))


def _barrier(worker_names: Iterable[str]) -> None:
    """Returns when every worker in `worker_names`, this one included, has called it with the same names."""
    try:
        agent = current_agent()
        agent.gatherings.barrier(worker_names, agent.caller.timeout_of(UNSET_RPC_TIMEOUT))
    except RuntimeError as exc:
        raise type(exc)(f"Failed to complete barrier: {exc}") if type(exc) is RuntimeError else exc from exc


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when every worker of the job has called it. With 0 it waits as long as the others live."""
    agent = current_agent()
    agent.gatherings.barrier(None, agent.caller.timeout_of(timeout))


def _delete_all_user_and_unforked_owner_rrefs(timeout_s: float = RREF_DELETION_LIMIT_S) -> None:
    """Releases the references that this worker holds, and waits until their owners know."""
    current_agent().rrefs.delete_all_user_and_unforked_owner_rrefs(timeout_s)


@contextmanager
def _wait_all() -> Iterator[None]:
    """On exit, waits for every `rpc_async` call that this thread made inside the block."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Sets another default pickler inside the block. Calls use the value codec in any case."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# ---------------------------------------------------------------- the end


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, str]:
    """Leaves the job; this process may call `init_rpc` again afterwards.

    Args:
        graceful: serve until all workers have called `shutdown` and none has outstanding work. `shutdown` waits for the
            replacement of a dead worker, not for the dead worker. False ends immediately: calls in flight fail.
        timeout: limit of the graceful part, in seconds. 0 uses `RpcOptions.shutdown_timeout`; if that is None,
            `shutdown` waits as long as the other workers live.

    Returns:
        The reason for each worker that was lost and not replaced, by name; empty if there is none or not `graceful`.

    Raises:
        NotInitialized: RPC is not initialized.
        DeadlineExceeded: a worker did not call `shutdown` in time; the text names it. The local side is closed anyway.
        WorkerLost: the coordinator is alive, but cannot be reached. The local side is closed anyway.
        BlockingInLoop: called on an event loop; nothing is closed.
    """
    check_off_loop("rpc.shutdown", "await rpc.shutdown_async()")
    agent = current_agent()
    if not isinstance(agent, Agent):  # the agent of a registered backend
        agent.join(shutdown=True)
        set_current_agent(None)
        return {}
    if agent.was_abandoned:
        logger.warning(
            "rpc.shutdown of %s came too late: RPC had ended with the process by then, as if shutdown had not been "
            "called. Call it before the end of the program, or register it with atexit; a __del__ may run too late",
            agent.directory.me.name,
        )
        return {}
    if not timeout:
        timeout = agent.options.shutdown_timeout or 0
    finished = False
    lost: dict[str, str] = {}
    try:
        if graceful:
            # Looked up in this module at the call: programs written for torch patch it here.
            lost = agent.join(True, timeout, lambda: _delete_all_user_and_unforked_owner_rrefs())
            finished = True
    finally:
        _finalize_shutdown(agent, finished, graceful)
    return lost


def _finalize_shutdown(agent: Agent, finished: bool, flush: bool) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, Exception) and agent.flight_log is not None:  # the error that ends the job here
        agent.flight_log.failed(error)
    with agent.ending:  # several threads may call shutdown; one closes, and the others wait for it
        if not agent.has_ended:
            agent.has_ended = True
            _close(agent, finished, flush)


def _close(agent: Agent, finished: bool, flush: bool) -> None:
    leak: RRefError | None = None
    try:
        if finished and not _ignore_rref_leak:
            agent.rrefs.check_leaks()
    except RRefError as exc:
        leak = exc
    try:
        if flush:  # also after a shutdown that failed: the other workers wait for the reason
            agent.autograd.flush()
            agent.leaving.send_last_replies(together=finished)
    finally:
        end_agent(agent)
    if leak is not None:
        raise leak


# ---------------------------------------------------------------- settings and a view inside


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds; 0 means no limit."""
    return current_agent().caller.new_calls.rpc_timeout_s


def _set_rpc_timeout(timeout_s: float) -> None:
    """Changes the default timeout of calls."""
    current_agent().caller.new_calls.rpc_timeout_s = checked_timeout(timeout_s, "rpc_timeout")


def enable_gil_profiling(flag: bool) -> None:
    """Adds the time that handlers wait for the interpreter lock, `agent.gil_average_wait_time_us`, to `debug_info`."""
    current_agent().profile_gil(bool(flag))


def debug_info() -> dict[str, str]:
    """Counters of this worker, under torch's names."""
    return current_agent().get_debug_info()


def inspect_worker(to: str | int | WorkerInfo | None = None) -> WorkerFacts:
    """The current state of a worker: its calls, threads, references and more; see `rpcdist.inspection`.

    The worker's I/O loop answers, even while its Python code is busy or stuck.

    Args:
        to: the worker; this one by default.

    Raises:
        ConnectFailed: the worker did not answer in time; `python -m rpcdist stacks` may show why.
        BlockingInLoop: called for another worker on an event loop; use `asyncio.to_thread`.
    """
    agent = current_agent()
    inspector: Inspector = agent.inspector
    if to is None or (worker_id := agent.directory.resolve(to)) == agent.worker_id:
        return inspector.facts()
    return inspector.ask(worker_id)


def debug_rrefs() -> list[ReferenceFacts]:
    """The live remote references of this worker, with their holders."""
    return current_agent().rrefs.debug_rrefs()


def _rref_context_get_debug_info() -> dict[str, str]:
    return current_agent().rrefs.debug_info()


_get_debug_info = debug_info
