"""`init_rpc`, also for coroutines and `with` blocks: finds the other workers and starts the agent."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Self

from rpcdist._launch.placement import ROLE_VARIABLE
from rpcdist.collectives import HashStore, PrefixStore, Store
from rpcdist.collectives.rendezvous import job_attempt, open_rendezvous
from rpcdist.errors import AlreadyInitialized, BlockingInLoop, ConfigError, NotInitialized, RpcdistError, on_error
from rpcdist.ids import check_worker_name
from rpcdist.own_shortage import names_shortage
from rpcdist.rpc import backend_registry, constants
from rpcdist.rpc._current import agent_or_none, num_starts, start_lock
from rpcdist.rpc._start import node_options
from rpcdist.rpc.api import _init_rpc_backend, shutdown
from rpcdist.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT
from rpcdist.rpc.options import RpcBackendOptions, RpcOptions
from rpcdist.transport import acquire_node
from rpcdist.transport.fork import check_not_forked
from rpcdist.waiters import run_in_thread

logger = logging.getLogger(__name__)


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    role: str | None = None,
) -> None:
    """Makes this process a worker of the job, ready to make and serve calls.

    Args:
        name: unique in the job; letters, digits, '-', '_' and ':', shorter than 128 characters.
        backend: a member of `BackendType`; derived from the options by default.
        rank: unique, 0 to world_size - 1; -1 for the launcher's rank (RANK, or the variables of Slurm, MPI and
            Kubernetes). Rank 0 is the coordinator, and joins first.
        world_size: the number of workers; None if workers may join and leave at any time.
        rpc_backend_options: `RpcOptions`, or torch's `TensorPipeRpcBackendOptions`. `init_method` is where the workers
            find each other, and `init_timeout` limits the wait for all of them. A world of one (`rank=0,
            world_size=1`) needs no address.
        role: a name for this worker's purpose, such as "generator", by which `rpc.workers("generator")` finds it.
            Equivalent to `RpcOptions(role=...)`. By default the role that `launch(roles=...)` gave this process.

    Raises:
        AlreadyInitialized: `shutdown` was not called since the last `init_rpc`.
        ConfigError: the name, the rank or an option is invalid.
        DuplicateName, WorldMismatch, RendezvousError: the workers' arguments conflict, or workers did not join; the
            message names them.
        AuthenticationFailed: the coordinator has another job token.
        TransportError: this process lacks free descriptors, threads or the like; the message names the shortage.
        ForkedProcess: this process was forked from a worker.
        BlockingInLoop: called on an event loop; nothing was started.
    """
    if asyncio._get_running_loop() is not None:
        raise BlockingInLoop("rpc.init_rpc", "await rpc.init_rpc_async(...)")
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions of rpcdist.rpc, not of "
            f"{type(rpc_backend_options).__module__}.{type(rpc_backend_options).__qualname__}"
        )
    if backend is None and rpc_backend_options is not None:
        backend = backend_registry.infer_backend(rpc_backend_options)
    if backend is None:
        backend = backend_registry.BackendType["TENSORPIPE"]
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    if role is not None:
        if not isinstance(rpc_backend_options, RpcOptions):
            raise ConfigError(f"role={role!r}: the backend {backend!r} does not support roles")
        rpc_backend_options.role = role
    elif isinstance(rpc_backend_options, RpcOptions) and not rpc_backend_options.role:
        rpc_backend_options.role = os.environ.get(ROLE_VARIABLE, "").rpartition(":")[0]
    check_not_forked()
    if agent_or_none() is not None:
        raise AlreadyInitialized("RPC is already initialized; call shutdown() first")
    if not rpc_backend_options.init_method:
        rpc_backend_options.init_method = constants.DEFAULT_INIT_METHOD

    check_worker_name(name)
    try:
        with names_shortage("init_rpc"):
            _start(backend, name, rank, world_size, rpc_backend_options)
    except (RpcdistError, KeyboardInterrupt) as exc:
        # The error says what to do, and Ctrl-C needs no words; 80 lines of traceback through sockets and stores would
        # hide that.
        logger.debug("init_rpc of %s failed", name, exc_info=True)
        exc.__cause__, exc.__suppress_context__, exc.__traceback__ = None, True, None
        raise  # unlike `raise exc`, adds no frame of this function


def _start(backend: object, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    with start_lock, ExitStack() as held:
        if isinstance(options, RpcOptions):
            # First, with the token in the options: the rendezvous store uses this process's only node.
            held.callback(acquire_node(node_options(options)).release)
        url = options.init_method
        store, rank, found_size = _find_store(url, rank, world_size, options.startup_limit_s)
        # With env://, a WORLD_SIZE set by the launcher makes the world static.
        size = found_size if found_size > 0 else None
        # The URL does not suffice: `env://` means another address after a program has changed MASTER_PORT.
        place = f"{url} {store.address}"
        # In a world that changes, a worker may come back while others have stayed.
        number = 0 if size is None else num_starts[place]
        prefix = f"attempt_{job_attempt()}/rpc_prefix_{number}"
        try:
            with on_error(store.close):
                _init_rpc_backend(backend, PrefixStore(prefix, store), name, rank, size, options)
        except Exception as exc:
            if not isinstance(exc, RpcdistError):
                num_starts[place] += 1  # the others have started: only this worker's device maps are wrong
            raise
        num_starts[place] += 1


def _find_store(url: str, rank: int, world_size: int | None, limit_s: float | None) -> tuple[Store, int, int]:
    """Returns the store where the workers find each other, this worker's rank, and the world size or -1."""
    if url == constants.DEFAULT_INIT_METHOD and world_size == 1 and rank in (0, -1):
        if "MASTER_ADDR" not in os.environ:  # no other process takes part
            return HashStore(), 0, 1
    timeout = None if limit_s is None else timedelta(seconds=limit_s)
    # The membership waits for the other workers instead, because it can name the missing ones.
    return next(open_rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False))


