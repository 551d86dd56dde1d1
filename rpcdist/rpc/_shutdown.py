"""How a worker leaves.

Graceful, with a static world: everybody waits for everybody's outstanding work, in rounds, until a round in which
nobody had any. The wait has no clock by default, since a parameter server calls `shutdown` at once and its trainers
hours later; it ends with an error when a worker that is waited for dies.
"""

from __future__ import annotations

import logging
import time

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError, RRefError
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._membership.gatherings import all_gather
from rpcdist.time_limits import (
    LAST_REPLIES_LIMIT_S,
    RPC_CLOSE_LIMIT_S,
    RREF_DELETION_LIMIT_S,
    SHUTDOWN_POLL_S,
    SHUTDOWN_REPORT_INTERVAL_S,
    THREAD_GRACE_S,
)

__all__ = ["close_agent", "join"]

logger = logging.getLogger(__name__)


def join(agent: Agent, timeout_s: float) -> None:
    """Waits for outstanding work, here and (in a static world) everywhere; blocks.

    Args:
        agent: this worker's.
        timeout_s: limit of the whole, in seconds; infinity waits as long as the others live.

    Raises:
        RuntimeError: the time is over; the text says who or what is missing.
        WorkerLost: a worker died that was waited for.
    """
    deadline = Deadline.after(timeout_s)
    if agent.world_size is None:
        _wait_idle(agent, deadline)
        _leave_elastic(agent, deadline)
        return
    seen = -1
    while True:
        _wait_idle(agent, deadline)
        made = agent.caller.calls.total - agent.gatherings.num_calls
        busy, seen = made != seen, made
        # Nobody is done before everybody was idle for a whole round: a call may make others anywhere.
        if not any(all_gather(agent, busy, None, deadline.remaining_s()).values()):
            return


def _leave_elastic(agent: Agent, deadline: Deadline) -> None:
    """Says goodbye. The coordinator stays until the others have left, for they find each other through it."""
    agent.rrefs.delete_all_user_and_unforked_owner_rrefs(
        min(RREF_DELETION_LIMIT_S, deadline.remaining_s()), others=False
    )
    membership = agent.membership
    if membership is None or membership.service is None:
        return
    service = membership.service
    for record in service.others():
        agent.connections.watch(record.identity)
    if not agent.node.run(service.alone(deadline.remaining_s()), None):
        left = [record.identity.name for record in service.others()]
        raise DeadlineExceeded(f"shutdown of the coordinator {agent.worker_name!r} timed out; still there: {left}")


def _wait_idle(agent: Agent, deadline: Deadline) -> None:
    reported = time.monotonic()
    while True:
        step_s = min(SHUTDOWN_POLL_S, deadline.remaining_s())
        if agent.caller.calls.wait_empty(step_s) and agent.dispatcher.wait_idle(step_s) and not len(agent.caller.calls):
            return
        left = [repr(call) for call in agent.caller.calls][:5] + agent.dispatcher.describe()[:5]
        if deadline.expired():
            raise DeadlineExceeded(f"shutdown timed out while calls are outstanding on {agent.worker_name!r}: {left}")
        if time.monotonic() - reported >= SHUTDOWN_REPORT_INTERVAL_S:
            reported = time.monotonic()
            logger.warning("shutdown of %s waits for %s", agent.worker_name, left)


def close_agent(agent: Agent, *, flush: bool, together: bool, ignore_leaks: bool) -> None:
    """Closes everything; idempotent, bounded.

    Args:
        agent: this worker's.
        flush: let the replies that are under way reach the others first; those who wait here for others get theirs.
        together: all the others leave at this moment, too.
        ignore_leaks: False raises when references to values of this worker are left.

    Raises:
        RRefError: other workers still hold references to values of this worker.
    """
    leak: RRefError | None = None
    try:
        if not ignore_leaks:
            agent.rrefs.check_leaks()
    except RRefError as exc:
        leak = exc
    try:
        if flush:
            agent.leader.give_up()
            agent.dispatcher.wait_gathered(LAST_REPLIES_LIMIT_S)
            agent.node.run(agent.flush(LAST_REPLIES_LIMIT_S, together), LAST_REPLIES_LIMIT_S + THREAD_GRACE_S)
    except RpcdistError:
        logger.debug("the last replies were not flushed", exc_info=True)
    finally:
        agent.close(RPC_CLOSE_LIMIT_S)
    if leak is not None:
        raise leak
