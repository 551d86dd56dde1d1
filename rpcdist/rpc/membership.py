"""Finds workers by name and role, reports membership changes, and lets a worker serve calls until it is stopped."""

from __future__ import annotations

from collections.abc import Callable

from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import ConfigError, DeadlineExceeded, WorkerLost, listed
from rpcdist.giving_up import pause
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.rpc._membership.roster_news import MembershipChange
from rpcdist.rpc._membership.shutdown import PING, STOP
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import FIRST_PAUSE_S, LONGEST_PAUSE_S

__all__ = [
    "MembershipChange", "on_membership_change", "serve", "serve_async", "stop_serving", "stop_serving_async",
    "wait_for_worker", "wait_for_worker_async", "wait_for_workers", "wait_for_workers_async", "workers",
]  # fmt: skip


def workers(role: str | None = None) -> list[WorkerInfo]:
    """The living workers, this one included, by rank; with `role`, those that gave it to `init_rpc(..., role=...)`.

    It makes no call: the coordinator reports every worker that joins or leaves.
    """
    living = current_agent().directory.living()
    return [WorkerInfo(m.identity.name, m.identity.id) for m in living if role is None or m.role == role]


@off_loop("await rpc.wait_for_worker_async(...)")
def wait_for_worker(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> WorkerInfo:
    """Waits until a worker of this name, or the replacement of a lost one, has joined the job and answers.

    Args:
        name: the worker's name.
        timeout: limit in seconds; 0 means no limit; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        DeadlineExceeded: the timeout expired.
        BlockingInLoop: called on an event loop.
    """
    agent = current_agent()
    deadline = Deadline.after(agent.caller.timeout_of(timeout))
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
    while True:
        info = agent.directory.wait_until_lives(name, deadline)
        try:
            # A worker counts as alive until its death is certain, half a second after its connection broke.
            agent.caller.gather(info.id, PING, (), deadline.timeout_s())
        except WorkerLost:
            pause(next(pauses))
        else:
            return info


wait_for_worker_async = async_form(wait_for_worker, ends_waits=True)
"""`wait_for_worker` as a coroutine function."""


@off_loop("await rpc.wait_for_workers_async(...)")
def wait_for_workers(role: str, count: int, timeout: float = UNSET_RPC_TIMEOUT) -> list[WorkerInfo]:
    """Waits until `count` workers of a role have joined and answer; returns all that answer, by rank.

    Args:
        role: the role that the workers gave to `init_rpc`.
        count: the minimum number of workers.
        timeout: limit in seconds; 0 means no limit; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        ConfigError: the count is less than 1.
        DeadlineExceeded: the timeout expired; the text names the workers that have joined.
        BlockingInLoop: called on an event loop.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count is the number of workers to wait for, 1 or more, not {count!r}")
    agent = current_agent()
    limit_s = agent.caller.timeout_of(timeout)
    deadline = Deadline.after(limit_s)
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
    while True:
        agent.directory.wait_while(lambda: len(workers(role)) < count, deadline)
        found = workers(role)
        if len(found) >= count:
            asked = [agent.caller.start_gathering(info.id, PING, (), deadline.timeout_s()) for info in found]
            answering = [info for info, future in zip(found, asked, strict=True) if _answers(future)]
            if len(answering) >= count:
                return answering
        if deadline.expired():
            raise DeadlineExceeded(
                f"{len(found)} of {count} workers of the role {role!r} came within {limit_s:.3g} s: "
                f"{listed(info.name for info in found) or 'none'}. Check that the others were started with "
                f"init_rpc(..., role={role!r}), and look at their logs"
            )
        pause(next(pauses))  # a listed worker that does not answer has died or is about to exit


wait_for_workers_async = async_form(wait_for_workers, ends_waits=True)
"""`wait_for_workers` as a coroutine function."""


def _answers(future: Future[object]) -> bool:
    try:
        future.wait()
    except (WorkerLost, DeadlineExceeded):
        return False
    return True


def on_membership_change(callback: Callable[[MembershipChange], object]) -> Callable[[], None]:
    """Registers a function that is called whenever a worker joins, leaves or is lost.

    The calls come one at a time, in the order of the changes, on a pool thread, so the function may block and
    call other workers. Its exceptions are logged.

    Returns:
        A function that removes the registration.
    """
    return current_agent().watch.add(callback)


@off_loop("await rpc.serve_async(...)")
def serve(timeout: float | None = None) -> str | None:
    """Serves the calls of other workers until this one is stopped, and returns the reason; call `shutdown` afterwards.

    On the main thread, SIGTERM, SIGHUP or Ctrl-C stops it (a second signal has its usual effect). `stop_serving` on
    another worker and `shutdown` on another thread stop it, too.

    Args:
        timeout: limit in seconds, after which `serve` returns None; None means no limit.

    Raises:
        CoordinatorLost: rank 0 was lost, and no process replaced it within `RpcOptions(orphan_timeout=...)`.
        BlockingInLoop: called on an event loop.
    """
    return current_agent().serving.wait(timeout)


serve_async = async_form(serve, ends_waits=True)
"""`serve` as a coroutine function."""


@off_loop("await rpc.stop_serving_async(...)")
def stop_serving(to: Destination, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Ends `serve` on another worker, even if that worker calls it later. Arguments and errors as for `rpc_sync`."""
    agent = current_agent()
    limit_s = agent.caller.timeout_of(timeout)
    agent.caller.gather(
        agent.directory.resolve(to), STOP, (agent.worker_name,), 0 if limit_s == float("inf") else limit_s
    )


stop_serving_async = async_form(stop_serving)
"""`stop_serving` as a coroutine function."""
