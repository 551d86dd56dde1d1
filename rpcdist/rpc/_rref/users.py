"""The user's half of the reference counting: this worker's forks of remote values, and the children it shared.

Pure: no clock, no sockets, no threads. `protocol.py` states the guarantees and dispatches the events.

A fork is *pending* until the owner confirms it, and *parked* while one of its children is unsettled: it cannot be
deleted then (G2). It ends when it is dropped, confirmed and has no unsettled children; then the owner is notified (G1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rpcdist.ids import ProcessId
from rpcdist.rpc._rref.messages import Actions, ForkId, Message, MessageKind, Reason, RRefId


@dataclass(slots=True, eq=False)
class UserFork:
    """A fork that this worker holds. `children` keep it parked; `parent_worker` waits until the fork is settled."""

    rref: RRefId
    fork: ForkId
    owner: ProcessId
    confirmed: bool = False
    dropped: bool = False
    children: dict[ForkId, ProcessId] = field(default_factory=dict)
    creating: bool = field(kw_only=True)
    parent_worker: ProcessId | None = field(kw_only=True)


class UserTable:
    """All forks that this worker holds."""

    def __init__(self, shell: Actions) -> None:
        self._shell = shell
        self.forks: dict[ForkId, UserFork] = {}
        self.parked: dict[ForkId, ForkId] = {}  # child -> parked fork
        self.creating: dict[RRefId, ForkId] = {}

    def __iter__(self) -> Iterator[UserFork]:
        return iter(self.forks.values())

    # Events on this worker.

    def create(self, rref: RRefId, fork: ForkId, owner: ProcessId) -> None:
        self.forks[fork] = UserFork(rref, fork, owner, creating=True, parent_worker=None)
        self.creating[rref] = fork

    def creation_failed(self, fork: ForkId) -> None:
        """Asks the owner whether it got the call; the fork stays pending until the answer."""
        user = self.forks.get(fork)
        if user is not None and not user.confirmed:
            self._shell.send(user.owner, Message(MessageKind.CREATION_QUERY, user.rref, fork))

    def share(self, user: UserFork, child: ForkId, to: ProcessId) -> None:
        user.children[child] = to
        self.parked[child] = user.fork

    def share_failed(self, rref: RRefId, child: ForkId, is_gone: Callable[[ProcessId], bool]) -> None:
        """Asks the process that the child was sent to, not a later one with the same id."""
        if child not in self.parked:
            return
        to = self.forks[self.parked[child]].children[child]
        if is_gone(to):
            self.release(child)
        else:
            self._shell.send(to, Message(MessageKind.SHARE_QUERY, rref, child))

    def receive(
        self, rref: RRefId, fork: ForkId, owner: ProcessId, parent_worker: ProcessId | None, owner_is_lost: bool
    ) -> None:
        if fork in self.forks:  # a duplicate: only a faulty or hostile worker sends it
            self._shell.settle_handle(fork, Reason.UNKNOWN)
            return
        user = self.forks[fork] = UserFork(rref, fork, owner, creating=False, parent_worker=parent_worker)
        if owner_is_lost:
            self._abandon(user, Reason.OWNER_LOST)
        elif parent_worker is None:
            self.confirm(user)
        else:
            self._shell.send(owner, Message(MessageKind.FORK_REQUEST, rref, fork))

    def drop(self, fork: ForkId) -> None:
        user = self.forks.get(fork)
        if user is not None:
            user.dropped = True
            self._settle(user)

    def drop_all(self) -> None:
        for fork in list(self.forks):
            self.drop(fork)

    # Messages from other workers.

    def confirm(self, user: UserFork) -> None:
        if user.confirmed:
            return
        user.confirmed = True
        self._creation_is_over(user)
        self._shell.settle_handle(user.fork)
        self._notify_parent(user)
        self._settle(user)

    def refuse(self, fork: ForkId, reason: Reason) -> None:
        """Fails a pending fork. A refusal after the confirmation is outdated, and is ignored (G3)."""
        user = self.forks.get(fork)
        if user is not None and not user.confirmed:
            self._fail(user, reason)

    def release(self, child: ForkId) -> None:
        """Unparks the parent: its child is counted by the owner, or has failed."""
        holder = self.parked.pop(child, None)
        if holder is None:
            return
        user = self.forks[holder]
        del user.children[child]
        self._settle(user)

    def release_by(self, child: ForkId, sender: ProcessId) -> None:
        """Calls `release` if the child was sent to `sender`."""
        holder = self.parked.get(child)
        if holder is not None and self.forks[holder].children[child] == sender:
            self.release(child)

    def expire(self, fork: ForkId) -> bool:
        """Fails a fork that the owner dropped with our lease, confirmed or not; False if it is not held here."""
        user = self.forks.get(fork)
        if user is not None:
            self._abandon(user, Reason.LEASE_EXPIRED)
        return user is not None

    def owner_lost(self, owner: ProcessId) -> None:
        for user in [user for user in self if user.owner == owner]:
            self._abandon(user, Reason.OWNER_LOST)

    def receiver_lost(self, node: ProcessId) -> None:
        for _, child in self.shared_with(node):
            self.release(child)

    def shared_with(self, node: ProcessId) -> list[tuple[RRefId, ForkId]]:
        """Lists the unsettled children that were sent to `node`."""
        return [(user.rref, child) for user in self for child, to in user.children.items() if to == node]

    def _abandon(self, user: UserFork, reason: Reason) -> None:
        """Fails a fork, and notifies the owner, which would leak the value if it is alive and counts the fork."""
        if user.creating:
            self._shell.send(user.owner, Message(MessageKind.CREATION_QUERY, user.rref, user.fork))
        else:
            self._shell.send(user.owner, Message(MessageKind.USER_DELETED, user.rref, user.fork))
        self._fail(user, reason)

    def _fail(self, user: UserFork, reason: Reason) -> None:
        for child in user.children:
            del self.parked[child]
        user.children.clear()
        del self.forks[user.fork]
        self._creation_is_over(user)
        self._shell.settle_handle(user.fork, reason)
        self._notify_parent(user)

    def _settle(self, user: UserFork) -> None:
        if user.dropped and user.confirmed and not user.children:
            del self.forks[user.fork]
            self._shell.send(user.owner, Message(MessageKind.USER_DELETED, user.rref, user.fork))

    def _notify_parent(self, user: UserFork) -> None:
        if user.parent_worker is not None:
            self._shell.send(user.parent_worker, Message(MessageKind.CHILD_CONFIRMED, user.rref, user.fork))
            user.parent_worker = None

    def _creation_is_over(self, user: UserFork) -> None:
        if user.creating:
            user.creating = False
            del self.creating[user.rref]
