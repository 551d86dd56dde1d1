"""The leading side of barriers and gatherings: rounds that are open until everybody has come.

The handlers are coroutines that wait for the others, so a barrier of any size holds no thread. A participant that dies
ends the gathering for everybody, with its name. What an arrival costs does not depend on the number of participants: of
more than `MAX_NAMED` the leader alone says the names, and the others send a digest of them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rpcdist.errors import CallRefused, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._peers.calling_worker import check_speaks_for
from rpcdist.rpc._peers.directory import Directory

CONTRIBUTE = "rpcdist.rpc._membership.leader:contribute"
MISSING = "rpcdist.rpc._membership.leader:missing"
MAX_LAST_CAME = 64  # rounds that were given up; those who gave up ask at once
MAX_NAMED = 32  # participants of a gathering to which each of them names all
MAX_NAMELESS = 16  # rounds of one worker that wait for the leader to say their names

Group = Sequence[str] | str
"""Who takes part: the names in order, or where these are many, their digest."""


def names_for(names: Sequence[str]) -> Group:
    """What a participant other than the leader says of a group, whose names are in order."""
    return names if len(names) <= MAX_NAMED else hashlib.sha256("\0".join(names).encode()).hexdigest()


class _GatherRound:
    """One round at the leader. Lives on the user loop.

    Attributes:
        names: who takes part; None until the leader has come to say it.
        objects: of those who are there.
        came: also those who have given up.
    """

    def __init__(self, key: Group) -> None:
        self.key = key
        self.names: frozenset[str] | None = None
        self.objects: dict[str, Any] = {}
        self.came: set[str] = set()
        self.ended = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        return self.names is not None and self.objects.keys() == self.names

    def missing(self) -> list[str]:
        return sorted((self.names or frozenset()) - self.came)

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
        self._rounds: dict[Group, list[_GatherRound]] = {}
        self._last_came: dict[Group, set[str]] = {}
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
                if round_.names is not None and name in round_.names and name not in round_.objects:
                    round_.fail(exc)

    async def contribute(self, group: Group, name: str, obj: Any) -> dict[str, Any]:
        """Adds the object of one worker, and returns all when all are there.

        Cancellation (the worker's deadline is over, or it is gone) takes the object out again.
        """
        self._loop = asyncio.get_running_loop()
        round_ = self._join(group, name, obj)
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

    def _join(self, group: Group, name: str, obj: Any) -> _GatherRound:
        key = group if isinstance(group, str) else names_for(group)
        key = key if isinstance(key, str) else tuple(key)
        rounds = self._rounds.get(key, ())
        round_ = next((open_ for open_ in rounds if name not in open_.objects and not open_.ended.is_set()), None)
        is_new = round_ is None
        if round_ is None:
            round_ = _GatherRound(key)
            if isinstance(group, str):
                self._check_nameless(name)
        if round_.names is None and not isinstance(group, str):
            round_.names = frozenset(group)
            try:
                self._watch(round_)  # it is kept only if all of the names are known
            except RpcdistError as exc:
                round_.fail(exc)
                raise
        if is_new:
            self._rounds.setdefault(key, []).append(round_)
        round_.objects[name] = obj
        round_.came.add(name)
        return round_

    def _check_nameless(self, name: str) -> None:
        """Each of them is made of a digest, which a worker may invent."""
        rounds = [round_ for rounds in self._rounds.values() for round_ in rounds]
        if sum(round_.names is None and name in round_.objects for round_ in rounds) >= MAX_NAMELESS:
            raise CallRefused(
                f"worker {name!r} takes part in {MAX_NAMELESS} gatherings that their leader has not begun"
            )

    def _withdraw(self, round_: _GatherRound, name: str) -> None:
        round_.objects.pop(name, None)
        self._last_came[round_.key] = round_.came  # the worker that gave up asks for it next
        if len(self._last_came) > MAX_LAST_CAME:
            del self._last_came[next(iter(self._last_came))]
        if not round_.objects:
            self._end(round_)

    def _end(self, round_: _GatherRound) -> None:
        round_.ended.set()
        rounds = self._rounds.get(round_.key, [])
        if round_ in rounds:
            rounds.remove(round_)
        if not rounds:
            self._rounds.pop(round_.key, None)

    def _watch(self, round_: _GatherRound) -> None:
        """Connects to the participants, so that the death of one that never calls is noticed."""
        for name in (round_.names or frozenset()) - {self._me.name}:
            lost = self._watch_worker(self._directory.resolve(name), "a gathering of workers")
            if lost is not None:
                round_.fail(lost)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Who has not come to the round of these workers that is open, or was given up last."""
        key = names_for(sorted(names))
        key = key if isinstance(key, str) else tuple(key)
        rounds = self._rounds.get(key)
        came = rounds[0].came if rounds else self._last_came.get(key)
        return [] if came is None else sorted(set(names) - came)

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """What every peer may call, by the name on the wire."""
        return {CONTRIBUTE: self._on_contribute, MISSING: self._on_missing}

    async def _on_contribute(self, group: Group, name: str, obj: Any, wants_objects: bool) -> dict[str, Any] | None:
        check_speaks_for(name)
        if not isinstance(group, str):
            group = sorted(set(group))
            if name not in group:
                raise CallRefused(f"worker {name!r} contributes to a gathering of {group[:16]}, which it is not one of")
        objects = await self.contribute(group, name, obj)
        return objects if wants_objects else None

    async def _on_missing(self, names: list[str]) -> list[str]:
        return self.missing(names)
