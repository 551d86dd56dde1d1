"""The reference counting of one worker: events in, actions out.

This file only decides: no socket, clock, thread, coroutine, logging or torch. `manager.py` is the shell that executes
the actions. `docs/rref.md` draws the message flows, and explains why each rule is enough.

Assumptions about the shell (A1 to A5):

- A1. A control message is delivered at least once, in any order, unless the receiver dies.
- A2. A message that carries forks (an argument, a result, the call of `remote()`) is delivered at most once. If it is
  lost, or may be, the sender reports `ShareFailed` (`CreationFailed` for the call of a `remote()`).
- A3. Each fork of a message is reported (`Received`) when the message arrives, whether or not its value can be decoded.
- A4. If a worker dies, every other one that knows of it reports `HolderLost`, and `LeaseEnded` when its lease is over.
  A living worker may be reported too: that costs its references, and leaks nothing. After `HolderFound` it may
  own and hold new ones, and its lease starts again.
- A5. Identifiers are never used twice in a job, and a worker knows only those that it was told.
- A6. A fetch arrives after the request for its fork, and before the fork is deleted. Any other fetch is refused.

Guarantees:

- G1. The owner learns of every user's deletion. The value lives as long as a user with a valid lease can reach it.
- G2. A parent user is kept until its child's fork is settled: counted by the owner, or given up.
- G3. No order of messages is assumed, and applying one twice is the same as applying it once.
- G4. When the lease of a worker ends, its forks are dropped. If it comes back, it is told `LEASE_EXPIRED` of each.
- G5. When the owner is lost, every handle on its values fails.
- G6. A message counts only from the worker that may send it: about a fork, its holder; about a creation, its creator;
  with the verdict on a fork, its owner; about a share, its maker or receiver. A value goes to the holder of the fork.

[Note: stale requests] No table remembers forks that are gone. A `ForkRequest` that is applied again after its fork was
deleted counts a fork without a holder; but the answer to it, `ForkConfirmed`, reaches a user that does not know the
fork, and that user says `UserDeleted` once more. A request for a value that is gone makes an expected entry, and
its creator answers the probe with `CreationOver`, which removes it. So duplicates heal, with no memory of the dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdist.rpc._rref.events import (
    ChildConfirmed,
    ConnectionBroken,
    Created,
    CreateRemote,
    CreationAccepted,
    CreationFailed,
    CreationFinished,
    CreationOver,
    CreationProbe,
    CreationQuery,
    DropAll,
    Fail,
    FetchArrived,
    ForkConfirmed,
    ForkRefused,
    ForkRequest,
    HandleDropped,
    HolderFound,
    HolderLost,
    LeaseEnded,
    Message,
    MessageArrived,
    Reason,
    Received,
    RRefAction,
    RRefEvent,
    SendControl,
    Share,
    ShareFailed,
    ShareLost,
    ShareQuery,
    UserDeleted,
)
from rpcdist.rpc._rref.identifiers import BoundedSet, ForkId, Incarnation
from rpcdist.rpc._rref.owner import OwnerTable
from rpcdist.rpc._rref.users import UserTable


class RRefProtocol:
    """The tables of one worker. Not thread-safe: the shell holds a lock around `handle`."""

    def __init__(self, me: Incarnation) -> None:
        self.me = me
        self._actions: list[RRefAction] = []
        self._to_myself: list[Message] = []
        self.owners = OwnerTable(me, self._emit)
        self.users = UserTable(self._emit)
        self.lost: set[Incarnation] = set()  # declared dead, and not heard of since
        self.refused_shares = BoundedSet[ForkId]()  # asked about before they came; refused if they come

    def handle(self, event: RRefEvent) -> list[RRefAction]:
        """Applies one event; returns what the shell has to do, in order."""
        _EVENTS[type(event)](self, event)
        while self._to_myself:
            self._arrived(MessageArrived(self.me, self._to_myself.pop(0)))
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_empty(self) -> bool:
        """Whether no reference is held, owned or waited for."""
        return not (self.owners.entries or self.users.forks or self.users.parked or self.users.creating)

    def __repr__(self) -> str:
        held, parked, owned = len(self.users.forks), len(self.users.parked), len(self.owners.entries)
        return f"<RRefProtocol of {self.me!r}: {held} forks held, {parked} parked, {owned} values owned>"

    def _emit(self, action: RRefAction) -> None:
        if type(action) is SendControl and action.to == self.me:
            self._to_myself.append(action.message)
        else:
            self._actions.append(action)

    def _is_gone(self, node: Incarnation) -> bool:
        return node in self.lost or node in self.owners.ended

    def forget(self, node: Incarnation) -> None:
        """The process is neither declared dead nor without a lease any more; the forks that it held are gone."""
        self.lost.discard(node)
        self.owners.ended.discard(node)

    # Events.

    def _create_remote(self, event: CreateRemote) -> None:
        if event.owner == self.me:
            self.owners.create_here(event.rref, event.fork)
        elif event.owner in self.lost:
            self._emit(Fail(event.rref, event.fork, Reason.OWNER_LOST))  # the shell does not send the call
        else:
            self.users.create(event)

    def _created(self, event: Created) -> None:
        user = self.users.forks.get(event.fork)
        if user is not None:
            self.users.confirm(user)

    def _creation_failed(self, event: CreationFailed) -> None:
        self.users.creation_failed(event.fork)
        self.owners.failed_here(event.rref)

    def _creation_accepted(self, event: CreationAccepted) -> None:
        self.owners.accept(event)

    def _creation_finished(self, event: CreationFinished) -> None:
        self.owners.finished(event.rref)

    def _share(self, event: Share) -> None:
        if event.holder in self.users.forks:
            self.users.share(event)
        else:
            self.owners.share(event)

    def _share_failed(self, event: ShareFailed) -> None:
        self.users.share_failed(event, self._is_gone)
        self.owners.share_failed(event)

    def _connection_broken(self, event: ConnectionBroken) -> None:
        """Every share that may have been lost is asked for. A receiver that has it is silent."""
        for rref, child in (*self.users.shared_with(event.node), *self.owners.shared_with(event.node)):
            if child not in event.on_the_way:
                self._share_failed(ShareFailed(rref, child))

    def _received(self, event: Received) -> None:
        if event.fork in self.refused_shares:
            self._emit(Fail(event.rref, event.fork, Reason.SHARE_LOST))
        elif event.owner == self.me:
            self.owners.receive(event, self._is_gone(event.rref.creator))
        else:
            self.users.receive(event, event.owner in self.lost)

    def _handle_dropped(self, event: HandleDropped) -> None:
        self.users.drop(event.handle)
        self.owners.drop(event.rref, event.handle)

    def _fetch_arrived(self, event: FetchArrived) -> None:
        self.owners.fetch(event, self._is_gone(event.rref.creator))

    def _worker_lost(self, event: HolderLost) -> None:
        """Its forks of our values stay until its lease ends: the declaration may be wrong."""
        self.lost.add(event.node)
        self.users.owner_lost(event.node)
        self.users.receiver_lost(event.node)
        self.owners.creator_gone(event.node)

    def _worker_found(self, event: HolderFound) -> None:
        """New references are like any others, in both directions. Those of before have failed, for good."""
        self.lost.discard(event.node)
        self.owners.holder_found(event.node)

    def _lease_ended(self, event: LeaseEnded) -> None:
        self.owners.lease_ended(event.node)
        self.users.receiver_lost(event.node)

    def _drop_all(self, event: DropAll) -> None:
        self.users.drop_all()
        self.owners.drop_all()

    def _arrived(self, event: MessageArrived) -> None:
        message = event.message
        if event.sender in self.owners.ended and isinstance(message, ForkRequest):
            self._emit(SendControl(event.sender, ForkRefused(message.rref, message.fork, Reason.LEASE_EXPIRED)))
            return
        _MESSAGES[type(message)](self, message, event.sender)

    # Messages to the owner.

    def _on_fork_request(self, message: ForkRequest, sender: Incarnation) -> None:
        self.owners.request(message.rref, message.fork, sender, self._is_gone(message.rref.creator))

    def _on_user_deleted(self, message: UserDeleted, sender: Incarnation) -> None:
        self.owners.delete(message.rref, message.fork, sender)

    def _on_creation_query(self, message: CreationQuery, sender: Incarnation) -> None:
        self.owners.answer_creation_query(message.rref, message.fork, sender)

    def _on_creation_over(self, message: CreationOver, sender: Incarnation) -> None:
        if message.rref.creator == sender:
            self.owners.creation_over(message.rref, Reason.UNKNOWN)

    # Messages to a user.

    def _on_fork_confirmed(self, message: ForkConfirmed, sender: Incarnation) -> None:
        user = self.users.forks.get(message.fork)
        if user is not None:
            if user.owner == sender:
                self.users.confirm(user)
        else:
            self._emit(SendControl(sender, UserDeleted(message.rref, message.fork)))  # [Note: stale requests]

    def _on_fork_refused(self, message: ForkRefused, sender: Incarnation) -> None:
        user = self.users.forks.get(message.fork)
        if user is not None and user.owner != sender:
            return
        if message.reason is not Reason.LEASE_EXPIRED:
            self.users.refuse(message.fork, message.reason)
            return
        if not self.users.expire(message.fork) and message.fork.creator == sender:
            self.refused_shares.add(message.fork)  # it may have overtaken the fork
        if message.rref.creator == self.me:  # a probe for what was dropped may have come while we were silent
            self._emit(SendControl(sender, CreationOver(message.rref)))

    def _on_creation_probe(self, message: CreationProbe, sender: Incarnation) -> None:
        """While our call is under way we are silent: it will arrive, or our query about it will."""
        if message.rref not in self.users.creating:
            self._emit(SendControl(sender, CreationOver(message.rref)))

    # Messages between parent and child.

    def _on_child_confirmed(self, message: ChildConfirmed, sender: Incarnation) -> None:
        self.users.release_by(message.fork, sender)

    def _on_share_query(self, message: ShareQuery, sender: Incarnation) -> None:
        """Silence means yes: our verdict on the fork is under way, or will be."""
        if message.fork.creator != sender:
            return
        if message.fork in self.users.forks or self.owners.holds(message.rref, message.fork):
            return
        self.refused_shares.add(message.fork)
        self._emit(SendControl(sender, ShareLost(message.rref, message.fork)))

    def _on_share_lost(self, message: ShareLost, sender: Incarnation) -> None:
        self.users.release_by(message.fork, sender)
        self.owners.delete(message.rref, message.fork, sender)


# Each handler takes its own class, which a table of them cannot say.
_EVENTS: dict[type[RRefEvent], Callable[[RRefProtocol, Any], None]] = {
    CreateRemote: RRefProtocol._create_remote,
    Created: RRefProtocol._created,
    CreationFailed: RRefProtocol._creation_failed,
    CreationAccepted: RRefProtocol._creation_accepted,
    CreationFinished: RRefProtocol._creation_finished,
    Share: RRefProtocol._share,
    ConnectionBroken: RRefProtocol._connection_broken,
    ShareFailed: RRefProtocol._share_failed,
    Received: RRefProtocol._received,
    HandleDropped: RRefProtocol._handle_dropped,
    FetchArrived: RRefProtocol._fetch_arrived,
    HolderLost: RRefProtocol._worker_lost,
    HolderFound: RRefProtocol._worker_found,
    LeaseEnded: RRefProtocol._lease_ended,
    DropAll: RRefProtocol._drop_all,
    MessageArrived: RRefProtocol._arrived,
}
_MESSAGES: dict[type[Message], Callable[[RRefProtocol, Any, Incarnation], None]] = {
    ForkRequest: RRefProtocol._on_fork_request,
    UserDeleted: RRefProtocol._on_user_deleted,
    CreationQuery: RRefProtocol._on_creation_query,
    CreationOver: RRefProtocol._on_creation_over,
    ForkConfirmed: RRefProtocol._on_fork_confirmed,
    ForkRefused: RRefProtocol._on_fork_refused,
    CreationProbe: RRefProtocol._on_creation_probe,
    ChildConfirmed: RRefProtocol._on_child_confirmed,
    ShareQuery: RRefProtocol._on_share_query,
    ShareLost: RRefProtocol._on_share_lost,
}
