"""Barrier and all_gather among workers: calls to the first participant by name, as in torch.

That worker is the host of the gathering. Its handlers are coroutines that wait for the others, so a barrier of any size
blocks no thread. If a participant dies, the gathering fails for all, with its name. The cost of an arrival does not
depend on the number of participants: above `MAX_NAMED`, only the host sends the names, and the others send a digest.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rpcdist.errors import CallRefused, ConfigError, DeadlineExceeded, RpcdistError, WorkerLost, abridged
from rpcdist.ids import Identity
from rpcdist.inspection import GatheringFacts
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import check_speaks_for
from rpcdist.time_limits import ANSWER_LIMIT_S

CONTRIBUTE = "rpcdist.rpc._membership.gatherings:contribute"
MISSING = "rpcdist.rpc._membership.gatherings:missing"
MAX_LAST_CAME = 64  # timed-out rounds that are kept; the workers that timed out ask for the missing at once
MAX_NAMED = 32  # up to this number of participants, each of them sends all names
MAX_NAMELESS = 16  # limit on one worker's rounds for which the host has not sent the names
GATHERING = "a gathering of workers"

Group = Sequence[str] | str
"""The participants: their names in order, or the digest of the names if there are many."""


def names_in(answer: object) -> list[str]:
    """Returns the names in a peer's list, and drops all else: comparing nested lists may never end."""
    return [name for name in answer if isinstance(name, str)] if isinstance(answer, list | tuple) else []


def names_for(names: Sequence[str]) -> Group:
    """The form in which a participant other than the host names a group; `names` are in order."""
    return tuple(names) if len(names) <= MAX_NAMED else hashlib.sha256("\0".join(names).encode()).hexdigest()


@lru_cache(maxsize=16)
def in_order(names: frozenset[str]) -> tuple[list[str], Group]:
    """The participants in order, and in the form for others than the host: most gatherings have the same few groups."""
    chosen = sorted(names)
    return chosen, names_for(chosen)


