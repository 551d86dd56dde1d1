"""The watchdog of an NCCL group: a thread that asks the device, since nobody else does, whether operations end.

Rules:

 1. Every operation is registered before its first call of NCCL, so that a call that blocks is under watch as well.
 2. The first failure is final, and told to the other ranks by whoever found it. All operations that are not done fail
    with it, and the communicator is aborted, which ends kernels and calls that wait for a peer.
 3. Tensors of operations that failed are kept until the communicator is aborted: the device may use them until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rpcdist.collectives import flight_recorder
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.engine import Reporter
from rpcdist.collectives._group.failure import FailureKind, GroupFailure
from rpcdist.collectives._nccl.nccl_library import Communicator, Runtime
from rpcdist.collectives._nccl.nccl_work import NcclWork
from rpcdist.deadline import Deadline
from rpcdist.time_limits import (
    GROUP_VERDICT_LIMIT_S,
    IDLE_RECHECK_S,
    NCCL_CLOSE_LIMIT_S,
    NCCL_ERROR_POLL_S,
    NCCL_POLL_S,
    THREAD_GRACE_S,
)

__all__ = ["NcclWatchdog"]

logger = logging.getLogger(__name__)


class NcclWatchdog:
    """See above. It is what a group's watch talks to (`WatchListener`).

    Args:
        context: of the group.
        runtime: of its device.
        communicator: of the group; the watchdog ends it.

    Attributes:
        failure: why the group ended; None while it works.
        reporter: tells the other ranks.
    """

    def __init__(self, context: GroupContext, runtime: Runtime, communicator: Communicator) -> None:
        self.failure: GroupFailure | None = None
        self.reporter = Reporter()
        self._context = context
        self._runtime = runtime
        self._communicator = communicator
        self._changed = threading.Condition()
        self._pending: dict[NcclWork, int] = {}  # with the number of a collective, 0 for messages
        self._sequence = 0
        self._last = "nothing"
        self._departed: dict[int, int] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name=f"rpcdist nccl {context.name}", daemon=True)
        self._thread.start()

    @property
    def sequence(self) -> int:
        """How many collectives were registered."""
        return self._sequence

    def __repr__(self) -> str:
        state = "failed" if self.failure is not None else f"{len(self._pending)} under way"
        return f"<NcclWatchdog of group {self._context.name!r}: {state}, #{self._sequence}>"

    # ------------------------------------------------------------ registering (any thread)

    def register(self, make: Callable[[int], NcclWork], collective: bool) -> NcclWork:
        """Gives an operation its number (0 for messages) and watches over it from now on.

        Raises:
            CollectiveError: the group failed or was destroyed.
        """
        with self._changed:
            number = self._sequence + 1 if collective else 0
            work = make(number)
            failure = self.failure
            if failure is None and self._closing:
                failure = GroupFailure(FailureKind.ABORTED, "the group was destroyed on this rank")
            if failure is not None:
                raise failure.error(work.title)
            self._sequence = max(self._sequence, number)
            self._last = work.title
            self._pending[work] = number
            flight_recorder.note(work.record)
            self._changed.notify_all()
        return work

    def forget(self, work: NcclWork, error: BaseException) -> None:
        """The operation was refused before anything went to the device."""
        with self._changed:
            self._pending.pop(work, None)
        work.fail(error)

    # ------------------------------------------------------------ failing (any thread)

    def fail(self, failure: GroupFailure) -> bool:
        """Ends the group on this rank; returns False when it had failed before."""
        with self._changed:
            if self.failure is not None:
                return False
            self.failure = failure
            works = list(self._pending)
            self._changed.notify_all()
        for work in works:
            work.fail(failure.error(work.title))
        return True

    def fail_everywhere(self, failure: GroupFailure) -> GroupFailure:
        """The same, telling the other ranks; returns the failure that counts."""
        if self.fail(failure):
            self.reporter.report(failure)
            path = flight_recorder.write_dump(self._context.ranks[self._context.rank])
            logger.error("group %r failed (%s); its last operations are in %s", self._context.name, failure, path)
        assert self.failure is not None
        return self.failure

    # ------------------------------------------------------------ what the watch tells and asks (any thread)

    def rank_left(self, rank: int, last_sequence: int) -> None:
        with self._changed:
            self._departed[rank] = last_sequence
            self._changed.notify_all()

    def where(self) -> tuple[int, str]:
        with self._changed:
            running = next((work.title for work in self._pending), None)
            return self._sequence, f"is in {running}" if running else f"finished {self._last}"

    # ------------------------------------------------------------ the thread

    def _watch(self) -> None:
        next_check = 0.0
        while True:
            with self._changed:
                while not (self._pending or self._closing or self.failure):
                    self._changed.wait(IDLE_RECHECK_S)
                if self.failure is not None or not self._pending:
                    break
            try:
                self._look()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + NCCL_ERROR_POLL_S
                    self._communicator.check_async_error()
            except self._runtime.errors as exc:
                self.fail_everywhere(self._reported(exc))
            with self._changed:
                if self._pending and self.failure is None:
                    self._changed.wait(NCCL_POLL_S)
        self._end()

    def _look(self) -> None:
        with self._changed:
            pending = list(self._pending.items())
        for work, number in pending:
            if work.look():
                with self._changed:
                    self._pending.pop(work, None)
                    self._changed.notify_all()
            elif left := [rank for rank, last in self._departed.items() if number > last]:
                self.fail_everywhere(self._departure(left[0]))
            elif work.deadline.expired():
                self._timed_out(work, number)

    def _timed_out(self, work: NcclWork, number: int) -> None:
        """Asks the watch who is missing; without an answer, says what is known here."""
        if self.reporter.report_timeout(work.title, number, frozenset()):
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None, GROUP_VERDICT_LIMIT_S)
        reason = f"{work.title} timed out on rank {self._name(self._context.rank)}: the device is not done with it"
        self.fail_everywhere(GroupFailure(FailureKind.TIMEOUT, reason))

    def _departure(self, rank: int) -> GroupFailure:
        reason = f"rank {self._name(rank)} left the group (destroy_process_group) after #{self._departed[rank]}"
        return GroupFailure(FailureKind.LOST, reason, (rank,))

    def _reported(self, exc: Exception) -> GroupFailure:
        reason = f"NCCL reported on rank {self._name(self._context.rank)}: {exc}"
        return GroupFailure(FailureKind.ERROR, f"{reason} (NCCL_DEBUG=WARN in the environment makes it say more)")

    def _name(self, rank: int) -> int:
        return self._context.ranks[rank]

    def _end(self) -> None:
        """Frees the communicator; after a failure by force."""
        try:
            if self.failure is None:
                self._communicator.destroy()
            else:
                self._communicator.abort()
        except self._runtime.errors as exc:
            logger.warning("the NCCL communicator of group %r did not end in order: %s", self._context.name, exc)
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    # ------------------------------------------------------------ life

    def close(self, deadline: Deadline) -> None:
        """Waits for what is under way, then frees the communicator; what is not done in time is aborted. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending or self.failure is not None, deadline.wait_s())
            drained = not self._pending
        if not drained:
            self.fail(GroupFailure(FailureKind.ABORTED, "the group was destroyed while operations ran"))
        self._thread.join(min(deadline.remaining_s() + THREAD_GRACE_S, NCCL_CLOSE_LIMIT_S))
        if self._thread.is_alive():
            logger.error("the NCCL communicator of group %r could not be freed in time", self._context.name)
