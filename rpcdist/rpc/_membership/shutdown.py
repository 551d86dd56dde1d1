"""How a worker leaves the job, and how the workers of a static world agree that all may leave.

A graceful shutdown of a static world proceeds in rounds, which the living worker of the lowest rank hosts. In a round
every living worker reports once whether it had work since its last report; the round ends when all have reported. All
leave after a round in which no worker had any. The wait has no limit by default, since a parameter server calls
`shutdown` at once and its trainers hours later. The rounds do not wait for a lost worker; they wait for its replacement
once that has joined. When the host is lost, the next worker hosts. If a worker is asked to host, but knows a living
worker of lower rank, it points to that one, so all agree as soon as their detectors do.

`StopRequests` is for a worker that serves until it is asked to stop: by a signal, by another worker, or by the end of
its agent.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from rpcdist.deadline import Deadline, backoff, longest_sleep_s
from rpcdist.errors import CoordinatorLost, DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.result_streams import StreamTable
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._membership.barrier import Gatherings, names_in
from rpcdist.rpc._membership.coordinator import Coordinator
from rpcdist.rpc._membership.roster_news import MembershipWatch
from rpcdist.rpc._peers.connections import Connections
from rpcdist.rpc._peers.directory import Directory, MemberEvent
from rpcdist.rpc._peers.network import Lifetime, Network, check_speaks_for
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._serving.active_calls import ActiveCalls
from rpcdist.time_limits import (
    ANSWER_LIMIT_S,
    CONNECTION_CLOSE_LIMIT_S,
    DEPARTURE_REVIEW_S,
    FIRST_PAUSE_S,
    IDLE_LIMIT_S,
    LOG_PERIOD_S,
    LONGEST_PAUSE_S,
    RREF_DELETION_LIMIT_S,
    SLOW_CHECK_INTERVAL_S,
    SLOW_WORK_LIMIT_S,
    THREAD_GRACE_S,
)
from rpcdist.waiters import ends_within

logger = logging.getLogger(__name__)

DEPART = "rpcdist.rpc._membership.shutdown:depart"
NOT_ARRIVED = "rpcdist.rpc._membership.shutdown:not_arrived"

ENDED = "ended"
"""First part of an answer: the round has ended. Then whether any worker had work, and the losses (name: reason)."""
POINTS = "points"
"""First part of an answer: another worker is the host. Then its rank."""
LEAVES = "leaves"
"""First part of an answer: the host leaves before the others. Then the names of the missing workers."""

Answer = list[Any]


class _DepartureRound:
    """One round at the host. Lives on the user loop."""

    def __init__(self) -> None:
        self.had_work: dict[str, bool] = {}
        self.came: set[str] = set()  # including the workers that have timed out
        self.ended = asyncio.Event()
        self.answer: Answer = []

    def end(self, *answer: Any) -> None:
        self.answer = list(answer)
        self.ended.set()


class ShutdownRounds:
    """The rounds that this worker hosts. Lives on the user loop, unless a method says otherwise.

    Args:
        watch: connects to a worker, so that its death is noticed.
    """

    def __init__(self, directory: Directory, watch: Callable[[int, str], WorkerLost | None]) -> None:
        self._directory = directory
        self._watch = watch
        self._rounds: list[_DepartureRound] = []
        self._last_missing: list[str] = []
        self._watched_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None

    def on_member(self, event: MemberEvent) -> None:
        """Reviews the rounds after a worker joined, left or was lost; on the I/O loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._review, True)

    def facts(self) -> list[GatheringFacts]:
        return [
            GatheringFacts("shutdown", tuple(sorted(round_.came)), tuple(self._absent(round_)))
            for round_ in list(self._rounds)
        ]

    def give_up(self) -> None:
        """Ends the open rounds, since this worker leaves; any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        for round_ in self._rounds:
            round_.end(LEAVES, self._absent(round_))
        self._rounds.clear()

    async def depart(self, name: str, had_work: bool) -> Answer:
        """Adds the report of one worker to the oldest round that lacks it, and waits for the round's end.

        Cancellation (at the worker's deadline, or if the worker is gone) removes the report again.
        """
        self._loop = asyncio.get_running_loop()
        if (superior := self._superior()) is not None:
            return [POINTS, superior]
        round_ = next((open_ for open_ in self._rounds if name not in open_.had_work), None)
        is_new = round_ is None
        if round_ is None:
            round_ = _DepartureRound()
            self._rounds.append(round_)
        round_.had_work[name] = had_work
        round_.came.add(name)
        self._review(is_new)
        try:
            while not await ends_within(round_.ended.wait(), DEPARTURE_REVIEW_S):
                self._review(time.monotonic() - self._watched_at >= DEPARTURE_REVIEW_S)
        except asyncio.CancelledError:
            if not round_.ended.is_set():
                round_.had_work.pop(name, None)
                self._last_missing = self._absent(round_)  # the worker that timed out asks for it next
                self._review()
            raise
        return round_.answer

    def _superior(self) -> int | None:
        """The rank of a living worker that should host instead of this one."""
        host = self._directory.first_living()
        return host.id if host.id < self._directory.me.id else None

    def _review(self, watches: bool = False) -> None:
        """Ends the rounds that are complete. With `watches`, connects to the workers that have not reported."""
        superior = self._superior()
        open_rounds, self._rounds = self._rounds, []
        for round_ in open_rounds:
            if superior is not None:
                round_.end(POINTS, superior)
            elif round_.had_work and self._is_complete(round_):
                round_.end(ENDED, any(round_.had_work.values()), self._losses(round_.had_work))
            elif round_.had_work:
                self._rounds.append(round_)
        if self._rounds and watches:
            self._watched_at = time.monotonic()
            # Including suspects: if one lives after all, two workers would host, and wait for each other.
            living = [member.identity for member in self._directory.living()]
            for identity in [*living, *self._directory.suspected()]:
                if identity != self._directory.me:
                    self._watch(identity.id, "the shutdown of the job")

    def _is_complete(self, round_: _DepartureRound) -> bool:
        living = self._directory.living()
        # The names are compared only if their number suffices.
        return len(round_.had_work) >= len(living) and all(one.identity.name in round_.had_work for one in living)

    def _absent(self, round_: _DepartureRound) -> list[str]:
        return sorted({member.identity.name for member in self._directory.living()} - round_.came)

    def _losses(self, there: Mapping[str, bool]) -> dict[str, str]:
        return {name: why for name, why in self._directory.losses().items() if name not in there}

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        return {DEPART: self._on_depart, NOT_ARRIVED: self._not_arrived}

    async def _on_depart(self, name: str, had_work: bool) -> Answer:
        check_speaks_for(name)
        return await self.depart(name, bool(had_work))

    async def _not_arrived(self) -> list[str]:
        """The living workers that have not joined the open round, or the last round that timed out."""
        return self._absent(self._rounds[0]) if self._rounds else self._last_missing


@dataclass(slots=True, kw_only=True, eq=False)
class Leaving:
    """Takes this worker out of the job; the methods block.

    Attributes:
        is_static: whether the members are the same from beginning to end.
        lifetime: once it has ended, another thread has closed RPC, and no host is asked any more.
        silence_out_of_reach: see `Router.silence_out_of_reach`.
        explain: describes what calls wait for here, with their stacks.
    """

    network: Network
    connections: Connections
    directory: Directory
    coordinator: Coordinator
    is_static: bool
    caller: Caller
    retries: Retries
    active_calls: ActiveCalls
    rrefs: RRefShell
    streams: StreamTable
    gatherings: Gatherings
    rounds: ShutdownRounds
    watch: MembershipWatch
    lifetime: Lifetime
    silence_out_of_reach: Callable[[Identity], float | None]
    explain: Callable[[], str]
    hosted_last: bool = False

    @property
    def _me(self) -> Identity:
        return self.directory.me

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
        if not self.is_static:
            self._wait_idle(deadline)
            self._leave_elastic(deadline)
            return self.directory.losses()
        self._take_part(True, deadline)
        # All workers have called shutdown, so the remaining references and streams are no longer needed.
        if delete_references is not None:
            delete_references()
        else:
            self.rrefs.delete_all_user_and_unforked_owner_rrefs(RREF_DELETION_LIMIT_S)
        seen = -1
        while True:
            self._wait_idle(deadline, all_are_leaving=True)
            made = self.caller.calls.num_work
            had_work, seen = made != seen, made
            # All must be idle for a whole round, since a call may make others on any worker.
            had_work, losses = self._take_part(had_work, deadline)
            if not had_work:
                self.watch.all_leave(losses)
                return losses

    def _leave_elastic(self, deadline: Deadline) -> None:
        """Waits, at the coordinator, until the others have left, since they find each other through it."""
        limit_s = min(RREF_DELETION_LIMIT_S, deadline.remaining_s())
        self.rrefs.delete_all_user_and_unforked_owner_rrefs(limit_s, others=False)
        service = self.coordinator.service
        if service is None:
            return
        if not self.network.run(service.alone(self._me, deadline.remaining_s()), None):
            left = [member.identity.name for member in service.others(self._me)]
            raise DeadlineExceeded(f"shutdown of the coordinator {self._me.name!r} timed out; still there: {left}")
        self.coordinator.mark_left()

    def _wait_idle(self, deadline: Deadline, all_are_leaving: bool = False) -> None:
        """Waits for calls and handlers of this worker; while all are leaving, also for the streams that it reads."""
        calls, active_calls = self.caller.calls, self.active_calls
        began = reported = time.monotonic()
        while True:
            step_s = min(SLOW_CHECK_INTERVAL_S, deadline.remaining_s())
            waits = (self.retries.wait_empty, calls.wait_empty, active_calls.wait_idle)
            if all(wait(step_s) for wait in waits) and not len(calls):
                if not all_are_leaving or self.streams.wait_empty(step_s):
                    return
            if all_are_leaving and not len(calls) and active_calls.only_streams:
                self.streams.close_unread(IDLE_LIMIT_S)
            for unwanted in active_calls.abandon(began, SLOW_WORK_LIMIT_S):
                logger.error(
                    "shutdown of %s abandons %s: its caller no longer waits, and the call has not ended for %.0f s",
                    self._me.name, unwanted, SLOW_WORK_LIMIT_S,
                )  # fmt: skip
            left = [repr(call) for call in calls][:5] + active_calls.describe()[:5] + self.streams.describe()[:5]
            if deadline.expired():
                raise DeadlineExceeded(f"shutdown timed out while calls are outstanding on {self._me.name!r}: {left}")
            if time.monotonic() - reported >= LOG_PERIOD_S:
                reported = time.monotonic()
                logger.warning("shutdown of %s waits for %s\n%s", self._me.name, left, self.explain())

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
        me = self.directory.me
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        pointed_to: int | None = None
        missing: list[str] | None = None
        is_new = False
        reported = time.monotonic()
        while True:
            host = pointed_to if pointed_to is not None else self.directory.first_living().id
            pointed_to = None
            self._check_host_in_reach()
            try:
                # Reports to a lost host do not count: this worker has not been idle for a whole round.
                answer = self.caller.gather(host, DEPART, (me.name, had_work or is_new), deadline.timeout_s())
            except DeadlineExceeded as exc:
                raise self._late(host, missing) from exc
            except RpcdistError as exc:
                if self.lifetime.is_closed:
                    raise
                # Perhaps the host is just closing. The next iteration asks the next host.
                level = logging.DEBUG
                if time.monotonic() - reported >= LOG_PERIOD_S:
                    level, reported = logging.WARNING, time.monotonic()
                name = self.directory.name_of(host)
                logger.log(level, "shutdown of %s tries again, since %s could not host it: %s", me.name, name, exc)
                answer = [None]
            match answer:
                case [kind, bool(any_work), dict(losses)] if kind == ENDED:
                    self.hosted_last = host == me.id
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
        host = self.directory.first_living().id
        for identity in self.directory.suspected():
            if identity.id < host and (silence_s := self.silence_out_of_reach(identity)) is not None:
                what = f"the shutdown of {self.directory.me.name!r}, which {identity.name!r} hosts"
                raise WorkerLost(identity.name, what, silence_s, self.directory.losses().get(identity.name, ""))

    def _late(self, host: int, missing: list[str] | None) -> DeadlineExceeded:
        name = self.directory.name_of(host)
        text = f"shutdown of {self.directory.me.name!r} timed out"
        if missing is None:
            try:
                missing = names_in(self.caller.gather(host, NOT_ARRIVED, (), ANSWER_LIMIT_S))
            except RpcdistError as exc:
                return DeadlineExceeded(f"{text}, and its host {name!r} did not report the missing workers: {exc}")
        return DeadlineExceeded(f"{text}; these workers have not called it: {missing}")

    def send_last_replies(self, together: bool) -> None:
        """Sends pending replies, and answers the workers that wait here for others.

        Args:
            together: whether all other workers also leave now.
        """
        self.gatherings.give_up()
        self.rounds.give_up()
        self.active_calls.wait_gathered(CONNECTION_CLOSE_LIMIT_S)
        # The host of the last round still sends replies, which the end of its sessions would drop, so it leaves last.
        is_last = together and self.hosted_last
        flush = self.connections.flush(CONNECTION_CLOSE_LIMIT_S, wait_for_others=is_last)
        try:
            self.network.run(flush, CONNECTION_CLOSE_LIMIT_S + THREAD_GRACE_S)
        except RpcdistError:
            logger.debug("the last replies were not flushed", exc_info=True)

    def say_goodbye(self) -> None:
        if self.is_static:
            return
        try:
            self.coordinator.leave()
        except RpcdistError as exc:
            logger.debug("the coordinator could not be notified that this worker leaves: %s", exc)


# Users name these functions in allow-lists, and peers call them; no module defines them.
STOP = "rpcdist.rpc._membership.serving:stop"
PING = "rpcdist.rpc._membership.serving:ping"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """Requests to stop; one per agent; any thread may use it.

    A request that comes before `wait` counts: the next `wait` returns at once.
    """

    def __init__(self) -> None:
        # `put` is reentrant, so a signal handler may call it during a `get`.
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._lost: CoordinatorLost | None = None

    def stop(self, why: str) -> None:
        self._requests.put(why)

    def orphaned(self, error: CoordinatorLost | None) -> None:
        """Ends every `wait` with this error, until it is called with None because a coordinator is there again."""
        self._lost = error
        self._requests.put(None)  # wakes `wait`

    def wait(self, timeout_s: float | None) -> str | None:
        """Waits for a request to stop, and returns its reason; None on timeout.

        Raises:
            CoordinatorLost: see `orphaned`.

        On the main thread SIGTERM and SIGINT are such requests while it waits; a second one has its usual effect.
        """
        deadline = Deadline.after(timeout_s)
        with self._signals():
            while True:
                if self._lost is not None:
                    raise self._lost
                try:
                    why = self._requests.get(timeout=min(longest_sleep_s(), deadline.remaining_s()))
                    if why is not None:
                        return why
                except Empty:
                    if deadline.expired():
                        return None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                if handler is not None:  # None: it was not set by Python, and cannot be restored
                    signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            restore()
            self.stop(signal.Signals(number).name)

        try:
            for number in SIGNALS:
                signal.signal(number, on_signal)
            yield
        finally:
            restore()

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        return {STOP: self._on_stop, PING: self._on_ping}

    async def _on_stop(self, name: str) -> None:
        check_speaks_for(name)
        self.stop(f"worker {name!r} asked for it")

    async def _on_ping(self) -> None:
        """The answer shows that this worker lives."""
