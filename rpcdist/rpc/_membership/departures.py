"""How the workers of a static world agree that everybody may go: rounds, led by the living worker of the lowest rank.

In a round every living worker says once whether it had work since it last spoke; the round ends when all have. A worker
that is lost is not waited for, and its replacement is waited for again from the moment it joins. A leader that is lost
is succeeded by the next one: whoever is asked and knows of a living worker of lower rank points to it, so that all come
to agree as soon as their detectors do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from rpcdist.errors import WorkerLost
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._peers.calling_worker import check_speaks_for
from rpcdist.rpc._peers.directory import Directory, MemberEvent
from rpcdist.time_limits import DEPARTURE_REVIEW_S

DEPART = "rpcdist.rpc._membership.departures:depart"
NOT_ARRIVED = "rpcdist.rpc._membership.departures:not_arrived"

ENDED = "ended"
"""First part of an answer: the round has ended. Then come whether anybody had work, and who is lost (name: reason)."""
POINTS = "points"
"""The same: another worker leads. Then comes its rank."""
LEAVES = "leaves"
"""The same: this worker led, but leaves before the others. Then come the names of those who had not arrived."""

Answer = list[Any]


class _DepartureRound:
    """One round at the leader. Lives on the user loop."""

    def __init__(self) -> None:
        self.had_work: dict[str, bool] = {}
        self.came: set[str] = set()  # also those who have given up
        self.ended = asyncio.Event()
        self.answer: Answer = []

    def end(self, *answer: Any) -> None:
        self.answer = list(answer)
        self.ended.set()


class Departures:
    """The leading side; one per agent. Lives on the user loop, but for what is said to run elsewhere.

    Args:
        directory: who is in the job, and who lives.
        watch: connects to a worker, so that its death is noticed.
    """

    def __init__(self, directory: Directory, watch: Callable[[int, str], WorkerLost | None]) -> None:
        self._directory = directory
        self._watch = watch
        self._rounds: list[_DepartureRound] = []
        self._last_missing: list[str] = []
        self._watched_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<Departures at {self._directory.me.name} [{len(self._rounds)} rounds]>"

    def on_member(self, event: MemberEvent) -> None:
        """A worker came or went; on the I/O loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._review, True)

    def facts(self) -> list[GatheringFacts]:
        """The rounds that are open; any thread."""
        return [
            GatheringFacts("shutdown", tuple(sorted(round_.came)), tuple(self._absent(round_)))
            for round_ in list(self._rounds)
        ]

    def give_up(self) -> None:
        """Ends the rounds that still wait, since this worker leaves; any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        for round_ in self._rounds:
            round_.end(LEAVES, self._absent(round_))
        self._rounds.clear()

    async def depart(self, name: str, had_work: bool) -> Answer:
        """Adds what one worker says to the oldest round in which it has not spoken, and waits for the round's end.

        Cancellation (the worker's deadline is over, or it is gone) takes that out again.
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
            while not round_.ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(DEPARTURE_REVIEW_S):
                        await round_.ended.wait()
                        return round_.answer
                self._review(time.monotonic() - self._watched_at >= DEPARTURE_REVIEW_S)
        except asyncio.CancelledError:
            if not round_.ended.is_set():
                round_.had_work.pop(name, None)
                self._last_missing = self._absent(round_)  # whoever gave up asks for it next
                self._review()
            raise
        return round_.answer

    def _superior(self) -> int | None:
        """The rank of a living worker that leads before this one."""
        leader = self._directory.leader()
        return leader.id if leader.id < self._directory.me.id else None

    def _review(self, watches: bool = False) -> None:
        """Ends the rounds that wait for nobody any more; `watches` those that are waited for, which are many."""
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
            # Also those that this worker has given up: if one lives after all, two would lead, and wait for each other.
            living = [member.identity for member in self._directory.living()]
            for identity in [*living, *self._directory.suspected()]:
                if identity != self._directory.me:
                    self._watch(identity.id, "the shutdown of the job")

    def _is_complete(self, round_: _DepartureRound) -> bool:
        if len(round_.had_work) < self._directory.num_living:  # there is no need to look who is missing
            return False
        return all(member.identity.name in round_.had_work for member in self._directory.living())

    def _absent(self, round_: _DepartureRound) -> list[str]:
        return sorted({member.identity.name for member in self._directory.living()} - round_.came)

    def _losses(self, there: Mapping[str, bool]) -> dict[str, str]:
        return {name: why for name, why in self._directory.losses().items() if name not in there}

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """What every peer may call, by the name on the wire."""
        return {DEPART: self._on_depart, NOT_ARRIVED: self._not_arrived}

    async def _on_depart(self, name: str, had_work: bool) -> Answer:
        check_speaks_for(name)
        return await self.depart(name, had_work)

    async def _not_arrived(self) -> list[str]:
        """The living workers that have not come to the round that is open, or was given up last."""
        return self._absent(self._rounds[0]) if self._rounds else self._last_missing
