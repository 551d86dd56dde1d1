"""The leading side of barriers and gatherings: rounds that are open until everybody has come.

The handlers are coroutines that wait for the others, so a barrier of any size holds no thread. A participant that dies
ends the gathering for everybody, with its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rpcdist.errors import CallRefused, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._peers.calling_worker import check_speaks_for
from rpcdist.rpc._peers.directory import Directory

__all__ = ["CONTRIBUTE", "MISSING", "Leader"]

CONTRIBUTE = "rpcdist.rpc._membership.leader:contribute"
MISSING = "rpcdist.rpc._membership.leader:missing"
MAX_LAST_MISSING = 64  # rounds that were given up; those who gave up ask at once


class _GatherRound:
    """One round at the leader. Lives on the user loop."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.objects: dict[str, Any] = {}
        self.came: set[str] = set()  # also those who have given up
        self.ended = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        return self.objects.keys() == self.names

    def missing(self) -> list[str]:
        return sorted(self.names - self.came)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


class Leader:
    """The rounds that one worker leads. One per agent; lives on the user loop.

    Rounds have no numbers: a contribution goes to the oldest open round of its names in which its worker does not take
    part. So a worker that gave up may try again, and a replacement, which knows nothing of earlier rounds, fits in.

    Args:
        me: this worker.
        directory: who is in the job.
        watch: connects to a worker, and returns an error if it is lost already.
    """

    def __init__(self, me: Identity, directory: Directory, watch: Callable[[int, str], WorkerLost | None]) -> None:
        self._me = me
        self._directory = directory
        self._watch_worker = watch
        self._rounds: dict[frozenset[str], list[_GatherRound]] = {}
        self._last_missing: dict[frozenset[str], list[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<Leader {self._me.name} [{sum(map(len, self._rounds.values()))} rounds]>"

    def facts(self) -> list[GatheringFacts]:
        """The rounds that are open; any thread."""
        open_rounds = [round_ for rounds in list(self._rounds.values()) for round_ in list(rounds)]
        return [
            GatheringFacts("barrier", tuple(sorted(round_.came)), tuple(round_.missing())) for round_ in open_rounds
        ]

    def give_up(self) -> None:
        """Ends the rounds that still wait, since this worker leaves; any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        for round_ in [round_ for rounds in self._rounds.values() for round_ in rounds]:
            left = f"worker {self._me.name!r}, which led this gathering, gave it up and leaves"
            round_.fail(RpcdistError(f"{left}; these workers had not arrived: {round_.missing()}"))

    def on_lost(self, identity: Identity, exc: WorkerLost) -> None:
        """A worker is declared dead: nobody waits for it any more. On the I/O loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail_rounds, identity.name, exc)

    def _fail_rounds(self, name: str, exc: WorkerLost) -> None:
        for rounds in self._rounds.values():
            for round_ in rounds:
                if name in round_.names and name not in round_.objects:
                    round_.fail(exc)

    async def contribute(self, names: frozenset[str], name: str, obj: Any) -> dict[str, Any]:
        """Adds the object of one worker, and returns all when all are there.

        Cancellation (the worker's deadline is over, or it is gone) takes the object out again.
        """
        self._loop = asyncio.get_running_loop()
        round_ = self._join(names, name, obj)
        try:
            if round_.is_complete:
                self._end(round_)
            await round_.ended.wait()
        except asyncio.CancelledError:
            if not round_.ended.is_set():
                self._withdraw(round_, name)
            raise
        if round_.error is not None:
            self._end(round_)
            raise round_.error
        return round_.objects

    def _join(self, names: frozenset[str], name: str, obj: Any) -> _GatherRound:
        rounds = self._rounds.get(names, ())
        round_ = next((open_ for open_ in rounds if name not in open_.objects and not open_.ended.is_set()), None)
        if round_ is None:
            round_ = _GatherRound(names)
            self._watch(round_)  # it is kept only if all of the names are known
            self._rounds.setdefault(names, []).append(round_)
        round_.objects[name] = obj
        round_.came.add(name)
        return round_

    def _withdraw(self, round_: _GatherRound, name: str) -> None:
        round_.objects.pop(name, None)
        self._last_missing[round_.names] = round_.missing()  # the worker that gave up asks for it next
        if len(self._last_missing) > MAX_LAST_MISSING:
            del self._last_missing[next(iter(self._last_missing))]
        if not round_.objects:
            self._end(round_)

    def _end(self, round_: _GatherRound) -> None:
        round_.ended.set()
        rounds = self._rounds.get(round_.names, [])
        if round_ in rounds:
            rounds.remove(round_)
        if not rounds:
            self._rounds.pop(round_.names, None)

    def _watch(self, round_: _GatherRound) -> None:
        """Connects to the participants, so that the death of one that never calls is noticed."""
        for name in round_.names - {self._me.name}:
            lost = self._watch_worker(self._directory.resolve(name), "a gathering of workers")
            if lost is not None:
                round_.fail(lost)

    def missing(self, names: frozenset[str]) -> list[str]:
        """Who has not come to the round of these workers that is open, or was given up last."""
        rounds = self._rounds.get(names)
        return rounds[0].missing() if rounds else self._last_missing.get(names, [])

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """What every peer may call, by the name on the wire."""
        return {CONTRIBUTE: self._on_contribute, MISSING: self._on_missing}

    async def _on_contribute(self, names: list[str], name: str, obj: Any) -> dict[str, Any]:
        check_speaks_for(name)
        if name not in names:
            raise CallRefused(f"worker {name!r} contributes to a gathering of {names[:16]}, which it is not one of")
        return await self.contribute(frozenset(names), name, obj)

    async def _on_missing(self, names: list[str]) -> list[str]:
        return self.missing(frozenset(names))
