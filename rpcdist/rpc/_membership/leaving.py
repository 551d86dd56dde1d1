"""The end of a worker's part in the job: it waits for outstanding work, and sends its last replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._membership.barrier import names_in
from rpcdist.rpc._membership.shutdown import DEPART, ENDED, LEAVES, NOT_ARRIVED, POINTS
from rpcdist.time_limits import (
    ANSWER_LIMIT_S,
    CONNECTION_CLOSE_LIMIT_S,
    FIRST_PAUSE_S,
    IDLE_LIMIT_S,
    LOG_PERIOD_S,
    LONGEST_PAUSE_S,
    RREF_DELETION_LIMIT_S,
    SLOW_CHECK_INTERVAL_S,
    SLOW_WORK_LIMIT_S,
    THREAD_GRACE_S,
)

logger = logging.getLogger(__name__)


class Leaving:
    """Takes the worker of an agent out of the job; the methods block."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._me = agent.identity
        self._hosted_last = False

    def wait_for_work(self, timeout_s: float, delete_references: Callable[[], object] | None = None) -> dict[str, str]:
        """Waits for outstanding work, here and (in a static world) everywhere.

        Args:
            timeout_s: limit on the whole wait, in seconds; infinity waits as long as the others live.
            delete_references: returns the references that this worker holds, in a static world, when all leave; by
                default `RRefShell.delete_all_user_and_unforked_owner_rrefs`.

        Returns:
            The lost workers, which were not waited for, by name, with reasons.

        Raises:
            DeadlineExceeded: the time limit expired; the text names the missing workers or calls.
            WorkerLost: see `_take_part`.
        """
        deadline = Deadline.after(timeout_s)
        if not self._agent.is_static_group:
            self._wait_idle(deadline)
            self._leave_elastic(deadline)
            return self._agent.directory.losses()
        self._take_part(True, deadline)
        # All workers have called shutdown, so the remaining references and streams are no longer needed.
        if delete_references is not None:
            delete_references()
        else:
            self._agent.rrefs.delete_all_user_and_unforked_owner_rrefs(RREF_DELETION_LIMIT_S)
        seen = -1
        while True:
            self._wait_idle(deadline, all_are_leaving=True)
            made = self._agent.caller.calls.num_work
            had_work, seen = made != seen, made
            # All must be idle for a whole round, since a call may make others on any worker.
            had_work, losses = self._take_part(had_work, deadline)
            if not had_work:
                self._agent.watch.all_leave(losses)
                return losses

    def _leave_elastic(self, deadline: Deadline) -> None:
        """Waits, at the coordinator, until the others have left, since they find each other through it."""
        limit_s = min(RREF_DELETION_LIMIT_S, deadline.remaining_s())
        self._agent.rrefs.delete_all_user_and_unforked_owner_rrefs(limit_s, others=False)
        service = self._agent.coordinator.service
        if service is None:
            return
        if not self._agent.network.run(service.alone(self._me, deadline.remaining_s()), None):
            left = [member.identity.name for member in service.others(self._me)]
            raise DeadlineExceeded(f"shutdown of the coordinator {self._me.name!r} timed out; still there: {left}")
        self._agent.coordinator.mark_left()

    def _wait_idle(self, deadline: Deadline, all_are_leaving: bool = False) -> None:
        """Waits for calls and handlers of this worker; while all are leaving, also for the streams that it reads."""
        calls, active_calls = self._agent.caller.calls, self._agent.dispatcher.calls
        began = reported = time.monotonic()
        while True:
            step_s = min(SLOW_CHECK_INTERVAL_S, deadline.remaining_s())
            waits = (self._agent.retries.wait_empty, calls.wait_empty, active_calls.wait_idle)
            if all(wait(step_s) for wait in waits) and not len(calls):
                if not all_are_leaving or self._agent.streams.wait_empty(step_s):
                    return
            if all_are_leaving and not len(calls) and active_calls.only_streams:
                self._agent.streams.close_unread(IDLE_LIMIT_S)
            for unwanted in active_calls.abandon(began, SLOW_WORK_LIMIT_S):
                logger.error(
                    "shutdown of %s abandons %s: its caller no longer waits, and the call has not ended for %.0f s",
                    self._me.name, unwanted, SLOW_WORK_LIMIT_S,
                )  # fmt: skip
            left = [repr(call) for call in calls][:5] + active_calls.describe()[:5] + self._agent.streams.describe()[:5]
            if deadline.expired():
                raise DeadlineExceeded(f"shutdown timed out while calls are outstanding on {self._me.name!r}: {left}")
            if time.monotonic() - reported >= LOG_PERIOD_S:
                reported = time.monotonic()
                explained = self._agent.inspector.explain()
                logger.warning("shutdown of %s waits for %s\n%s", self._me.name, left, explained)

    def _take_part(self, had_work: bool, deadline: Deadline) -> tuple[bool, dict[str, str]]:
        """Reports whether this worker had work since the last round, and waits for the reports of all living workers.

        Returns:
            Whether a worker had work, or the round was restarted under another host; and the lost workers, which were
            not waited for, by name, with reasons.

        Raises:
            DeadlineExceeded: the time limit expired; the text names the missing workers.
            WorkerLost: another worker is the host, and lives, but cannot be reached. Its round waits for this worker,
                and a round that this worker hosted would wait for the workers of the other one.
            RpcdistError: another thread has closed RPC in this process.
        """
        me = self._me
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        pointed_to: int | None = None
        missing: list[str] | None = None
        is_new = False
        reported = time.monotonic()
        while True:
            host = pointed_to if pointed_to is not None else self._agent.directory.first_living().id
            pointed_to = None
            self._check_host_in_reach()
            try:
                # Reports to a lost host do not count: this worker has not been idle for a whole round.
                answer = self._agent.caller.gather(host, DEPART, (me.name, had_work or is_new), deadline.timeout_s())
            except DeadlineExceeded as exc:
                raise self._late(host, missing) from exc
            except RpcdistError as exc:
                if self._agent.is_closed:
                    raise
                # Perhaps the host is just closing. The next iteration asks the next host.
                level = logging.DEBUG
                if time.monotonic() - reported >= LOG_PERIOD_S:
                    level, reported = logging.WARNING, time.monotonic()
                name = self._agent.directory.name_of(host)
                logger.log(level, "shutdown of %s tries again, since %s could not host it: %s", me.name, name, exc)
                answer = [None]
            match answer:
                case [kind, bool(any_work), dict(losses)] if kind == ENDED:
                    self._hosted_last = host == me.id
                    return any_work or is_new, {name: why for name, why in losses.items() if isinstance(why, str)}
                case [kind, int(other)] if kind == POINTS:
                    pointed_to = other
                case [kind, list(names)] if kind == LEAVES:
                    missing = [name for name in names_in(names) if name != me.name]
            is_new = True
            if deadline.expired():
                raise self._late(host, missing)
            time.sleep(next(pauses))  # meanwhile the detectors decide who hosts; Ctrl-C ends the sleep

    def _check_host_in_reach(self) -> None:
        host = self._agent.directory.first_living().id
        for identity in self._agent.directory.suspected():
            if identity.id < host and (silence_s := self._agent.router.silence_out_of_reach(identity)) is not None:
                what = f"the shutdown of {self._me.name!r}, which {identity.name!r} hosts"
                raise WorkerLost(identity.name, what, silence_s, self._agent.directory.losses().get(identity.name, ""))

    def _late(self, host: int, missing: list[str] | None) -> DeadlineExceeded:
        name = self._agent.directory.name_of(host)
        text = f"shutdown of {self._me.name!r} timed out"
        if missing is None:
            try:
                missing = names_in(self._agent.caller.gather(host, NOT_ARRIVED, (), ANSWER_LIMIT_S))
            except RpcdistError as exc:
                return DeadlineExceeded(f"{text}, and its host {name!r} did not report the missing workers: {exc}")
        return DeadlineExceeded(f"{text}; these workers have not called it: {missing}")

    def send_last_replies(self, together: bool) -> None:
        """Sends pending replies, and answers the workers that wait here for others.

        Args:
            together: whether all other workers also leave now.
        """
        self._agent.gatherings.give_up()
        self._agent.rounds.give_up()
        self._agent.dispatcher.calls.wait_gathered(CONNECTION_CLOSE_LIMIT_S)
        # The host of the last round still sends replies, which the end of its sessions would drop, so it leaves last.
        is_last = together and self._hosted_last
        flush = self._agent.connections.flush(CONNECTION_CLOSE_LIMIT_S, wait_for_others=is_last)
        try:
            self._agent.network.run(flush, CONNECTION_CLOSE_LIMIT_S + THREAD_GRACE_S)
        except RpcdistError:
            logger.debug("the last replies were not flushed", exc_info=True)
