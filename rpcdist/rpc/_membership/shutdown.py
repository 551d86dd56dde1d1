"""How the workers of a static world agree that all may leave, and requests to stop serving.

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
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import CoordinatorLost
from rpcdist.giving_up import check_not_given_up, wake_if_given_up
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._peers.directory import Directory, MemberEvent
from rpcdist.rpc._peers.network import check_speaks_for
from rpcdist.time_limits import DEPARTURE_REVIEW_S
from rpcdist.waiters import ends_within

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

    def __init__(self, directory: Directory, watch: Callable[[int], object]) -> None:
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
                if time.monotonic() - self._watched_at >= DEPARTURE_REVIEW_S:  # one review for all that wait
                    self._review(True)
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
                    self._watch(identity.id)

    def _is_complete(self, round_: _DepartureRound) -> bool:
        # The names are compared only if their number suffices.
        if len(round_.had_work) < self._directory.num_living:
            return False
        return all(one.identity.name in round_.had_work for one in self._directory.living())

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


# Users name these functions in allow-lists, and peers call them; no module defines them.
STOP = "rpcdist.rpc._membership.serving:stop"
PING = "rpcdist.rpc._membership.serving:ping"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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

        On the main thread SIGTERM, SIGINT and SIGHUP are such requests while it waits; a second one has its usual
        effect.
        """
        deadline = Deadline.after(timeout_s)
        wake_if_given_up(partial(self._requests.put, None))
        with self._signals():
            while True:
                check_not_given_up()
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
        found = {number: signal.getsignal(number) for number in SIGNALS}
        # Ignored under `nohup`, or in the background of a shell script.
        before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}

        def restore() -> None:
            for number, handler in before.items():
                if handler is not None:  # None: it was not set by Python, and cannot be restored
                    signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            restore()
            self.stop(signal.Signals(number).name)

        try:
            for number in before:
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