class _GatherRound:
    """One round at its host. Lives on the user loop.

    Attributes:
        names: the participants; None until the host itself has arrived.
        objects: those of the workers that have arrived and still wait.
        came: the workers that have arrived, including those that have stopped waiting.
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


@dataclass(eq=False, repr=False)
class Gatherings:
    """Both sides of gatherings; one per agent. Workers take part on threads that block; rounds live on the host's loop.

    Rounds have no numbers: a contribution goes to the oldest open round of its names in which its worker does not take
    part. So a worker that timed out may try again, and a replacement, which does not know earlier rounds, fits in.

    Args:
        watch: connects to a worker, and returns an error if it is already lost.
        is_static: whether the members are the same from beginning to end.
    """

    _caller: Caller
    _directory: Directory
    _watch_worker: Callable[[int, str], WorkerLost | None]
    _is_static: bool
    _rounds: dict[Group, list[_GatherRound]] = field(default_factory=dict)
    _last_came: dict[Group, set[str]] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self._me = self._directory.me

    # ------------------------------------------------------------ taking part

    def all_gather(self, obj: Any, names: Iterable[str] | None, timeout_s: float) -> dict[str, Any]:
        """Exchanges one object per worker; blocks.

        Args:
            obj: the object that the others get from this worker.
            names: the participants; None for all workers, or, if workers join and leave, for all present ones. Every
                participant, including this worker, must pass the same set, and call in the same order.
            timeout_s: limit in seconds; infinity waits as long as the missing workers live.

        Returns:
            The objects by worker name.

        Raises:
            RuntimeError: the time limit expired; the text names the missing workers.
            WorkerLost: a participant died.
        """
        chosen, result = self._gather(obj, names, timeout_s, True)
        return {name: result[name] for name in chosen}

    def barrier(self, names: Iterable[str] | None, timeout_s: float) -> None:
        self._gather(None, names, timeout_s, False)

    def _gather(
        self, obj: Any, names: Iterable[str] | None, timeout_s: float, wants_objects: bool
    ) -> tuple[list[str], Any]:
        me = self._me.name
        if names is None:
            if not self._is_static:
                self._directory.refresh()
            names = [info.name for info in self._directory.infos(present=not self._is_static)]
        everybody = frozenset(names)
        chosen, short = in_order(everybody)
        if me not in everybody:
            raise ConfigError(f"worker {me!r} is not among the names of this gathering, {chosen}; add it to them")
        host = self._directory.resolve(chosen[0])
        limit = 0 if timeout_s == float("inf") else timeout_s
        group = chosen if me == chosen[0] else short
        try:
            return chosen, self._caller.gather(host, CONTRIBUTE, (group, me, obj, wants_objects), limit)
        except DeadlineExceeded as exc:
            raise self._late(exc, chosen, timeout_s) from exc

    def _late(self, exc: DeadlineExceeded, names: list[str], timeout_s: float) -> DeadlineExceeded:
        who = self._who_is_missing(names)
        if names[0] != self._me.name:
            return DeadlineExceeded(f"{exc}. {who}")
        return DeadlineExceeded(f"{names[0]} timed out in _all_gather after {timeout_s:.2f} seconds. {who}")

    def _who_is_missing(self, names: list[str]) -> str:
        host = names[0]
        try:
            missing = names_in(self._caller.gather(self._directory.resolve(host), MISSING, (names,), ANSWER_LIMIT_S))
        except RpcdistError as exc:
            return f"Worker {host!r}, which hosts the gathering, did not report the missing workers: {exc}"
        return f"These workers did not arrive at {host!r} in time: {missing}"

    # ------------------------------------------------------------ the host

    def facts(self) -> list[GatheringFacts]:
        open_rounds = [round_ for rounds in list(self._rounds.values()) for round_ in list(rounds)]
        return [
            GatheringFacts("barrier", tuple(sorted(round_.came)), tuple(round_.missing())) for round_ in open_rounds
        ]

    def give_up(self) -> None:
        """Fails the open rounds, since this worker leaves; any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        for round_ in [round_ for rounds in self._rounds.values() for round_ in rounds]:
            left = f"worker {self._me.name!r}, which hosts this gathering, is shutting down"
            round_.fail(RpcdistError(f"{left}; these workers had not arrived: {round_.missing()}"))

    def on_lost(self, identity: Identity, exc: WorkerLost) -> None:
        """Fails the rounds that wait for a worker that was declared dead. On the I/O loop."""
        if self._loop is not None:
            lost = WorkerLost(exc.worker, GATHERING, exc.last_seen_s, exc.reason)
            self._loop.call_soon_threadsafe(self._fail_rounds, identity.name, lost)

    def _fail_rounds(self, name: str, exc: WorkerLost) -> None:
        for rounds in self._rounds.values():
            for round_ in rounds:
                if round_.names is not None and name in round_.names and name not in round_.objects:
                    round_.fail(exc)

    async def contribute(self, group: Group, name: str, obj: Any) -> dict[str, Any]:
        """Adds the object of one worker, and returns all objects when all have arrived.

        Cancellation (at the worker's deadline, or if the worker is gone) removes the object again.
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
        """Limits the rounds that one worker may open with a digest, which it may have invented."""
        rounds = [round_ for rounds in self._rounds.values() for round_ in rounds]
        if sum(round_.names is None and name in round_.objects for round_ in rounds) >= MAX_NAMELESS:
            raise CallRefused(
                f"worker {name!r} waits in {MAX_NAMELESS} gatherings that the first worker by name has not joined; "
                "that worker must call the same barriers and gatherings"
            )

    def _withdraw(self, round_: _GatherRound, name: str) -> None:
        round_.objects.pop(name, None)
        self._last_came[round_.key] = round_.came  # the worker that timed out asks for it next
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
            lost = self._watch_worker(self._directory.resolve(name), GATHERING)
            if lost is not None:
                round_.fail(lost)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The workers that have not joined the open round of these names, or the last round that timed out."""
        key = names_for(sorted(names))
        rounds = self._rounds.get(key)
        came = rounds[0].came if rounds else self._last_came.get(key)
        return [] if came is None else sorted(set(names) - came)

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        return {CONTRIBUTE: self._on_contribute, MISSING: self._on_missing}

    async def _on_contribute(self, group: Group, name: str, obj: Any, wants_objects: bool) -> dict[str, Any] | None:
        check_speaks_for(name)
        if not isinstance(group, str):
            group = sorted(set(names_in(group)))
            if name not in group:
                raise CallRefused(
                    f"worker {name!r} cannot contribute to a gathering of {abridged(group)}: it is not one of them"
                )
            await self._directory.look_up(group)  # some may just have joined
        objects = await self.contribute(group, name, obj)
        return objects if wants_objects else None

    async def _on_missing(self, names: list[str]) -> list[str]:
        return self.missing(names_in(names))
