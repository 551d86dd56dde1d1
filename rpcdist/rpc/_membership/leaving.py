"""How a worker leaves the job.

Graceful, with a static world: everybody waits for everybody's outstanding work, in rounds, until a round in which
nobody had any. The wait has no clock by default, since a parameter server calls `shutdown` at once and its trainers
hours later. A worker that dies is not waited for; one that takes its place is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.result_streams import StreamTable
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._membership.coordinator import Coordinator
from rpcdist.rpc._membership.departing import Departing
from rpcdist.rpc._membership.departures import Departures
from rpcdist.rpc._membership.leader import Leader
from rpcdist.rpc._membership.membership_watch import MembershipWatch
from rpcdist.rpc._peers.connections import Connections
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import Network
from rpcdist.rpc._rref.manager import RRefManager
from rpcdist.rpc._serving.active_calls import ActiveCalls
from rpcdist.time_limits import (
    LAST_REPLIES_LIMIT_S,
    RREF_DELETION_LIMIT_S,
    SHUTDOWN_POLL_S,
    SHUTDOWN_REPORT_INTERVAL_S,
    THREAD_GRACE_S,
    UNREAD_STREAM_LIMIT_S,
    UNWANTED_CALL_LIMIT_S,
)

logger = logging.getLogger(__name__)


class Leaving:
    """One per agent; its methods block.

    Args:
        network: runs what waits on the I/O loop.
        connections: carry the last replies.
        directory: who is in the job, and who is lost.
        coordinator: knows who is still there where workers come and go.
        is_static: whether the members are the same from beginning to end.
        caller: has calls outstanding.
        retries: has calls that are to be made again.
        active_calls: of others, that are being handled.
        rrefs: holds references to values elsewhere.
        streams: may be open here, with nobody who reads them.
        leader: leads gatherings that may still be open.
        departures: leads the rounds in which everybody says whether it has work.
        departing: takes part in them.
        watch: is told when everybody leaves.
        explain: says what calls wait for here, with their stacks.
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
        retries: Retries,
        active_calls: ActiveCalls,
        rrefs: RRefManager,
        streams: StreamTable,
        leader: Leader,
        departures: Departures,
        departing: Departing,
        watch: MembershipWatch,
        explain: Callable[[], str],
    ) -> None:
        self._network = network
        self._connections = connections
        self._directory = directory
        self._coordinator = coordinator
        self._is_static = is_static
        self._caller = caller
        self._retries = retries
        self._active_calls = active_calls
        self._rrefs = rrefs
        self._streams = streams
        self._leader = leader
        self._departures = departures
        self._departing = departing
        self._watch = watch
        self._explain = explain
        self._led_last = False

    def __repr__(self) -> str:
        return f"<Leaving of {self._me.name}>"

    @property
    def _me(self) -> Identity:
        return self._directory.me

    def wait_for_work(self, timeout_s: float, delete_references: Callable[[], object] | None = None) -> dict[str, str]:
        """Waits for outstanding work, here and (in a static world) everywhere.

        Args:
            timeout_s: limit of the whole, in seconds; infinity waits as long as the others live.
            delete_references: gives back the references that this worker holds, in a static world, when everybody
                leaves; by default `RRefManager.delete_all_user_and_unforked_owner_rrefs`.

        Returns:
            The workers that are lost and were not waited for, and why, by name.

        Raises:
            DeadlineExceeded: the time is over; the text says who or what is missing.
            WorkerLost: see `Departing.take_part`.
        """
        deadline = Deadline.after(timeout_s)
        if not self._is_static:
            self._wait_idle(deadline)
            self._leave_elastic(deadline)
            return self._directory.losses()
        self._departing.take_part(True, deadline)
        # Everybody has called shutdown: what is left of references and streams is not needed any more.
        if delete_references is not None:
            delete_references()
        else:
            self._rrefs.delete_all_user_and_unforked_owner_rrefs(RREF_DELETION_LIMIT_S)
        seen = -1
        while True:
            self._wait_idle(deadline, all_are_leaving=True)
            made = self._caller.calls.num_work
            had_work, seen = made != seen, made
            # Nobody is done before everybody was idle for a whole round: a call may make others anywhere.
            outcome = self._departing.take_part(had_work, deadline)
            if not outcome.had_work:
                self._watch.all_leave(outcome.losses)
                self._led_last = outcome.led_here
                return dict(outcome.losses)

    def _leave_elastic(self, deadline: Deadline) -> None:
        """The coordinator stays until the others have left, for they find each other through it."""
        limit_s = min(RREF_DELETION_LIMIT_S, deadline.remaining_s())
        self._rrefs.delete_all_user_and_unforked_owner_rrefs(limit_s, others=False)
        service = self._coordinator.service
        if service is None:
            return
        if not self._network.run(service.alone(self._me, deadline.remaining_s()), None):
            left = [member.identity.name for member in service.others(self._me)]
            raise DeadlineExceeded(f"shutdown of the coordinator {self._me.name!r} timed out; still there: {left}")

    def _wait_idle(self, deadline: Deadline, all_are_leaving: bool = False) -> None:
        """Waits for calls and handlers of this worker. While all are leaving, also for the streams that it reads."""
        calls, active_calls = self._caller.calls, self._active_calls
        began = reported = time.monotonic()
        while True:
            step_s = min(SHUTDOWN_POLL_S, deadline.remaining_s())
            waits = (self._retries.wait_empty, calls.wait_empty, active_calls.wait_idle)
            if all(wait(step_s) for wait in waits) and not len(calls):
                if not all_are_leaving or self._streams.wait_empty(step_s):
                    return
            if all_are_leaving and not len(calls) and active_calls.only_streams:
                self._streams.close_unread(UNREAD_STREAM_LIMIT_S)
            for unwanted in active_calls.give_up(began, UNWANTED_CALL_LIMIT_S):
                logger.error(
                    "shutdown of %s gives up %s: its caller waits no longer, and it has not ended for %.0f s",
                    self._me.name, unwanted, UNWANTED_CALL_LIMIT_S,
                )  # fmt: skip
            left = [repr(call) for call in calls][:5] + active_calls.describe()[:5] + self._streams.describe()[:5]
            if deadline.expired():
                raise DeadlineExceeded(f"shutdown timed out while calls are outstanding on {self._me.name!r}: {left}")
            if time.monotonic() - reported >= SHUTDOWN_REPORT_INTERVAL_S:
                reported = time.monotonic()
                logger.warning("shutdown of %s waits for %s\n%s", self._me.name, left, self._explain())

    def send_last_replies(self, together: bool) -> None:
        """Lets the replies that are under way reach the others; those who wait here for others get theirs.

        Args:
            together: all the others leave at this moment, too.
        """
        self._leader.give_up()
        self._departures.give_up()
        self._active_calls.wait_gathered(LAST_REPLIES_LIMIT_S)
        # The leader of the last round has replies on their way, and a stream that ends drops them: it leaves last.
        is_last = together and self._led_last
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
