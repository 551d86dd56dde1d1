"""Remote procedure calls and remote references between the processes of a training job.

    rpc.init_rpc("worker0", rank=0, world_size=2)           # each process joins under a name

    rpc.rpc_sync("worker1", torch.add, args=(x, 1))         # calls, and waits for the result
    future = rpc.rpc_async("worker1", torch.add, (x, 1))    # a future: future.wait(), or `await future`
    rpc.call("worker1", torch.add, x, 1)                    # the same as the first; type checkers see the arguments
    rpc.call_each(["worker1", "worker2"], torch.add, x, 1)  # on several workers at once: a list of results

    counter = rpc.remote("worker1", Counter)                # an object that lives on worker1: a remote reference
    counter.rpc_sync().add(1)                               # calls its method there, concurrently with other calls
    rpc.remote("worker1", Counter, serial=True)             # an actor: its calls run one at a time, in order
    rpc.remote(..., serial=True, max_restarts=3)            # it is made again when its worker is replaced
    counter.to_here()                                       # a copy of it

    for row in rpc.rpc_stream("worker1", read_rows):        # a generator there, an iterator here
        ...

    rpc.shutdown()                                          # waits until all workers have called it

In coroutines, `async with rpc.session("worker0", ...)` is both ends; `rpcdist.LocalCluster` starts the processes, too.

Names and arguments are those of `torch.distributed.rpc`. It does not have `session`, `call`, `call_async`, `get_actor`,
`call_each`, `new_group`, `rpc_stream`, `Stream`, `wait_any`, `as_completed`, `idempotent`, `inspect_worker`, the
functions about members (`workers`, `wait_for_worker`, `wait_for_workers`, `on_membership_change`, `serve`), and those
for coroutines, whose names end in `_async`. The guide is `docs/rpc.md`; the errors are in `rpcdist.errors`.
"""

from __future__ import annotations

from rpcdist.profile_ranges import _server_process_global_profile  # noqa: F401  # torch has it here
from rpcdist.rpc import api, backend_registry, constants, functions, internal, membership, options
from rpcdist.rpc._agent import Agent as RpcAgent
from rpcdist.rpc._agent import Agent as TensorPipeAgent
from rpcdist.rpc._api.initialization import RpcSession, init_rpc, init_rpc_async, session, shutdown_async
from rpcdist.rpc._api.many_workers import call_each, call_each_async
from rpcdist.rpc._api.named_groups import new_group, new_group_async
from rpcdist.rpc._api.restarting_actor import RestartingActor
from rpcdist.rpc._calling.result_streams import Stream
from rpcdist.rpc._futures.waiting import as_completed, collect_all, wait_all, wait_any
from rpcdist.rpc.api import *  # noqa: F403
from rpcdist.rpc.api import (  # noqa: F401  # torch has these private ones here, and programs use them
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
from rpcdist.rpc.membership import *  # noqa: F403
from rpcdist.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions, TlsOptions
from rpcdist.rpc.worker_info import WorkerInfo

__all__ = [
    "BackendType", "Future", "RestartingActor", "RpcAgent", "RpcBackendOptions", "RpcOptions", "RpcSession", "Stream",
    "TensorPipeAgent", "TensorPipeRpcBackendOptions", "TlsOptions", "WorkerInfo", "api", "as_completed",
    "backend_registered", "backend_registry", "call_each", "call_each_async", "collect_all", "constants",
    "construct_rpc_backend_options", "functions", "idempotent", "init_backend", "init_rpc", "init_rpc_async",
    "internal", "new_group", "new_group_async", "options", "register_backend", "session", "shutdown_async", "wait_all",
    "wait_any",
]  # fmt: skip
__all__ += api.__all__
__all__ += membership.__all__


def __dir__() -> list[str]:
    """The public names: what completion in an editor or a notebook shows. The private ones of torch work as well."""
    return __all__