async def init_rpc_async(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    role: str | None = None,
) -> None:
    """`init_rpc` for coroutines: does not block the event loop while the workers find each other.

    If the task is cancelled, the start ends at once and is undone. (If this process is busy for more than a second, its
    thread does that a little later, and the next `init_rpc` waits for it.)
    """
    await _start_in_thread(partial(init_rpc, name, backend, rank, world_size, rpc_backend_options, role=role))


async def shutdown_async(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, str]:  # noqa: ASYNC109  # as in `shutdown`
    """`shutdown` for coroutines. If the task is cancelled, the worker leaves at once, and its calls in flight fail."""
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
    """Makes this process a worker for the duration of a `with` or `async with` block.

        async with rpc.session("worker1"):
            await rpc.rpc_async("worker0", pow, (2, 10))

    The block starts with `init_rpc`, which gets the same arguments. It ends with a graceful `shutdown`, limited by
    `shutdown_timeout`, or, after an exception, with one that does not wait for other workers.
    """
    return RpcSession(
        partial(init_rpc, name, backend, rank, world_size, rpc_backend_options, role=role), shutdown_timeout
    )


class RpcSession:
    """Calls `init_rpc` and `shutdown` around a block; returned by `session`, for a single use."""

    def __init__(self, start: partial[None], shutdown_timeout: float) -> None:
        self._start = start
        self._shutdown_timeout = shutdown_timeout

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            shutdown(timeout=self._shutdown_timeout)
        else:
            _leave_at_once()

    async def __aenter__(self) -> Self:
        await _start_in_thread(self._start)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await run_in_thread(partial(self.__exit__, kind, error, traceback), _leave_at_once, name="rpcdist-shutdown")


async def _start_in_thread(start: partial[None]) -> None:
    """Runs a start, and undoes it if the task is cancelled: whichever of the two comes second leaves."""
    first = threading.Lock()

    def leave_if_second() -> None:
        if not first.acquire(blocking=False):
            _leave_at_once()

    def run() -> None:
        with start_lock:  # the next start waits until this one is undone
            start()
            leave_if_second()

    await run_in_thread(run, leave_if_second, name="rpcdist-init", ends_waits=True)


def _leave_at_once() -> None:
    if agent_or_none() is not None:
        with suppress(NotInitialized):  # another thread called `shutdown` first
            shutdown(graceful=False)
