"""The reference counting of one worker: what happens comes in as calls of methods, which call the actions of the shell.

This file only decides: no socket, clock, thread, coroutine, logging or torch. `shell.py` is the shell. `docs/rref.md`
draws the message flows, and explains why each rule is enough.

Assumptions about the shell (A1 to A5):

- A1. A control message is delivered at least once, in any order, unless the receiver dies.
- A2. A message that carries forks (an argument, a result, the call of `remote()`) is delivered at most once. If it is
  lost, or may be, the sender reports `share_failed` (`creation_failed` for the call of a `remote()`).
- A3. Each fork of a message is reported (`received`) when the message arrives, whether or not its value can be decoded.
- A4. If a worker dies, every other one that knows of it reports `holder_lost`, and `lease_ended` when its lease is
  over. A living worker may be reported too: that costs its references, and leaks nothing. After `holder_found` it may
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

[Note: stale requests] No table remembers forks that are gone. A `FORK_REQUEST` that is applied again after its fork was
deleted counts a fork without a holder; but the answer to it, `FORK_CONFIRMED`, reaches a user that does not know the
fork, and that user says `USER_DELETED` once more. A request for a value that is gone makes an expected entry, and
its creator answers the probe with `CREATION_OVER`, which removes it. So duplicates heal, with no memory of the dead.

Below the protocol stand views of its tables, for people and for tests.
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
        self.lost: set[ProcessId] = set()  # declared dead, and not heard of since
        self.refused_shares: dict[ForkId, None] = {}  # bounded; asked about before they came; refused if they come

    def _is_gone(self, node: ProcessId) -> bool:
        return node in self.lost or node in self.owners.ended

    def forget(self, node: ProcessId) -> None:
        """The process is neither declared dead nor without a lease any more; the forks that it held are gone."""
        self.lost.discard(node)
        self.owners.ended.discard(node)

    # Creations, shares, handles and fetches.

    def create_remote(self, rref: RRefId, fork: ForkId, owner: ProcessId) -> None:
        """`remote()` begins here: the call that carries `fork` is about to leave for `owner` (perhaps this worker)."""
        if owner == self.me:
            self.owners.create_here(rref, fork)
        elif owner in self.lost:
            self._shell.settle_handle(fork, Reason.OWNER_LOST)  # the shell does not send the call
        else:
            self.users.create(rref, fork, owner)

    def created(self, fork: ForkId) -> None:
        """The reply to the `remote()` that carried `fork` arrived: the owner has the value."""
        user = self.users.forks.get(fork)
        if user is not None:
            self.users.confirm(user)

    def creation_failed(self, rref: RRefId, fork: ForkId) -> None:
        """`remote()` failed for its caller; whether the call reached the owner is unknown."""
        self.users.creation_failed(fork)
        self.owners.failed_here(rref)

    def creation_accepted(self, rref: RRefId, fork: ForkId, creator: ProcessId) -> Reason | None:
        """At the owner: the call of a `remote()` arrived. Returns why it must not run, or None."""
        return self.owners.accept(rref, fork, creator)

    def creation_finished(self, rref: RRefId) -> None:
        """At the owner: the function of a `remote()` ended, by value or error."""
        self.owners.finished(rref)

    def share(self, rref: RRefId, holder: UniqueId, child: ForkId, to: ProcessId) -> None:
        """A message to `to` is about to carry `child`, a new fork of the local handle `holder`."""
        user = self.users.forks.get(holder)
        if user is not None:
            self.users.share(user, child, to)
        else:
            self.owners.share(rref, holder, child, to)

    def share_failed(self, rref: RRefId, child: ForkId) -> None:
        """The message that carried `child` is lost, or may be."""
        self.users.share_failed(rref, child, self._is_gone)
        self.owners.share_failed(rref, child)

    def connection_broken(self, node: ProcessId, on_the_way: Collection[ForkId] = ()) -> None:
        """Messages to a worker may be lost: every share in them is asked for. A receiver that has it is silent.

        `on_the_way` are children whose messages have not been given up.
        """
        for rref, child in (*self.users.shared_with(node), *self.owners.shared_with(node)):
            if child not in on_the_way:
                self.share_failed(rref, child)

    def received(self, rref: RRefId, fork: ForkId, parent: ForkId | None, owner: ProcessId, sender: ProcessId) -> None:
        """A message of `sender` carried `fork`. `parent` is the sender's own fork; None if the sender is the owner."""
        if fork in self.refused_shares:
            self._shell.settle_handle(fork, Reason.SHARE_LOST)
        elif owner == self.me:
            self.owners.receive(rref, fork, parent, sender, self._is_gone(rref.creator))
        else:
            self.users.receive(rref, fork, owner, None if parent is None else sender, owner in self.lost)

    def handle_dropped(self, rref: RRefId, handle: UniqueId) -> None:
        """No Python object holds this handle any more."""
        self.users.drop(handle)
        self.owners.drop(rref, handle)

    def drop_all(self) -> None:
        """Shutdown: every handle of this worker counts as dropped."""
        self.users.drop_all()
        self.owners.drop_all()

    def fetch_arrived(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        """At the owner: `sender` asks for the value on behalf of its fork."""
        self.owners.fetch(rref, fork, sender, self._is_gone(rref.creator))

    # Losses and returns of workers.

    def holder_lost(self, node: ProcessId) -> None:
        """A worker is declared dead. Its forks of our values stay until its lease ends: it may live all the same."""
        self.lost.add(node)
        self.users.owner_lost(node)
        self.users.receiver_lost(node)
        self.owners.creator_gone(node)

    def holder_found(self, node: ProcessId) -> None:
        """A worker is connected that may have been declared dead. New references are like any others, in both
        directions. Those of before have failed, for good.
        """
        self.lost.discard(node)
        self.owners.holder_found(node)

    def lease_ended(self, node: ProcessId) -> None:
        """Nothing was heard of a worker for as long as its lease lasts."""
        self.owners.lease_ended(node)
        self.users.receiver_lost(node)

    # Control messages.

    def message_arrived(self, sender: ProcessId, message: Message) -> None:
        """A control message."""
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
            case MessageKind.CREATION_PROBE:  # while our call is under way: it, or our query about it, will arrive
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
            remember(self.refused_shares, fork)  # it may have overtaken the fork
        if rref.creator == self.me:  # a probe for what was dropped may have come while we were silent
            self._shell.send(sender, Message(MessageKind.CREATION_OVER, rref))

    def _on_share_query(self, rref: RRefId, fork: ForkId, sender: ProcessId) -> None:
        """Silence means yes: our verdict on the fork is under way, or will be."""
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
    """The references that this worker owns and holds, `most` of either. No lock: each table is copied in one step."""
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
    """torch's counters: values that only local handles keep are not counted."""
    owned = [entry for entry in protocol.owners if entry.forks or entry.state is not State.READY]
    return {
        "num_owner_rrefs": str(len(owned)),
        "num_pending_users": str(sum(not user.confirmed for user in protocol.users)),
        "num_forks": str(sum(len(entry.forks) for entry in owned)),
        "num_pending_futures": str(len(protocol.users.parked)),
    }


def leaks(protocol: RRefProtocol) -> str:
    """A text that names the leaks; empty if no other living worker holds a value of this one."""
    lines = []
    for entry in protocol.owners:
        forks = [fork for fork, node in entry.forks.items() if node not in protocol.lost]
        if forks:
            lines.append(f"Leaking RRef {entry.rref} with fork Ids: {', '.join(map(str, forks))}")
    return "\n".join(lines)


def is_held(protocol: RRefProtocol) -> bool:
    """Whether a value of this worker is in use. Those that only lost workers hold end with their leases."""
    return any(
        not entry.forks or any(node not in protocol.lost for node in entry.forks.values()) for entry in protocol.owners
    )
