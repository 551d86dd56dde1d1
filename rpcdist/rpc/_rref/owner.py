"""The owner's half of the reference counting: the forks of our values, and their holders.

Pure: no clock, no sockets, no threads. `protocol.py` states the guarantees and dispatches the events.

An entry is *expected* if a worker named a reference whose `remote()` has not arrived yet (messages are unordered),
*creating* while its function runs, and *ready* after that. A ready entry ends when nothing refers to it; an expected
one when nothing waits for it, so references that are never created leave nothing behind.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rpcdist.ids import ProcessId, UniqueId
from rpcdist.rpc._rref.messages import Actions, ForkId, Message, MessageKind, Reason, RRefId, remember

MAX_WAITING: Final = 1 << 16
"""Forks of one process that may wait for the creation of their values; further ones are refused as unknown."""
MAX_HELD: Final = 1 << 20
"""Forks that one process may hold; further ones are refused, except those that this worker shares with it."""


class State(enum.Enum):
    EXPECTED = "expected"
    CREATING = "creating"
    READY = "ready"


@dataclass(slots=True, eq=False)
class OwnerEntry:
    """One of our values: its counted `forks`, our `local` handles, and the `askers` and `fetchers` waiting for it."""

    rref: RRefId
    state: State
    forks: dict[ForkId, ProcessId] = field(default_factory=dict)
    local: dict[UniqueId, None] = field(default_factory=dict)
    askers: dict[ForkId, ProcessId] = field(default_factory=dict)
    fetchers: dict[ForkId, ProcessId] = field(default_factory=dict)


class OwnerTable:
    """All values of this worker that others know.

    Attributes:
        now: the approximate time, in seconds, set by the shell.
        since: when each counted fork was counted.
        waiting: per process, the number of its forks that wait for a creation.
        held: per process, the number of its counted forks.
    """

    def __init__(self, me: ProcessId, shell: Actions) -> None:
        self._me = me
        self._shell = shell
        self.entries: dict[RRefId, OwnerEntry] = {}
        self.now = 0.0
        self.since: dict[ForkId, float] = {}
        self.waiting: Counter[ProcessId] = Counter()
        self.held: Counter[ProcessId] = Counter()
        self.ended: set[ProcessId] = set()  # processes whose lease has expired: dead or silent
        # Both bounded: forks that such processes held, reported to those that return, and creations that failed at
        # their creator before they arrived.
        self.expired: dict[tuple[ProcessId, RRefId, ForkId], None] = {}
        self.refused: dict[RRefId, None] = {}

    def __iter__(self) -> Iterator[OwnerEntry]:
        return iter(self.entries.values())

    # Creation.

    def create_here(self, rref: RRefId, fork: ForkId) -> None:
        """Begins a `remote()` to this worker itself; the caller's handle is a local one."""
        entry = self.entries[rref] = OwnerEntry(rref, State.EXPECTED)
        entry.local[fork] = None

    def accept(self, rref: RRefId, fork: ForkId, creator: ProcessId) -> Reason | None:
        entry = self.entries.get(rref)
        if rref.creator != creator or fork.creator != creator:
            return Reason.NOT_HELD
        if creator in self.ended:
            return Reason.LEASE_EXPIRED
        if rref in self.refused:
            return Reason.CREATION_FAILED
        if self.held[creator] >= MAX_HELD:
            return Reason.TOO_MANY
        if entry is None:
            entry = self.entries[rref] = OwnerEntry(rref, State.CREATING)
            self._count(entry, fork, creator)
        elif entry.state is State.EXPECTED:
            entry.state = State.CREATING
            if creator != self._me:
                self._count(entry, fork, creator)
            self._answer_waiting(entry)
        return None

    def finished(self, rref: RRefId) -> None:
        entry = self.entries.get(rref)
        if entry is not None and entry.state is State.CREATING:
            entry.state = State.READY
            self._settle(entry)

    def failed_here(self, rref: RRefId) -> None:
        """Fails a `remote()` to this worker itself; if its call still arrives, it is refused."""
        entry = self.entries.get(rref)
        if entry is not None and entry.state is State.EXPECTED and rref.creator == self._me:
            self.creation_over(rref, Reason.CREATION_FAILED)

    def answer_creation_query(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        """Answers a creator whose call may be lost. If the call has not arrived, it is refused from now on."""
        if rref.creator != sender:
            return
        entry = self.entries.get(rref)
        if entry is not None and fork in entry.forks:
            self._shell.send(sender, Message(MessageKind.FORK_CONFIRMED, rref, fork))
            return
        if entry is None:
            remember(self.refused, rref)
        self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.CREATION_FAILED))
        self.creation_over(rref, Reason.CREATION_FAILED)

    def creation_over(self, rref: RRefId, reason: Reason) -> None:
        """Refuses waiting workers and fails the value for counted forks, since the `remote()` will never arrive."""
        entry = self.entries.get(rref)
        if entry is not None and entry.state is State.EXPECTED:
            entry.state = State.READY
            remember(self.refused, rref)
            self._shell.fail_value(rref, reason)
            self._refuse_waiting(entry, reason)
            self._settle(entry)

    # Forks.

    def request(self, rref: RRefId, fork: ForkId, sender: ProcessId, creator_is_gone: bool) -> None:
        entry = self._entry_or_expect(rref, creator_is_gone)
        if entry is None:
            self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.UNKNOWN))
        elif sender != entry.forks.get(fork, sender) or sender != entry.askers.get(fork, sender):
            self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.NOT_HELD))
        elif fork not in entry.forks and self.held[sender] >= MAX_HELD:
            self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.TOO_MANY))
        elif entry.state is not State.EXPECTED:
            self._count(entry, fork, sender)
            self._shell.send(sender, Message(MessageKind.FORK_CONFIRMED, rref, fork))
        elif not self._wait(entry.askers, fork, sender):
            self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.UNKNOWN))
            self._settle(entry)

    def delete(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        entry = self.entries.get(rref)
        if entry is None:
            return
        if entry.forks.get(fork) == sender:
            self._uncount(entry, fork)
        if entry.askers.get(fork) == sender:
            self._end_wait(entry.askers, fork)
        self._settle(entry)

    def counts(self, rref: tuple[object, ...], fork: tuple[object, ...]) -> bool:
        """Whether `delete` could find this fork; any thread, without the lock."""
        entry = self.entries.get(rref)  # type: ignore[call-overload]  # a tuple is equal to the id with its fields
        return entry is not None and (fork in entry.forks or fork in entry.askers)

    def share(self, rref: RRefId, holder: UniqueId, child: ForkId, to: ProcessId) -> None:
        """Counts the child at once, so that its receiver needs no confirmation."""
        entry = self.entries.get(rref)
        if entry is None:  # our value, not shared until now
            entry = self.entries[rref] = OwnerEntry(rref, State.READY)
        entry.local[holder] = None
        self._count(entry, child, to)

    def share_failed(self, rref: RRefId, child: ForkId) -> None:
        """Queries the receiver, even one declared dead, because it may have the fork until its lease expires."""
        entry = self.entries.get(rref)
        if entry is None or child not in entry.forks:
            return
        to = entry.forks[child]  # another process may have its id now
        if to in self.ended:
            remember(self.expired, (to, rref, child))
            self.delete(rref, child, to)
        else:
            self._shell.send(to, Message(MessageKind.SHARE_QUERY, rref, child))

    def shared_with(self, node: ProcessId) -> list[tuple[RRefId, ForkId]]:
        """Lists the counted forks that this worker itself sent to the node, which may never have received them."""
        return [
            (entry.rref, fork) for entry in self for fork in _forks_of(entry.forks, node) if fork.creator == self._me
        ]

    def receive(
        self, rref: RRefId, fork: ForkId, parent: ForkId | None, sender: ProcessId, creator_is_gone: bool
    ) -> None:
        """Turns a fork that came back to the owner into a local handle, and releases its sender."""
        if parent is not None:
            self._shell.send(sender, Message(MessageKind.CHILD_CONFIRMED, rref, fork))
        entry = self._entry_or_expect(rref, creator_is_gone)
        if entry is None:
            reason = Reason.LEASE_EXPIRED if sender in self.ended else Reason.UNKNOWN
            self._shell.settle_handle(fork, reason)
            return
        if entry.forks.get(fork) == self._me:  # counted when this worker sent it to itself
            self._uncount(entry, fork)
        entry.local[fork] = None
        self._shell.settle_handle(fork)

    def holds(self, rref: RRefId, handle: UniqueId) -> bool:
        entry = self.entries.get(rref)
        return entry is not None and handle in entry.local

    def drop(self, rref: RRefId, handle: UniqueId) -> None:
        entry = self.entries.get(rref)
        if entry is not None and handle in entry.local:
            del entry.local[handle]
            self._settle(entry)

    def drop_all(self) -> None:
        for entry in list(self):
            entry.local.clear()
            self._settle(entry)

    def fetch(self, rref: RRefId, fork: ForkId, sender: ProcessId, creator_is_gone: bool) -> None:
        if sender in self.ended or (sender, rref, fork) in self.expired:
            self._shell.answer_fetch(rref, fork, sender, Reason.LEASE_EXPIRED)
            self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.LEASE_EXPIRED))
            return
        entry = self.entries.get(rref)
        if entry is None and rref.creator == sender == fork.creator:  # the fetch has overtaken its `remote()`
            entry = self._entry_or_expect(rref, creator_is_gone)
        if entry is None:
            self._shell.answer_fetch(rref, fork, sender, Reason.UNKNOWN)
        elif entry.state is not State.EXPECTED and self._is_held(entry, fork, sender):
            self._shell.answer_fetch(rref, fork, sender)
        elif entry.state is State.EXPECTED and self._may_hold(entry, fork, sender):
            before = entry.fetchers.get(fork, sender)
            if before != sender:
                self._shell.answer_fetch(rref, fork, before, Reason.NOT_HELD)
                self._end_wait(entry.fetchers, fork)
            if not self._wait(entry.fetchers, fork, sender):
                self._shell.answer_fetch(rref, fork, sender, Reason.UNKNOWN)
                self._settle(entry)
        else:
            self._shell.answer_fetch(rref, fork, sender, Reason.NOT_HELD)

    def serves_at_once(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> bool:
        """Whether `fetch` would only serve the value."""
        entry = self.entries.get(rref)
        return (
            entry is not None
            and entry.state is not State.EXPECTED
            and self._is_held(entry, fork, sender)
            and sender not in self.ended
            and (sender, rref, fork) not in self.expired
        )

    # Loss and return of workers.

    def lease_ended(self, node: ProcessId) -> None:
        """Drops all forks of the node permanently. Until it is found again, none of its forks are counted (G4)."""
        self.ended.add(node)
        for entry in list(self):
            self._drop_holder(entry, node)
        self.creator_gone(node)

    def holder_found(self, node: ProcessId) -> None:
        """Grants the node a lease for new forks, and reports which of its old ones are gone."""
        if node not in self.ended:
            return
        self.ended.remove(node)
        for holder, rref, fork in self.expired:
            if holder == node:
                self._shell.send(node, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.LEASE_EXPIRED))

    def creator_gone(self, node: ProcessId) -> None:
        """Fails the values that a dead worker announced but never created."""
        for entry in list(self):
            if entry.rref.creator == node:
                self.creation_over(entry.rref, Reason.CREATION_FAILED)

    def _count(self, entry: OwnerEntry, fork: ForkId, holder: ProcessId) -> None:
        if fork not in entry.forks:
            self.held[holder] += 1
        entry.forks[fork] = holder
        self.since[fork] = self.now

    def _uncount(self, entry: OwnerEntry, fork: ForkId) -> None:
        self.since.pop(fork, None)
        _take_out(self.held, entry.forks.pop(fork))

    def _drop_holder(self, entry: OwnerEntry, node: ProcessId) -> None:
        """Drops the node's forks, and refuses its requests, so that it does not wait if it is alive after all."""
        for fork in _forks_of(entry.forks, node):
            self._uncount(entry, fork)
            remember(self.expired, (node, entry.rref, fork))
        for fork in _forks_of(entry.askers, node):
            self._end_wait(entry.askers, fork)
            self._shell.send(node, Message(MessageKind.FORK_REFUSED, entry.rref, fork, Reason.LEASE_EXPIRED))
        for fork in _forks_of(entry.fetchers, node):
            self._end_wait(entry.fetchers, fork)
            self._shell.answer_fetch(entry.rref, fork, node, Reason.LEASE_EXPIRED)
        self._settle(entry)

    def _is_held(self, entry: OwnerEntry, fork: ForkId, sender: ProcessId) -> bool:
        """Whether `sender` holds this fork, and so may get the value."""
        return entry.forks.get(fork) == sender or (sender == self._me and fork in entry.local)

    def _may_hold(self, entry: OwnerEntry, fork: ForkId, sender: ProcessId) -> bool:
        """Whether `sender` may turn out to hold this fork when the `remote()` arrives."""
        is_creator = sender == entry.rref.creator and fork not in entry.forks and fork not in entry.askers
        return is_creator or entry.askers.get(fork) == sender or self._is_held(entry, fork, sender)

    def _entry_or_expect(self, rref: RRefId, creator_is_gone: bool) -> OwnerEntry | None:
        """Returns the entry, or a new expected one if its `remote()` may still arrive; None if the value is gone."""
        entry = self.entries.get(rref)
        if entry is not None:
            return entry
        if creator_is_gone or rref.creator == self._me or rref in self.refused:
            return None
        entry = self.entries[rref] = OwnerEntry(rref, State.EXPECTED)
        self._shell.send(rref.creator, Message(MessageKind.CREATION_PROBE, rref))
        return entry

    def _answer_waiting(self, entry: OwnerEntry) -> None:
        for fork, holder in entry.askers.items():
            self._count(entry, fork, holder)
            self._shell.send(holder, Message(MessageKind.FORK_CONFIRMED, entry.rref, fork))
        for fork, sender in entry.fetchers.items():
            if self._is_held(entry, fork, sender):
                self._shell.answer_fetch(entry.rref, fork, sender)
            else:
                self._shell.answer_fetch(entry.rref, fork, sender, Reason.NOT_HELD)
        self._end_waits(entry)

    def _refuse_waiting(self, entry: OwnerEntry, reason: Reason) -> None:
        for fork, holder in entry.askers.items():
            self._shell.send(holder, Message(MessageKind.FORK_REFUSED, entry.rref, fork, reason))
        for fork, sender in entry.fetchers.items():
            self._shell.answer_fetch(entry.rref, fork, sender, reason)
        self._end_waits(entry)

    def _wait(self, table: dict[ForkId, ProcessId], fork: ForkId, sender: ProcessId) -> bool:
        """Lets a fork wait for the creation of its value; False if its process has too many waiting."""
        if fork not in table:
            if self.waiting[sender] >= MAX_WAITING:
                return False
            self.waiting[sender] += 1
        table[fork] = sender
        return True

    def _end_wait(self, table: dict[ForkId, ProcessId], fork: ForkId) -> None:
        _take_out(self.waiting, table.pop(fork))

    def _end_waits(self, entry: OwnerEntry) -> None:
        for table in (entry.askers, entry.fetchers):
            for fork in list(table):
                self._end_wait(table, fork)

    def _settle(self, entry: OwnerEntry) -> None:
        if entry.forks or entry.local:
            return
        if entry.state is State.READY:
            del self.entries[entry.rref]
            self._shell.release_value(entry.rref)
        elif entry.state is State.EXPECTED and entry.rref.creator != self._me:  # our own call is still to arrive
            if not entry.askers and not entry.fetchers:
                del self.entries[entry.rref]


def _forks_of(table: dict[ForkId, ProcessId], node: ProcessId) -> list[ForkId]:
    return [fork for fork, holder in table.items() if holder == node]


def _take_out(counts: Counter[ProcessId], node: ProcessId) -> None:
    counts[node] -= 1
    if not counts[node]:
        del counts[node]
