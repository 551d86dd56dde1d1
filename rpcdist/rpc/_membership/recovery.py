"""A coordinator that replaced another one takes back the workers of that one's list.

The rules of the list itself are in `roster.py`.

 1. The expected workers are those that the returned workers name. Each names the list that it knew, which may be wrong.
 2. After a while the coordinator probes each missing worker, at every address that was named. The worker may not have
    noticed the loss of the previous coordinator yet; the probe shows it.
 3. The recovery ends when all have returned; or when the time limit has expired and each missing worker has answered
    the probe, or failed to; at the latest after twice the time limit.
 4. A worker that has answered stays in the job, even before it announces itself. Only a worker that has neither
    returned nor answered is lost.
 5. In a static world, the recovery lasts until new processes have had time to join: if the whole job was restarted,
    they take precedence over returned workers of the same name or rank.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final

from rpcdist.ids import Identity
from rpcdist.rpc._membership.roster import MembershipTable
from rpcdist.rpc._peers.directory import Member
from rpcdist.time_limits import HEARTBEATS_PER_PEER_TIMEOUT

MAX_NAMED = 1000
"""Limit on the members that one worker may name: this process connects to each. Others return on their own."""

Probe = Callable[[Member], Awaitable[bool]]
"""Asks a worker whether it is alive, in the known incarnation."""


@dataclass(eq=False, repr=False)
class Recovery:
    """One recovery, from the first returned worker until it ends or `close` is called; on the I/O loop.

    Args:
        table: has the workers that have returned or joined.
        limit_s: how long the missing workers have to return, and then those that were asked to answer.
        newcomers_until: the end of the time in which new processes take precedence, in monotonic seconds.
        on_end: called once, unless `close` was called before.
        coordinator: the rank of this coordinator, and of the previous one.

    Attributes:
        returned: the workers that have announced themselves.
    """

    _table: MembershipTable
    _probe: Probe
    _limit_s: float
    _newcomers_until: float
    _on_end: Callable[[], object]
    _coordinator: int
    returned: set[Identity] = field(default_factory=set)
    _is_time_over: bool = False
    _num_asked: dict[Identity, int] = field(default_factory=dict)  # by returned worker: how many of its members
    # The expected workers, at each address, and the workers that named them.
    _named: dict[Identity, dict[Member, list[Identity]]] = field(default_factory=dict)
    _asked: set[Member] = field(default_factory=set)
    _silent: set[Member] = field(default_factory=set)
    _living: dict[Identity, Member] = field(default_factory=dict)  # workers that have answered, with their addresses
    _probes: set[asyncio.Task[None]] = field(default_factory=set)
    _most_probes: int = 0  # at a time; none at first, since most workers return on their own

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Each step starts the timer of the next one. Otherwise all would be due at once after this process stood still,
        # and workers that nobody had asked would count as lost.
        self._timers: list[asyncio.TimerHandle] = []
        self._after(self._limit_s / HEARTBEATS_PER_PEER_TIMEOUT, self._ask_the_missing)

    def take_back(self, identity: Identity, known: Iterable[Member]) -> None:
        """Adds a returned worker, and the members that it knew, only once for each worker."""
        self.returned.add(identity)
        if identity in self._num_asked:
            return
        self._num_asked[identity] = 0
        for member in set(islice(known, MAX_NAMED)):
            if member.identity.id != self._coordinator:
                self._named.setdefault(member.identity, {}).setdefault(member, []).append(identity)
        self._ask_more()

    def forget(self, identity: Identity) -> bool:
        """Forgets a returned worker that belongs to another job. Returns whether no other worker is expected."""
        self.returned.discard(identity)
        self._named.pop(identity, None)
        return not self._named

    def review(self) -> None:
        """Ends the recovery if it may end; to be called when a worker has joined or returned."""
        missing = self._missing()
        if self._is_time_over and all(
            identity in self._living or self._named[identity].keys() <= self._silent for identity in missing
        ):
            self._end()
        elif not missing and self._table.has_rank(self._coordinator):
            wait_s = self._newcomers_until - time.monotonic() if self._table.world_size else 0.0
            if wait_s > 0:
                self._after(wait_s, self.review)
            else:
                self._end()

    def survivors(self) -> Sequence[Member]:
        """The workers that have answered and not returned, by rank."""
        return [self._living[identity] for identity in self._missing() if identity in self._living]

    def departures(self) -> Mapping[Identity, str]:
        """The lost workers, with reasons, for the workers that have returned."""
        reason = "the coordinator was lost, and this worker neither joined the next one nor answered it"
        return {identity: reason for identity in self._named if identity not in self._table}

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for probe in self._probes:
            probe.cancel()

    def _missing(self) -> list[Identity]:
        """The expected workers that are not there, and whose place is free, by rank."""
        missing = [identity for identity in self._named if not self._table.has_rank(identity.id)]
        return sorted(missing, key=lambda one: one.id)

    def _after(self, delay_s: float, step: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, step))

    def _end_of_time(self) -> None:
        self._is_time_over = True
        self._after(self._limit_s, self._end)  # without the answers that are missing
        self.review()

    def _end(self) -> None:
        self.close()
        self._on_end()

    # ------------------------------------------------------------ probes

    def _ask_the_missing(self) -> None:
        self._most_probes = max_at_once()
        self._after(self._limit_s * (1 - 1 / HEARTBEATS_PER_PEER_TIMEOUT), self._end_of_time)
        self._ask_more()

    def _ask_more(self) -> None:
        while len(self._probes) < self._most_probes and (member := self._next_to_ask()) is not None:
            task = self._loop.create_task(self._ask(member), name="rpcdist ask a survivor")
            self._probes.add(task)
            task.add_done_callback(self._has_asked)

    def _next_to_ask(self) -> Member | None:
        """One of the missing that was not probed yet, with one of its addresses.

        The workers that named them take turns, so that a long list of addresses, perhaps false ones, delays no other.
        """
        found = [
            (min(self._num_asked[speaker] for speaker in speakers), member, speakers)
            for identity in self._missing()
            for member, speakers in self._named[identity].items()
            if member not in self._asked
        ]
        if not found:
            return None
        _, member, speakers = min(found, key=itemgetter(0))
        self._asked.add(member)
        for speaker in speakers:
            self._num_asked[speaker] += 1
        return member

    async def _ask(self, member: Member) -> None:
        if await self._probe(member):
            self._living[member.identity] = member
        else:
            self._silent.add(member)
        if self._is_time_over:
            self.review()

    def _has_asked(self, task: asyncio.Task[None]) -> None:
        self._probes.discard(task)
        if not task.cancelled():
            self._ask_more()


MIN_AT_ONCE: Final = 16


def max_at_once() -> int:
    """Limit on the concurrent probes of this process, each of which takes a descriptor: a quarter of all.

    An unanswered probe lasts for the peer timeout and delays those queued behind it, so many run at once.
    """
    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_descriptors == resource.RLIM_INFINITY:
        return MAX_NAMED
    return min(max(num_descriptors // 4, MIN_AT_ONCE), MAX_NAMED)
