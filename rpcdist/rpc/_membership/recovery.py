"""The workers for which a coordinator that replaced another one still waits, and the probes of them.

Pure: `MembershipService` sends the probes. The rules of the list itself are in `roster.py`.

 1. The expected workers are those that the returned workers name. Each names the list that it knew, which may be wrong.
 2. After a while the coordinator probes each missing worker, at every address that was named. The worker may not have
    noticed the loss of the previous coordinator yet; the probe shows it.
 3. The recovery ends when all have returned; or when the time limit has expired and each missing worker has answered
 the
    probe, or failed to.
 4. A worker that has answered stays in the job, even before it announces itself. Only a worker that has neither
    returned nor answered is lost.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final

from rpcdist.ids import Identity
from rpcdist.rpc._peers.directory import COORDINATOR, Member

MAX_NAMED = 1000
"""Limit on the members that one worker may name: this process connects to each. Others return on their own."""


class Recovery:
    """The state of a recovery, from the first returned worker until all have returned or the time limit has expired.

    Args:
        coordinator: the rank of this coordinator, and of the previous one.

    Attributes:
        asks: whether the missing workers are probed now.
        is_time_over: whether the recovery waits only for answers.
    """

    def __init__(self, coordinator: int = COORDINATOR) -> None:
        self.asks = self.is_time_over = False
        self._coordinator = coordinator
        self._num_asked: dict[Identity, int] = {}  # by returned worker: probed members among those that it has named
        self._named: dict[
            Identity, dict[Member, list[Identity]]
        ] = {}  # the missing, at each address, and the workers that named them
        self._asked: set[Member] = set()
        self._silent: set[Member] = set()
        self._living: dict[Identity, Member] = {}  # workers that have answered, with their addresses

    def expect(self, speaker: Identity, known: Iterable[Member]) -> None:
        """Adds the members that a returned worker knew; only once for each worker."""
        if speaker in self._num_asked:
            return
        self._num_asked[speaker] = 0
        for member in set(islice(known, MAX_NAMED)):
            if member.identity.id != self._coordinator:
                self._named.setdefault(member.identity, {}).setdefault(member, []).append(speaker)

    def forget(self, identity: Identity) -> bool:
        """Forgets a worker that belongs to another job. Returns whether no other worker is expected."""
        self._named.pop(identity, None)
        return not self._named

    def missing(self, present: Iterable[Identity]) -> list[Identity]:
        """The workers that have not returned, and whose place is free, by rank."""
        taken = {identity.id for identity in present}
        return sorted((identity for identity in self._named if identity.id not in taken), key=lambda one: one.id)

    def is_complete(self, present: Iterable[Identity]) -> bool:
        present = list(present)
        return not self.missing(present) and any(identity.id == self._coordinator for identity in present)

    def next_to_ask(self, present: Iterable[Identity]) -> Member | None:
        """One of the missing that was not probed yet, with one of its addresses.

        The workers that named them take turns, so that a long list of addresses, perhaps false ones, delays no other.
        """
        found = [
            (min(self._num_asked[speaker] for speaker in speakers), member, speakers)
            for identity in self.missing(present)
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

    def on_answer(self, member: Member, lives: bool) -> None:
        if lives:
            self._living[member.identity] = member
        else:
            self._silent.add(member)

    def is_decided(self, present: Iterable[Identity]) -> bool:
        """Whether it is known of every missing worker whether it lives."""
        return all(
            identity in self._living or self._named[identity].keys() <= self._silent
            for identity in self.missing(present)
        )

    def survivors(self, present: Iterable[Identity]) -> Sequence[Member]:
        return [self._living[identity] for identity in self.missing(present) if identity in self._living]

    def departures(self, present: Iterable[Identity]) -> Mapping[Identity, str]:
        """The lost workers, with reasons, for the workers that have returned."""
        there = set(present)
        reason = "the coordinator was lost, and this worker neither joined the next one nor answered it"
        return {identity: reason for identity in self._named if identity not in there}


MIN_AT_ONCE: Final = 16


def max_at_once() -> int:
    """Limit on the concurrent probes of this process, each of which takes a descriptor: a quarter of all.

    An unanswered probe lasts for the peer timeout and delays those queued behind it, so many run at once.
    """
    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_descriptors == resource.RLIM_INFINITY:
        return MAX_NAMED
    return min(max(num_descriptors // 4, MIN_AT_ONCE), MAX_NAMED)
