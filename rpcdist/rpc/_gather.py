"""Barrier and all_gather among workers, by calls to one of them (the first by name, as in torch).

The leader's handlers are coroutines that wait for the others, so a barrier of any size holds no thread. A participant
that dies ends the gathering for everybody, with its name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._current import current_agent

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["Gatherings", "Leader", "all_gather"]

CONTRIBUTE = "rpcdist.rpc._gather:_contribute"
"""On the wire; calls of it wait for other workers, so a worker is idle in spite of them."""


class _Round:
    """One round at the leader. Lives on the user loop."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.objects: dict[str, Any] = {}
        self.complete = asyncio.Event()
        self.error: BaseException | None = None
        self.waiters = 0

    def missing(self) -> list[str]:
        return sorted(self.names - set(self.objects))


class Leader:
    """The rounds that one worker leads. One per agent; lives on the user loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._rounds: dict[str, _Round] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        agent.connections.loss_listeners.append(self._on_lost)

    def _on_lost(self, identity: Identity, exc: WorkerLost) -> None:  # on the I/O loop
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail_rounds, identity.name, exc)

    def _fail_rounds(self, name: str, exc: WorkerLost) -> None:
        for round_ in self._rounds.values():
            if name in round_.names and name not in round_.objects:
                round_.error = exc
                round_.complete.set()

    async def contribute(self, key: str, names: frozenset[str], name: str, obj: Any) -> dict[str, Any]:
        self._loop = asyncio.get_running_loop()
        round_ = self._rounds.get(key)
        if round_ is None:
            round_ = self._rounds[key] = _Round(names)
            self._watch(round_)
        round_.objects[name] = obj
        round_.waiters += 1
        try:
            if not round_.missing():
                round_.complete.set()
            await round_.complete.wait()  # ends with the deadline of this call, too: that cancels the coroutine
        finally:
            round_.waiters -= 1
            if not round_.waiters:
                self._rounds.pop(key, None)
        if round_.error is not None:
            raise round_.error
        return round_.objects

    def _watch(self, round_: _Round) -> None:
        """Connects to the participants, so that the death of one that never calls is noticed."""
        agent = self._agent
        for name in round_.names - {agent.worker_name}:
            peer = agent.connections.peer(agent.directory.resolve(name))
            if peer.lost_reason is not None:
                silence_s = time.monotonic() - peer.last_up
                round_.error = WorkerLost(name, "a gathering of workers", silence_s, peer.lost_reason)
                round_.complete.set()
            else:
                peer.connect()

    def missing(self, key: str) -> list[str]:
        round_ = self._rounds.get(key)
        return round_.missing() if round_ is not None else []


async def _contribute(key: str, names: list[str], name: str, obj: Any) -> dict[str, Any]:
    """Runs at the leader."""
    return await current_agent().leader.contribute(key, frozenset(names), name, obj)


async def _missing(key: str) -> list[str]:
    """Runs at the leader."""
    return current_agent().leader.missing(key)


class Gatherings:
    """The rounds in which one worker takes part: their numbers, by the set of participants."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"<Gatherings {self._numbers}>"

    def next_key(self, names: list[str]) -> str:
        """A name for the next round of these workers; the same on all of them, since they call in the same order."""
        base = ",".join(names)
        with self._lock:
            self.num_calls += 1
            number = self._numbers[base] = self._numbers.get(base, -1) + 1
        return f"{number}/{base}"


def all_gather(agent: Agent, obj: Any, names: Iterable[str] | None, timeout_s: float) -> dict[str, Any]:
    """Exchanges one object per worker; blocks.

    Args:
        agent: this worker's.
        obj: what the others get from here.
        names: who takes part; None for everybody. Every participant must pass the same set, this worker included, and
            call in the same order.
        timeout_s: limit in seconds; infinity waits as long as the missing workers live.

    Returns:
        The objects by worker name.

    Raises:
        RuntimeError: the time is over; the text names who is missing.
        WorkerLost: a participant died.
    """
    chosen = sorted(agent.directory.names() if names is None else set(names))
    if agent.worker_name not in chosen:
        raise ConfigError(
            f"worker {agent.worker_name!r} is not expected in a gathering of {chosen}; add it to the names"
        )
    key = agent.gatherings.next_key(chosen)
    leader = chosen[0]
    limit = 0 if timeout_s == float("inf") else timeout_s
    try:
        result = agent.caller.sync(leader, _contribute, (key, chosen, agent.worker_name, obj), None, limit)
    except DeadlineExceeded as exc:
        who = _who_is_missing(agent, leader, key)
        if leader != agent.worker_name:
            raise DeadlineExceeded(f"{exc}. {who}") from exc
        raise DeadlineExceeded(f"{leader} timed out in _all_gather after {timeout_s:.2f} seconds. {who}") from exc
    return {name: result[name] for name in chosen}


def _who_is_missing(agent: Agent, leader: str, key: str) -> str:
    agent.gatherings.num_calls += 1
    try:
        missing = agent.caller.sync(leader, _missing, (key,), None, 2.0)
    except RpcdistError as exc:
        return f"The leader {leader!r} did not say who is missing: {exc}"
    return f"These workers did not arrive at {leader!r} in time: {missing}"
