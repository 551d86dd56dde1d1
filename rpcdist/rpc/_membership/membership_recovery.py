"""Which workers a coordinator that took the place of another one still waits for. Pure; the rules of the list itself
are in `membership_table.py`.

 1. Who is expected is what the workers that have come say of the list before; what they say may be wrong.
 2. Who has not come after a while is asked, at every address that was said, whether it lives
    (`survivor_questions.py`). It may have noticed nothing yet of the coordinator's end; the question is the news.
 3. All have come, or else their time is over and everybody has answered, or was asked in vain: then it ends.
 4. Who has answered stays in the job, announced or not. Only who has neither come nor answered is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter

from rpcdist.ids import Identity
from rpcdist.rpc._peers.directory import COORDINATOR, Member

MAX_NAMED = 1000
"""What one worker may say of others: this process connects to each. Who is beyond that is taken back when it comes."""


class Recovery:
    """From the first worker that was in the list of the coordinator before, until all have come or had their time.

    Attributes:
        is_time_over: nobody is waited for any longer but those that have not answered yet.
    """

    def __init__(self) -> None:
        self.is_time_over = False
        self._num_asked: dict[Identity, int] = {}  # of what each of those that have come has said
        self._named: dict[Identity, dict[Member, list[Identity]]] = {}  # the missing, at each address, and who says so
        self._asked: set[Member] = set()
        self._silent: set[Member] = set()
        self._living: dict[Identity, Member] = {}  # those that have answered, and where

    def __repr__(self) -> str:
        return f"<Recovery of {len(self._named)} workers>"

    def expect(self, speaker: Identity, known: Iterable[Member]) -> None:
        """A worker that has come says, once, who was in the list with it."""
        if speaker in self._num_asked:
            return
        self._num_asked[speaker] = 0
        for member in set(islice(known, MAX_NAMED)):
            if member.identity.id != COORDINATOR:
                self._named.setdefault(member.identity, {}).setdefault(member, []).append(speaker)

    def forget(self, identity: Identity) -> bool:
        """A worker belongs to another job; whether nobody else is known of the world before."""
        self._named.pop(identity, None)
        return not self._named

    def missing(self, present: Iterable[Identity]) -> list[Identity]:
        """Those that have not come, and whose place nobody else has taken, by rank."""
        taken = {identity.id for identity in present}
        return sorted((identity for identity in self._named if identity.id not in taken), key=lambda one: one.id)

    def is_complete(self, present: Iterable[Identity]) -> bool:
        """Whether everybody is there, the coordinator included."""
        present = list(present)
        return not self.missing(present) and any(identity.id == COORDINATOR for identity in present)

    def next_to_ask(self, present: Iterable[Identity]) -> Member | None:
        """One of the missing that has not been asked, at one of its addresses.

        Those that have come take turns: a long list of addresses, as a liar may send one, holds up nobody else's.
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
        """One that was asked has answered, or not in time."""
        if lives:
            self._living[member.identity] = member
        else:
            self._silent.add(member)

    def is_decided(self, present: Iterable[Identity]) -> bool:
        """Whether it is known of everybody who is missing whether it lives."""
        return all(
            identity in self._living or self._named[identity].keys() <= self._silent
            for identity in self.missing(present)
        )

    def survivors(self, present: Iterable[Identity]) -> Sequence[Member]:
        """Those of the missing that live."""
        return [self._living[identity] for identity in self.missing(present) if identity in self._living]

    def departures(self, present: Iterable[Identity]) -> Mapping[Identity, str]:
        """Who is lost, and why, for those that have come."""
        there = set(present)
        reason = "the coordinator was lost, and this worker neither came to the next one nor answered it"
        return {identity: reason for identity in self._named if identity not in there}
