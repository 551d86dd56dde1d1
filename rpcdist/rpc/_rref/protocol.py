"""The reference counting of one worker: events are method calls, which call the shell's actions.

Pure decisions: no socket, clock, thread, coroutine, logging or torch. `shell.py` is the shell. `docs/rref.md` draws the
message flows, and explains why the rules suffice.

Assumptions about the shell (A1 to A5):

- A1. A control message is delivered at least once, in any order, unless the receiver dies.
- A2. A message with forks (an argument, a result, a `remote()` call) is delivered at most once. If it is or may be
lost,
  the sender's shell calls `share_failed` (`creation_failed` for a `remote()` call).
- A3. When a message arrives, `received` is called for each of its forks, whether or not the value can be decoded.
- A4. If a worker dies, the shell of every worker that knows it calls `holder_lost`, and `lease_ended` when its lease
  expires. If the worker is alive after all, it loses its references, but nothing leaks. After `holder_found` it can own
  and hold new ones, with a new lease.
- A5. Identifiers are never reused in a job, and a worker only knows identifiers that it created or received.
- A6. A fetch arrives after the request for its fork, and before the fork is deleted. Any other fetch is refused.

Guarantees:

- G1. The owner is notified when a user is deleted. The value lives as long as a user with a valid lease can reach it.
- G2. A parent user is kept until its child's fork is settled: counted by the owner, or failed.
- G3. Messages may arrive in any order, and are idempotent.
- G4. When a worker's lease expires, its forks are dropped. If the worker returns, it gets `LEASE_EXPIRED` for each.
- G5. When the owner is lost, every handle on its values fails.
- G6. A message is accepted only from the worker that may send it: a fork's holder, a creation's creator, the owner for
  the confirmation or refusal of a fork, or a share's sender or receiver. Only the fork's holder gets the value.

[Note: stale requests] No table remembers deleted forks. A duplicate `FORK_REQUEST` after the deletion of its fork
counts a fork without a holder. But the answer, `FORK_CONFIRMED`, reaches a user that does not know the fork, and this
user sends `USER_DELETED` again. A request for a value that is gone adds an expected entry; the creator answers its
probe with `CREATION_OVER`, which removes the entry. So duplicates heal without a record of deleted forks.

The functions below the class show the tables to people and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice

from rpcdist.ids import ProcessId, UniqueId
from rpcdist.inspection import Holder, ReferenceFacts
from rpcdist.rpc._rref.messages import Actions, ForkId, Message, MessageKind, Reason, RRefId, remember
from rpcdist.rpc._rref.owner import OwnerTable, State
from rpcdist.rpc._rref.users import UserTable


class RRefProtocol:
    """The tables of one worker. Not thread-safe: the shell holds a lock around each method."""

    def __init__(self, me: ProcessId, shell: Actions) -> None:
        self.me = me
        self._shell = shell
        self.owners = OwnerTable(me, shell)
        self.users = UserTable(shell)
        self.lost: set[ProcessId] = set()  # declared dead, and not connected since
        self.refused_shares: dict[ForkId, None] = {}  # bounded; queried before they arrived, and so refused on arrival

    def _is_gone(self, node: ProcessId) -> bool:
        return node in self.lost or node in self.owners.ended

    def forget(self, node: ProcessId) -> None:
        """Forgets that the process is dead or without a lease; its forks are already gone."""
        self.lost.discard(node)
        self.owners.ended.discard(node)

    # Creations, shares, handles and fetches.

    def create_remote(self, rref: RRefId, fork: ForkId, owner: ProcessId) -> None:
        """Begins a `remote()`: a call with `fork` is about to be sent to `owner` (perhaps this worker)."""
        if owner == self.me:
            self.owners.create_here(rref, fork)
        elif owner in self.lost:
            self._shell.settle_handle(fork, Reason.OWNER_LOST)  # the shell does not send the call
        else:
            self.users.create(rref, fork, owner)

    def created(self, fork: ForkId) -> None:
        user = self.users.forks.get(fork)
        if user is not None:
            self.users.confirm(user)

    def creation_failed(self, rref: RRefId, fork: ForkId) -> None:
        """Handles a failed `remote()`; the call may have reached the owner."""
        self.users.creation_failed(fork)
        self.owners.failed_here(rref)

    def creation_accepted(self, rref: RRefId, fork: ForkId, creator: ProcessId) -> Reason | None:
        """At the owner: accepts an arrived `remote()`; returns the reason for a refusal, or None."""
        return self.owners.accept(rref, fork, creator)

    def creation_finished(self, rref: RRefId) -> None:
        """At the owner: the function of a `remote()` has ended, with a value or an error."""
        self.owners.finished(rref)

    def share(self, rref: RRefId, holder: UniqueId, child: ForkId, to: ProcessId) -> None:
        """Records `child`, a new fork of the local handle `holder`, before it is sent to `to`."""
        user = self.users.forks.get(holder)
        if user is not None:
            self.users.share(user, child, to)
        else:
            self.owners.share(rref, holder, child, to)

    def share_failed(self, rref: RRefId, child: ForkId) -> None:
        self.users.share_failed(rref, child, self._is_gone)
        self.owners.share_failed(rref, child)

    def connection_broken(self, node: ProcessId, on_the_way: Collection[ForkId] = ()) -> None:
        """Queries every share sent to a worker, since messages may be lost; a receiver that has the share is silent.

        `on_the_way` are children whose messages may still arrive.
        """
        for rref, child in (*self.users.shared_with(node), *self.owners.shared_with(node)):
            if child not in on_the_way:
                self.share_failed(rref, child)

    def received(self, rref: RRefId, fork: ForkId, parent: ForkId | None, owner: ProcessId, sender: ProcessId) -> None:
        """Records a fork that arrived from `sender`. `parent` is the sender's own fork; None if the sender owns it."""
        if fork in self.refused_shares:
            self._shell.settle_handle(fork, Reason.SHARE_LOST)
        elif owner == self.me:
            self.owners.receive(rref, fork, parent, sender, self._is_gone(rref.creator))
        else:
            self.users.receive(rref, fork, owner, None if parent is None else sender, owner in self.lost)

    def handle_dropped(self, rref: RRefId, handle: UniqueId) -> None:
        """Drops a handle that no Python object holds any more."""
        self.users.drop(handle)
        self.owners.drop(rref, handle)

    def drop_all(self) -> None:
        self.users.drop_all()
        self.owners.drop_all()

    def fetch_arrived(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        """At the owner: answers `sender`, which requests the value for its fork."""
        self.owners.fetch(rref, fork, sender, self._is_gone(rref.creator))

    # Losses and returns of workers.

    def holder_lost(self, node: ProcessId) -> None:
        """Handles a worker declared dead. It may be alive, so its forks of our values stay until its lease expires."""
        self.lost.add(node)
        self.users.owner_lost(node)
        self.users.receiver_lost(node)
        self.owners.creator_gone(node)

    def holder_found(self, node: ProcessId) -> None:
        """Handles a connected worker that may have been declared dead: new references work in both directions, but
        earlier ones have failed permanently.
        """
        self.lost.discard(node)
        self.owners.holder_found(node)

    def lease_ended(self, node: ProcessId) -> None:
        """Drops a worker's forks, since it was silent for the length of its lease."""
        self.owners.lease_ended(node)
        self.users.receiver_lost(node)

    # Control messages.

    def message_arrived(self, sender: ProcessId, message: Message) -> None:
        rref, fork = message.rref, message.fork
        match message.kind:
            # To the owner.
            case MessageKind.FORK_REQUEST if sender in self.owners.ended:
                self._shell.send(sender, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.LEASE_EXPIRED))
            case MessageKind.FORK_REQUEST:
                self.owners.request(rref, fork, sender, self._is_gone(rref.creator))
            case MessageKind.USER_DELETED:
                self.owners.delete(rref, fork, sender)
            case MessageKind.CREATION_QUERY:
                self.owners.answer_creation_query(rref, fork, sender)
            case MessageKind.CREATION_OVER:
                if rref.creator == sender:
                    self.owners.creation_over(rref, Reason.UNKNOWN)
            # To a user.
            case MessageKind.FORK_CONFIRMED:
                self._on_fork_confirmed(rref, fork, sender)
            case MessageKind.FORK_REFUSED:
                self._on_fork_refused(rref, fork, message.reason, sender)
            case MessageKind.CREATION_PROBE:  # if still creating, our call or our query will arrive there
                if rref not in self.users.creating:
                    self._shell.send(sender, Message(MessageKind.CREATION_OVER, rref))
            # Between parent and child.
            case MessageKind.CHILD_CONFIRMED:
                self.users.release_by(fork, sender)
            case MessageKind.SHARE_QUERY:
                self._on_share_query(rref, fork, sender)
            case MessageKind.SHARE_LOST:
                self.users.release_by(fork, sender)
                self.owners.delete(rref, fork, sender)

    def _on_fork_confirmed(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        user = self.users.forks.get(fork)
        if user is None:
            self._shell.send(sender, Message(MessageKind.USER_DELETED, rref, fork))  # [Note: stale requests]
        elif user.owner == sender:
            self.users.confirm(user)

    def _on_fork_refused(self, rref: RRefId, fork: ForkId, reason: Reason, sender: ProcessId) -> None:
        user = self.users.forks.get(fork)
        if user is not None and user.owner != sender:
            return
        if reason is not Reason.LEASE_EXPIRED:
            self.users.refuse(fork, reason)
            return
        if not self.users.expire(fork) and fork.creator == sender:
            remember(self.refused_shares, fork)  # the refusal may have overtaken the fork
        if rref.creator == self.me:  # a probe for the dropped value may have arrived while this worker was silent
            self._shell.send(sender, Message(MessageKind.CREATION_OVER, rref))

    def _on_share_query(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        """Answers only if the fork is not here; otherwise the sender will get `CHILD_CONFIRMED`."""
        if fork.creator != sender or fork in self.users.forks or self.owners.holds(rref, fork):
            return
        remember(self.refused_shares, fork)
        self._shell.send(sender, Message(MessageKind.SHARE_LOST, rref, fork))


def reference_facts(
    protocol: RRefProtocol,
    name_of: Callable[[ProcessId], str],
    value_of: Callable[[RRefId], str],
    now: float,
    most: int,
) -> list[ReferenceFacts]:
    """Lists the references that this worker owns and holds, at most `most` of each; copies each table, lock-free."""
    me = name_of(protocol.me)
    since = protocol.owners.since
    found = []
    for entry in list(islice(protocol.owners.entries.values(), most)):
        forks = list(islice(entry.forks.items(), most))
        holders = [Holder(name_of(node), now - since[fork] if fork in since else None) for fork, node in forks]
        holders += [Holder(me)] * len(entry.local)
        found.append(ReferenceFacts(repr(entry.rref), me, entry.state.value, value_of(entry.rref), tuple(holders)))
    for user in list(islice(protocol.users.forks.values(), most)):
        state = "parked" if user.dropped else "confirmed" if user.confirmed else "pending"
        holders = [Holder(me)] * (not user.dropped)
        holders += [Holder(name_of(node)) for node in list(user.children.values())]
        found.append(ReferenceFacts(repr(user.rref), name_of(user.owner), state, "", tuple(holders)))
    return found


def counts(protocol: RRefProtocol) -> dict[str, str]:
    """Returns torch's counters, without values that only local handles keep."""
    owned = [entry for entry in protocol.owners if entry.forks or entry.state is not State.READY]
    return {
        "num_owner_rrefs": str(len(owned)),
        "num_pending_users": str(sum(not user.confirmed for user in protocol.users)),
        "num_forks": str(sum(len(entry.forks) for entry in owned)),
        "num_pending_futures": str(len(protocol.users.parked)),
    }


def leaks(protocol: RRefProtocol) -> str:
    """Describes the values that other living workers still hold; empty if there are none."""
    lines = []
    for entry in protocol.owners:
        forks = [fork for fork, node in entry.forks.items() if node not in protocol.lost]
        if forks:
            lines.append(f"Leaking RRef {entry.rref} with fork Ids: {', '.join(map(str, forks))}")
    return "\n".join(lines)


def is_held(protocol: RRefProtocol) -> bool:
    """Whether a value of this worker is in use; values held only by lost workers end with their leases."""
    return any(
        not entry.forks or any(node not in protocol.lost for node in entry.forks.values()) for entry in protocol.owners
    )
