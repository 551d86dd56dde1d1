"""Remote procedure calls and remote references between the processes of a training job.

    rpc.init_rpc("worker0", rank=0, world_size=2)           # each process joins under a name

    rpc.rpc_sync("worker1", torch.add, args=(x, 1))         # calls, and waits for the result
    future = rpc.rpc_async("worker1", torch.add, (x, 1))    # a future: future.wait(), or `await future`
    rpc.call("worker1", torch.add, x, 1)                    # the same as the first; type checkers see the arguments

    counter = rpc.remote("worker1", Counter)                # an object that lives on worker1: a remote reference
    counter.rpc_sync().add(1)                               # calls its method there, concurrently with other calls
    rpc.remote("worker1", Counter, serial=True)             # an actor: its calls run one at a time, in order
    counter.to_here()                                       # a copy of it

    for row in rpc.rpc_stream("worker1", read_rows):        # a generator there, an iterator here
        ...

    rpc.shutdown()                                          # waits until all workers have called it

Names and arguments are those of `torch.distributed.rpc`. It does not have `call`, `call_async`, `rpc_stream`, `Stream`,
`wait_any`, `as_completed`, `idempotent`, nor the functions about who is in the job: `workers`, `wait_for_worker`,
`on_membership_change`, `serve`. The guide is `docs/rpc.md`; the errors are in `rpcdist.errors`.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from rpcdist.collectives import PrefixStore
from rpcdist.collectives.rendezvous import job_attempt, open_rendezvous
from rpcdist.errors import AlreadyInitialized, BlockingInLoop, RpcdistError
from rpcdist.ids import check_worker_name
from rpcdist.rpc import api, backend_registry, constants, functions, internal, options
from rpcdist.rpc._agent import Agent as RpcAgent
from rpcdist.rpc._agent import Agent as TensorPipeAgent
from rpcdist.rpc._calling.result_streams import Stream
from rpcdist.rpc._current import agent_or_none, starts
from rpcdist.rpc._futures.waiting import as_completed, collect_all, wait_all, wait_any
from rpcdist.rpc._start import node_options
from rpcdist.rpc.api import (  # noqa: F401  # torch has the private ones here, and programs use them
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _get_debug_info,
    _init_rpc_backend,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    _use_rpc_pickler,
    _wait_all,
    _wait_all_workers,
    call,
    call_async,
    debug_info,
    debug_rrefs,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    is_available,
    remote,
    rpc_async,
    rpc_stream,
    rpc_sync,
    shutdown,
)
from rpcdist.rpc.backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from rpcdist.rpc.functions import idempotent
from rpcdist.rpc.future import Future
from rpcdist.rpc.membership import (
    MembershipChange,
    on_membership_change,
    serve,
    stop_serving,
    wait_for_worker,
    workers,
)
from rpcdist.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions
from rpcdist.rpc.rref import PyRRef, RRef
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.transport import acquire_node
from rpcdist.transport.fork import check_not_forked

__all__ = [
    "BackendType",
    "Future",
    "MembershipChange",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "RpcOptions",
    "Stream",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "as_completed",
    "backend_registered",
    "backend_registry",
    "call",
    "call_async",
    "collect_all",
    "constants",
    "construct_rpc_backend_options",
    "debug_info",
    "debug_rrefs",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "idempotent",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "on_membership_change",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "serve",
    "shutdown",
    "stop_serving",
    "wait_all",
    "wait_any",
    "wait_for_worker",
    "workers",
]

logger = logging.getLogger(__name__)


def __dir__() -> list[str]:
    """The public names: what completion in an editor or a notebook shows. The private ones of torch work as well."""
    return __all__


def init_rpc(
    name: str,
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of the job: ready to call and to be called when this returns.

    Args:
        name: unique in the job; letters, digits, '-', '_' and ':', shorter than 128 characters.
        backend: a member of `BackendType`; found from the options if it is left out.
        rank: unique, 0 to world_size - 1; -1 takes RANK from the environment. Rank 0 coordinates.
        world_size: how many workers there are; None for a world in which workers come and go.
        rpc_backend_options: `RpcOptions`, or torch's `TensorPipeRpcBackendOptions`. `init_method` says where the
            workers find each other, and `rpc_timeout` also limits the wait for all of them.

    Raises:
        AlreadyInitialized: without `shutdown` before.
        ConfigError: the name, the rank or an option is wrong.
        DuplicateName, WorldMismatch, RendezvousError: the workers do not fit together, or somebody did not come; the
            text says who.
        AuthenticationFailed: the job token of the coordinator is another one.
        ForkedProcess: this process was forked from a worker.
        BlockingInLoop: called on an event loop; nothing has begun.
    """
    if asyncio._get_running_loop() is not None:
        raise BlockingInLoop("rpc.init_rpc", "await asyncio.to_thread(rpc.init_rpc, ...)")
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None and rpc_backend_options is not None:
        backend = backend_registry.infer_backend(rpc_backend_options)
    if backend is None:
        backend = BackendType["TENSORPIPE"]
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    check_not_forked()
    if agent_or_none() is not None:
        raise AlreadyInitialized("RPC is already initialized; call shutdown() first")
    if not rpc_backend_options.init_method:
        rpc_backend_options.init_method = constants.DEFAULT_INIT_METHOD

    check_worker_name(name)
    try:
        _start_with_node(backend, name, rank, world_size, rpc_backend_options)
    except RpcdistError as exc:
        # The error says what to do; the way there, through sockets and stores, would hide it behind 80 lines.
        logger.debug("init_rpc of %s failed", name, exc_info=True)
        raise exc.with_traceback(None) from None


def _start_with_node(backend: object, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    if not isinstance(options, RpcOptions):
        _start(backend, name, rank, world_size, options)
        return
    # The store of the rendezvous uses this process's one node, so the node needs the token of the options before it.
    node = acquire_node(node_options(options))
    try:
        _start(backend, name, rank, world_size, options)
    finally:
        node.release()


def _start(backend: object, name: str, rank: int, world_size: int | None, options: RpcBackendOptions) -> None:
    url, timeout_s = options.init_method, options.rpc_timeout
    timeout = timedelta(seconds=timeout_s) if timeout_s else None
    # The list of members waits for the others: it can say who is missing, which the store cannot.
    found = open_rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False)
    store, rank, found_size = next(found)
    prefix = f"attempt_{job_attempt()}/rpc_prefix_{starts.count(url)}"
    try:
        # With env://, a WORLD_SIZE that the launcher set says that the world is static.
        size = found_size if found_size > 0 else None
        _init_rpc_backend(backend, PrefixStore(prefix, store), name, rank, size, options)
    except BaseException:
        store.close()
        raise
