"""Barrier and all_gather among workers, by calls to one of them (the first by name, as in torch).

The leader's handlers are coroutines that wait for the others, so a barrier of any size holds no thread. A participant
that dies ends the gathering for everybody, with its name.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._peers.peer import PeerState
from rpcdist.time_limits import MISSING_NAMES_LIMIT_S

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["CONTRIBUTE", "INTERNAL", "Gatherings", "Leader", "all_gather"]

CONTRIBUTE = "rpcdist.rpc._membership.gatherings:_contribute"
"""On the wire; calls of it wait for other workers, so a worker is idle in spite of them."""
INTERNAL = frozenset({CONTRIBUTE, "rpcdist.rpc._membership.gatherings:_missing"})
"""What every peer may call, whatever `allow_functions` says: without these no job can shut down."""


class _Round:
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
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rounds: dict[frozenset[str], list[_Round]] = {}
        self._last_missing: dict[frozenset[str], list[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        agent.connections.loss_listeners.append(self._on_lost)

    def __repr__(self) -> str:
        return f"<Leader {self._agent.worker_name} [{sum(map(len, self._rounds.values()))} rounds]>"

    def give_up(self) -> None:
        """Ends the rounds that still wait, since this worker leaves; any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        for round_ in [round_ for rounds in self._rounds.values() for round_ in rounds]:
            left = f"worker {self._agent.worker_name!r}, which led this gathering, gave it up and leaves"
            round_.fail(RpcdistError(f"{left}; these workers had not arrived: {round_.missing()}"))

    def _on_lost(self, identity: Identity, exc: WorkerLost) -> None:  # on the I/O loop
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

    def _join(self, names: frozenset[str], name: str, obj: Any) -> _Round:
        rounds = self._rounds.setdefault(names, [])
        round_ = next((open_ for open_ in rounds if name not in open_.objects and not open_.ended.is_set()), None)
        if round_ is None:
            round_ = _Round(names)
            rounds.append(round_)
            self._watch(round_)
        round_.objects[name] = obj
        round_.came.add(name)
        return round_

    def _withdraw(self, round_: _Round, name: str) -> None:
        round_.objects.pop(name, None)
        self._last_missing[round_.names] = round_.missing()  # whoever gave up asks for it next
        if not round_.objects:
            self._end(round_)

    def _end(self, round_: _Round) -> None:
        round_.ended.set()
        rounds = self._rounds.get(round_.names, [])
        if round_ in rounds:
            rounds.remove(round_)
        if not rounds:
            self._rounds.pop(round_.names, None)

    def _watch(self, round_: _Round) -> None:
        """Connects to the participants, so that the death of one that never calls is noticed."""
        agent = self._agent
        for name in round_.names - {agent.worker_name}:
            peer = agent.connections.peer(agent.directory.resolve(name))
            if peer.state is PeerState.LOST:
                silence_s = time.monotonic() - peer.last_up
                round_.fail(WorkerLost(name, "a gathering of workers", silence_s, peer.lost_reason or "unknown"))
            else:
                peer.connect()

    def missing(self, names: frozenset[str]) -> list[str]:
        """Who has not come to the round of these workers that is open, or was given up last."""
        rounds = self._rounds.get(names)
        return rounds[0].missing() if rounds else self._last_missing.get(names, [])


async def _contribute(names: list[str], name: str, obj: Any) -> dict[str, Any]:
    """Runs at the leader."""
    return await current_agent().leader.contribute(frozenset(names), name, obj)


async def _missing(names: list[str]) -> list[str]:
    """Runs at the leader."""
    return current_agent().leader.missing(frozenset(names))


class Gatherings:
    """How many of this worker's calls were made for gatherings: they are no work that others wait for."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"<Gatherings [{self.num_calls} calls]>"

    def count(self) -> None:
        """Any thread."""
        self.num_calls = next(self._counter)


def all_gather(agent: Agent, obj: Any, names: Iterable[str] | None, timeout_s: float) -> dict[str, Any]:
    """Exchanges one object per worker; blocks.

    Args:
        agent: this worker's.
        obj: what the others get from here.
        names: who takes part; None for everybody, where workers come and go: for those who are there now. Every
            participant must pass the same set, this worker included, and call in the same order.
        timeout_s: limit in seconds; infinity waits as long as the missing workers live.

    Returns:
        The objects by worker name.

    Raises:
        RuntimeError: the time is over; the text names who is missing.
        WorkerLost: a participant died.
    """
    chosen = sorted({info.name for info in agent.get_worker_infos()} if names is None else set(names))
    if agent.worker_name not in chosen:
        raise ConfigError(
            f"worker {agent.worker_name!r} is not expected in a gathering of {chosen}; add it to the names"
        )
    leader = chosen[0]
    limit = 0 if timeout_s == float("inf") else timeout_s
    agent.gatherings.count()
    try:
        result = agent.caller.sync(leader, _contribute, (chosen, agent.worker_name, obj), None, limit)
    except DeadlineExceeded as exc:
        who = _who_is_missing(agent, leader, chosen)
        if leader != agent.worker_name:
            raise DeadlineExceeded(f"{exc}. {who}") from exc
        raise DeadlineExceeded(f"{leader} timed out in _all_gather after {timeout_s:.2f} seconds. {who}") from exc
    return {name: result[name] for name in chosen}


def _who_is_missing(agent: Agent, leader: str, names: list[str]) -> str:
    agent.gatherings.count()
    try:
        missing = agent.caller.sync(leader, _missing, (names,), None, MISSING_NAMES_LIMIT_S)
    except RpcdistError as exc:
        return f"The leader {leader!r} did not say who is missing: {exc}"
    return f"These workers did not arrive at {leader!r} in time: {missing}"
