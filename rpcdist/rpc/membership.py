"""Who is in the job, by name and by role; who comes and goes; and a worker that only serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import WorkerLost
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.async_forms import async_form, off_loop
from rpcdist.rpc._membership.membership_watch import MembershipChange
from rpcdist.rpc._membership.serving import PING, STOP
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, MIN_WAIT_S

__all__ = [
    "MembershipChange",
    "on_membership_change",
    "serve",
    "serve_async",
    "stop_serving",
    "stop_serving_async",
    "wait_for_worker",
    "wait_for_worker_async",
    "workers",
]


def workers(role: str | None = None) -> list[WorkerInfo]:
    """The workers that live, by rank, this one included; those of a role (`RpcOptions(role=...)`), if one is given.

    Nobody is asked: the coordinator tells everybody who comes and goes.
    """
    living = current_agent().directory.living()
    return [WorkerInfo(m.identity.name, m.identity.id) for m in living if role is None or m.role == role]


@off_loop("await rpc.wait_for_worker_async(...)")
def wait_for_worker(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> WorkerInfo:
    """Waits until a worker of this name is in the job and answers: one that is late, or the replacement of a lost one.

    Args:
        name: of the worker.
        timeout: limit in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        DeadlineExceeded: the time is over.
        BlockingInLoop: called on an event loop.
    """
    agent = current_agent()
    deadline = Deadline.after(agent.caller.timeout_of(timeout))
    pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, deadline)
    while True:
        info = agent.directory.wait_until_lives(name, deadline)
        limit_s = max(deadline.remaining_s(), MIN_WAIT_S) if deadline.is_finite else 0
        try:
            # A worker counts as alive until its death is certain, half a second after its connection broke.
            agent.caller.gather(info.id, PING, (), limit_s)
        except WorkerLost:
            time.sleep(next(pauses))
        else:
            return info


wait_for_worker_async = async_form(wait_for_worker)


def on_membership_change(callback: Callable[[MembershipChange], object]) -> Callable[[], None]:
    """Has a function called whenever a worker joins, leaves or is lost.

    The calls come one at a time, in the order of the changes, on a thread of the pool, so the function may block and
    call other workers. What it raises is logged.

    Returns:
        A function that ends that.
    """
    return current_agent().watch.add(callback)


@off_loop("await rpc.serve_async(...)")
def serve(timeout: float | None = None) -> str | None:
    """Serves the calls of others until this worker is told to stop, and returns why; call `shutdown` then.

    It is told by SIGTERM or Ctrl-C, where this is the main thread (a second one has its usual effect), by
    `stop_serving` on another worker, or by a `shutdown` on another thread.

    Args:
        timeout: limit in seconds; None for none. When it is over, the result is None.

    Raises:
        CoordinatorLost: rank 0 was lost, and no process took its place within `RpcOptions(orphan_timeout=...)`.
        BlockingInLoop: called on an event loop.
    """
    return current_agent().serving.wait(timeout)


serve_async = async_form(serve)


@off_loop("await rpc.stop_serving_async(...)")
def stop_serving(to: Destination, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Ends `serve` on another worker, also if it calls that only later. Arguments and errors as for `rpc_sync`."""
    agent = current_agent()
    limit_s = agent.caller.timeout_of(timeout)
    agent.caller.gather(
        agent.directory.resolve(to), STOP, (agent.worker_name,), 0 if limit_s == float("inf") else limit_s
    )


stop_serving_async = async_form(stop_serving)
