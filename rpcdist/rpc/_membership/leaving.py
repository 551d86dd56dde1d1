"""How a worker leaves the job.

Graceful, with a static world: everybody waits for everybody's outstanding work, in rounds, until a round in which
nobody had any. The wait has no clock by default, since a parameter server calls `shutdown` at once and its trainers
hours later; it ends with an error when a worker that is waited for dies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._membership.coordinator import Coordinator
from rpcdist.rpc._membership.gatherings import Gatherings
from rpcdist.rpc._membership.leader import Leader
from rpcdist.rpc._peers.connections import Connections
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import Network
from rpcdist.rpc._rref.manager import RRefManager
from rpcdist.rpc._serving.dispatcher import Dispatcher
from rpcdist.time_limits import (
    LAST_REPLIES_LIMIT_S,
    RREF_DELETION_LIMIT_S,
    SHUTDOWN_POLL_S,
    SHUTDOWN_REPORT_INTERVAL_S,
    THREAD_GRACE_S,
)

__all__ = ["Leaving"]

logger = logging.getLogger(__name__)


class Leaving:
    """One per agent; its methods block.

    Args:
        network: runs what waits on the I/O loop.
        connections: carry the last replies.
        directory: who is in the job.
        coordinator: knows who is still there where workers come and go.
        is_static: whether the members are the same from beginning to end.
        caller: has calls outstanding.
        dispatcher: handles calls of others.
        rrefs: holds references to values elsewhere.
        leader: leads gatherings that may still be open.
        gatherings: joins those in which everybody says whether it has work.
        watch: connects to a worker, so that its death is noticed.
    """

    def __init__(
        self,
        *,
        network: Network,
        connections: Connections,
        directory: Directory,
        coordinator: Coordinator,
        is_static: bool,
        caller: Caller,
        dispatcher: Dispatcher,
        rrefs: RRefManager,
        leader: Leader,
        gatherings: Gatherings,
        watch: Callable[[int, str], WorkerLost | None],
    ) -> None:
        self._network = network
        self._connections = connections
        self._directory = directory
        self._coordinator = coordinator
        self._is_static = is_static
        self._caller = caller
        self._dispatcher = dispatcher
        self._rrefs = rrefs
        self._leader = leader
        self._gatherings = gatherings
        self._watch = watch

    def __repr__(self) -> str:
        return f"<Leaving of {self._me.name}>"

    @property
    def _me(self) -> Identity:
        return self._directory.me

    def wait_for_work(self, timeout_s: float) -> None:
        """Waits for outstanding work, here and (in a static world) everywhere.

        Args:
            timeout_s: limit of the whole, in seconds; infinity waits as long as the others live.

        Raises:
            RuntimeError: the time is over; the text says who or what is missing.
            WorkerLost: a worker died that was waited for.
        """
        deadline = Deadline.after(timeout_s)
        if not self._is_static:
            self._wait_idle(deadline)
            self._leave_elastic(deadline)
            return
        seen = -1
        while True:
            self._wait_idle(deadline)
            made = self._caller.calls.num_work
            busy, seen = made != seen, made
            # Nobody is done before everybody was idle for a whole round: a call may make others anywhere.
            if not any(self._gatherings.all_gather(busy, None, deadline.remaining_s()).values()):
                return

    def _leave_elastic(self, deadline: Deadline) -> None:
        """The coordinator stays until the others have left, for they find each other through it."""
        limit_s = min(RREF_DELETION_LIMIT_S, deadline.remaining_s())
        self._rrefs.delete_all_user_and_unforked_owner_rrefs(limit_s, others=False)
        service = self._coordinator.service
        if service is None:
            return
        for member in service.others(self._me):
            self._connect_to(member.identity)
        if not self._network.run(service.alone(self._me, deadline.remaining_s()), None):
            left = [member.identity.name for member in service.others(self._me)]
            raise DeadlineExceeded(f"shutdown of the coordinator {self._me.name!r} timed out; still there: {left}")

    def _connect_to(self, identity: Identity) -> None:
        if self._directory.is_news(identity):
            self._directory.refresh()
        self._watch(identity.id, "the shutdown of the coordinator")

    def _wait_idle(self, deadline: Deadline) -> None:
        calls, dispatcher = self._caller.calls, self._dispatcher
        reported = time.monotonic()
        while True:
            step_s = min(SHUTDOWN_POLL_S, deadline.remaining_s())
            if calls.wait_empty(step_s) and dispatcher.wait_idle(step_s) and not len(calls):
                return
            left = [repr(call) for call in calls][:5] + dispatcher.describe()[:5]
            if deadline.expired():
                raise DeadlineExceeded(f"shutdown timed out while calls are outstanding on {self._me.name!r}: {left}")
            if time.monotonic() - reported >= SHUTDOWN_REPORT_INTERVAL_S:
                reported = time.monotonic()
                logger.warning("shutdown of %s waits for %s", self._me.name, left)

    def send_last_replies(self, together: bool) -> None:
        """Lets the replies that are under way reach the others; those who wait here for others get theirs.

        Args:
            together: all the others leave at this moment, too.
        """
        self._leader.give_up()
        self._dispatcher.wait_gathered(LAST_REPLIES_LIMIT_S)
        # The leader of the last round has replies on their way, and a stream that ends drops them: it leaves last.
        is_last = together and self._is_static and self._me.name == min(self._directory.names())
        flush = self._connections.flush(LAST_REPLIES_LIMIT_S, wait_for_others=is_last)
        try:
            self._network.run(flush, LAST_REPLIES_LIMIT_S + THREAD_GRACE_S)
        except RpcdistError:
            logger.debug("the last replies were not flushed", exc_info=True)

    def say_goodbye(self) -> None:
        """Where workers come and go, the coordinator is told that this one goes."""
        if self._is_static:
            return
        try:
            self._coordinator.leave()
        except RpcdistError as exc:
            logger.debug("the coordinator did not hear that this worker leaves: %s", exc)
