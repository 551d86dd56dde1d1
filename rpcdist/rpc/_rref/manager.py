"""The shell around the reference counting of one worker: Python objects, and the agent's connections.

Threads: every method may be called on any thread and never waits for the network, except
`delete_all_user_and_unforked_owner_rrefs`. `RRefTables` says what its lock is held for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import NotInitialized, ProtocolViolation, RRefError, WorkerLost
from rpcdist.inspection import ReferenceFacts
from rpcdist.rpc._rref import events
from rpcdist.rpc._rref.handles import Handle, HandleState, OwnerValue, Token, failed_future
from rpcdist.rpc._rref.identifiers import (
    ForkId,
    Incarnation,
    ReferenceShare,
    RRefId,
    UniqueId,
    new_number,
)
from rpcdist.rpc._rref.protobuf import decode_messages, id_from_pb, id_to_pb
from rpcdist.rpc._rref.report import LiveRRef, counts, is_held, leaks, live_rrefs, reference_facts
from rpcdist.rpc._rref.tables import (
    FORK_AFTER_DELETION,
    GONE,
    RRefHost,
    RRefTables,
    WhenThere,
    creation_error,
    owner_lost,
    replaced,
)
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future
from rpcdist.time_limits import RREF_RELEASE_LIMIT_S
from rpcdist.transport.fork import check_not_forked

MOST_AT_ONCE: Final = 64
"""So many references end in one step, and in one message: the lock is not held longer by a hundred thousand of them."""


class RRefManager:
    """All remote references of one worker.

    Args:
        wrap: makes the public object of a handle.
        on_released: see `RRefTables`.
    """

    def __init__(
        self,
        host: RRefHost,
        wrap: Callable[[Handle], Any],
        on_released: Callable[[RRefId, list[object]], object] = lambda rref, held: None,
    ) -> None:
        self._host = host
        self._wrap = wrap
        self.me = Incarnation(host.me.id, host.me.incarnation)
        self.my_name = host.me.name
        self._tables = RRefTables(self.me, host, on_released)
        self._numbers = itertools.count()

    # ------------------------------------------------------------ references that are made here

    def own(self, value: object) -> Handle:
        """A local reference to a value, unknown to other workers until it is shared."""
        rref = self._new_id()
        owned = OwnerValue(rref)
        owned.set(value)
        return self._tables.add_handle(rref, rref, self.me, self.my_name, owned)

    def create_remote(self, owner: int, is_serial: bool = False) -> tuple[Any, ReferenceShare]:
        """Begins a `remote()`: the reference, and the share that the call must name for its result.

        The caller reports how the call ends: `on_created` or `on_creation_failed`, also when it was not sent.

        Raises:
            OwnerLost: the owner is declared dead.
        """
        node = self._tables.node(owner, None)
        rref, fork = self._new_id(), self._new_id()
        if self._tables.closed:
            raise NotInitialized
        event = events.CreateRemote(rref, fork, node)
        handle = self._tables.feed_new(event, rref, fork, node, self._host.name_of(owner))
        if handle.state.error is not None:
            raise copied(handle.state.error)
        handle.state.is_serial = is_serial
        return self._wrap(handle), ReferenceShare(rref, fork)

    def on_created(self, share: ReferenceShare) -> None:
        """The reply to `remote()` says that the owner holds the result."""
        self._tables.feed(events.Created(share.rref, share.fork))

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        """`remote()` failed. The error surfaces where the reference is used."""
        with self._tables.lock:
            state = self._tables.states.get(share.fork)
            waiters = [] if state is None else self._tables.set_error(state, creation_error(exc, state.owner_name))
        for waiter in waiters:
            waiter()
        self._tables.feed(events.CreationFailed(share.rref, share.fork))

    # ------------------------------------------------------------ remote() at the owner

    def accept_creation(self, share: ReferenceShare, creator: int, incarnation: int | None = None) -> OwnerValue:
        """The call of a `remote()` arrived. Its outcome goes to `set_value` or `set_error`.

        Raises:
            LeaseExpired, RRefError: the creator has given this call up, or is declared dead: do not run it.
        """
        if self._tables.closed:
            raise RRefError(GONE)
        rref, fork = share
        event = events.CreationAccepted(rref, fork, self._tables.node(creator, incarnation))
        value = OwnerValue(rref)

        def prepare() -> None:
            nonlocal value
            value = self._tables.values.setdefault(rref, value)

        for action in self._tables.feed(event, prepare, owned=rref):
            if isinstance(action, events.RefuseCreation):
                raise self._tables.error(action.reason, f"remote() of {rref}", self.me)
        return value

    def set_value(self, entry: OwnerValue, value: object) -> None:
        """Runs callbacks that wait for the value: not on the I/O loop."""
        entry.set(value)
        self._tables.feed(events.CreationFinished(entry.rref))

    def set_error(self, entry: OwnerValue, exc: Exception) -> None:
        entry.fail(exc)
        self._tables.feed(events.CreationFinished(entry.rref))

    def value_there(self, share: ReferenceShare, requester: int, incarnation: int) -> Future[Any] | None:
        """The future with which `when_there` would call `then` at once, found with less work; None if it would not."""
        check_not_forked()
        tables = self._tables
        with tables.lock:
            if tables.closed or not tables.protocol.owners.serves_at_once(*share, Incarnation(requester, incarnation)):
                return None
            future = tables.values[share.rref].future
        return future if future.done() else None

    def when_there(
        self, share: ReferenceShare, then: WhenThere, requester: int, incarnation: int | None = None
    ) -> None:
        """Has `then` called once for a user's fetch, which may come before its `remote()`.

        It is called at once, or on the thread that makes the value, with a future that is done: of the value, or of why
        there will be none. Others use the same future: raise only a `copied` of its error.
        """
        if self._tables.closed:
            then(failed_future(RRefError(GONE)))
            return
        sender = self._tables.node(requester, incarnation)
        event = events.FetchArrived(*share, sender)
        self._tables.feed(event, lambda: self._tables.fetches.setdefault((share, sender), []).append(then))

    # ------------------------------------------------------------ references in messages

    def share(self, rref: Any, to: int, incarnation: int | None = None) -> value_pb2.RRefFork:
        """A new fork for a message to a worker. Any failure to deliver it goes to `share_failed`.

        Args:
            rref: the reference.
            to: the worker's id.
            incarnation: of its process, where the session is known; None for the one that has the id now.

        Raises:
            RRefError: the reference is unusable: deleted, its owner lost, its creation failed.
        """
        state = self.check_sharable(rref)
        child = self._new_id()
        if not state.confirmed:  # the receiver may ask the owner before a creation that lingers is there
            self._host.flush(state.owner.worker)
        event = events.Share(state.rref, state.id, child, self._tables.node(to, incarnation))
        if (value := state.value) is not None:
            self._tables.feed(event, lambda: self._tables.values.setdefault(state.rref, value), owned=state.rref)
        else:
            self._tables.feed(event)
        return self._fork_pb(state, child, None if state.value is not None else state.id)

    def check_sharable(self, rref: Any) -> HandleState:
        """Raises `RRefError` if the reference cannot be shared."""
        state: HandleState = rref._handle.state
        state.check(FORK_AFTER_DELETION)
        if self._tables.closed:
            raise RRefError(FORK_AFTER_DELETION)
        if rref._home.me != self.me:
            raise RRefError(
                f"{rref!r} belongs to worker {rref._home.my_name!r} of this process, so worker {self.my_name!r} cannot "
                "share it; make the call as the former"
            )
        return state

    def receive(self, fork: value_pb2.RRefFork, sender: int, incarnation: int | None = None) -> Token:
        """A fork arrived in a message. Cheap; runs on the I/O loop.

        Raises:
            ProtocolViolation: it is here already, and the end of this message would drop it for its holder.
        """
        rref, id = id_from_pb(fork.rref), id_from_pb(fork.fork)
        if id in self._tables.states:
            raise ProtocolViolation(f"share {id} of {rref} arrived, which this worker has already")
        owner = Incarnation(fork.owner, fork.owner_incarnation)
        parent = id_from_pb(fork.parent) if fork.HasField("parent") else None
        event = events.Received(rref, id, parent, owner, self._tables.node(sender, incarnation))
        handle = self._tables.feed_new(event, rref, id, owner, fork.owner_name)
        handle.state.is_serial = fork.is_serial
        return Token(handle.state, handle)

    def claim(self, token: Token) -> Any:
        """The reference object; the same one each time."""
        if token.rref is None:
            if token.handle is None:
                raise RRefError("a remote reference was claimed after its message was given up")
            token.rref = self._wrap(token.handle)
        return token.rref

    def discard(self, token: Token) -> None:
        """Gives the fork back unless it was claimed; idempotent."""
        token.handle = None
        token.rref = None

    def confirmation(self, tokens: Iterable[Token]) -> Future[None] | None:
        """A future that is done when the owners have counted (or refused) these forks; None if they have already."""
        done: Future[None] = Future()
        with self._tables.lock:
            remaining = [0]

            def settled() -> None:
                with self._tables.lock:
                    remaining[0] -= 1
                    last = remaining[0] == 0
                if last:
                    done._complete(None)

            remaining[0] = sum(token.state.when_settled(settled) for token in tokens)
            return done if remaining[0] else None

    def share_failed(self, fork: value_pb2.RRefFork) -> None:
        """The message with this fork is lost, or may be."""
        self._tables.feed(events.ShareFailed(id_from_pb(fork.rref), id_from_pb(fork.fork)))

    def connection_broken(self, worker_id: int, on_the_way: Iterable[value_pb2.RRefFork] = ()) -> None:
        """Messages to a worker may be lost; the forks in `on_the_way` travel in messages that are still being sent."""
        children = frozenset(id_from_pb(fork.fork) for fork in on_the_way)
        self._tables.feed(events.ConnectionBroken(self._tables.node(worker_id, None), children))

    def on_message(self, sender: int, incarnation: int, message: rref_pb2.RRefMessage) -> None:
        """A control message arrived."""
        node = Incarnation(sender, incarnation)
        decoded = decode_messages(message, self._tables.protocol.owners.counts)
        arrived = [events.MessageArrived(node, each) for each in decoded]
        if len(arrived) == 1:
            self._tables.feed(arrived[0])
        else:
            for at in range(0, len(arrived), MOST_AT_ONCE):
                self._tables.feed_deletions(arrived[at : at + MOST_AT_ONCE])

    # ------------------------------------------------------------ death of others

    def worker_lost(self, worker_id: int, exc: WorkerLost, incarnation: int | None = None) -> None:
        """A worker is declared dead: its values are gone."""
        self._tables.lose(self._tables.node(worker_id, incarnation), exc)
        for stranger in self._tables.take_strangers(worker_id):  # nobody knows which process a message meant
            self._tables.lose(stranger, exc)
            self._tables.forget(stranger)

    def lease_ended(self, worker_id: int, incarnation: int | None = None) -> None:
        """Nothing was heard of a worker for the length of a lease: its references are dropped."""
        self._tables.feed(events.LeaseEnded(self._tables.node(worker_id, incarnation)))

    def worker_found(self, worker_id: int, incarnation: int) -> None:
        """A worker is connected. If it was declared dead, its new values can be referred to again."""
        node = Incarnation(worker_id, incarnation)
        with self._tables.lock:
            self._tables.losses.pop(node, None)
        self._tables.take_strangers(worker_id)
        self._tables.feed(events.HolderFound(node))

    def forget(self, worker_id: int, incarnation: int) -> None:
        """The lease of a process that was never a worker has ended."""
        self._tables.forget(Incarnation(worker_id, incarnation))

    def is_lost(self, worker_id: int) -> bool:
        return self._tables.node(worker_id, None) in self._tables.protocol.lost

    # ------------------------------------------------------------ use by a user

    def owner_of(self, state: HandleState) -> int:
        """The owner's id, if it is still the same process; raises `OwnerLost` otherwise."""
        if self._tables.is_replaced(state.owner):
            self._tables.lose(state.owner, replaced(state.owner_name))
            state.check("")
        return state.owner.worker

    def fetch_error(self, state: HandleState, exc: WorkerLost) -> WorkerLost:
        """A lost connection to the owner is `OwnerLost`; a `WorkerLost` that is itself the value's error stays."""
        if exc.worker != state.owner_name:
            return exc
        return owner_lost(exc, f"to_here() of {state.rref}")

    # ------------------------------------------------------------ drops, and the end

    def drain(self) -> None:
        """Notices the handles that were collected. Called often, on any thread: by a timer, before messages go out."""
        self._tables.protocol.owners.now = time.monotonic()
        while ended := self._take_dropped():
            with self._tables.lock:
                states = [self._tables.states.pop(event.handle, None) for event in ended]
            self._tables.feed_deletions(ended)
            del states  # they may be the last to hold the values, whose end runs user code: not under the lock

    def _take_dropped(self) -> list[events.HandleDropped]:
        dropped, ended = self._tables.dropped, list[events.HandleDropped]()
        with suppress(IndexError):  # another thread has taken the last one
            while dropped and len(ended) < MOST_AT_ONCE:
                ended.append(events.HandleDropped(*dropped.popleft()))
        return ended

    def delete_all_user_and_unforked_owner_rrefs(self, timeout_s: float, others: bool = True) -> bool:
        """Drops every reference that this worker holds, and waits until the owners were told; blocks.

        Args:
            timeout_s: limit of the whole, in seconds.
            others: wait also until the other workers have dropped what this one owns, except those that are lost.

        Returns:
            Whether all of that happened in time.
        """
        self.drain()
        with self._tables.lock:
            for state in self._tables.states.values():
                state.deleted = state.value is None
        self._tables.feed(events.DropAll())
        return self._wait_for(lambda: self._is_idle(others), timeout_s)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = Deadline.after(timeout_s)
        with self._tables.changed:
            self._tables.num_waiting += 1
            try:
                return self._tables.changed.wait_for(condition, deadline.wait_s())
            finally:
                self._tables.num_waiting -= 1

    def _is_idle(self, others: bool) -> bool:
        tables = self._tables.protocol
        return not tables.users.forks and not tables.users.parked and not (others and is_held(tables))

    def close(self) -> None:
        """After shutdown: users can do nothing any more; local values stay readable. Idempotent."""
        with self._tables.lock:
            self._tables.closed = True
            for state in self._tables.states.values():
                state.deleted = state.value is None
            fetches = [then for waiting in self._tables.fetches.values() for then in waiting]
            values = list(self._tables.values.values())
            self._tables.fetches.clear()
            self._tables.values.clear()
        gone = RRefError(GONE)
        for then in fetches:
            then(failed_future(gone))
        for value in values:
            value.fail(gone)

    def check_leaks(self) -> None:
        """Raises `RRefError` naming the values of this worker that others still hold, when all are leaving; blocks.

        The last releases may arrive a moment after the last work has ended.
        """
        self.drain()
        self._wait_for(lambda: not leaks(self._tables.protocol), RREF_RELEASE_LIMIT_S)
        with self._tables.lock:
            text = leaks(self._tables.protocol)
        if text:
            raise RRefError(text)

    # ------------------------------------------------------------ views

    def debug_info(self) -> dict[str, str]:
        """torch's counters, as text."""
        self.drain()
        with self._tables.lock:
            return counts(self._tables.protocol)

    def facts(self, now: float, most: int) -> tuple[list[ReferenceFacts], int]:
        """The references that this worker owns and holds, `most` of either, and the number left out; takes no lock."""
        protocol, values = self._tables.protocol, self._tables.values
        left_out = sum(max(0, len(table) - most) for table in (protocol.owners.entries, protocol.users.forks))

        def value_of(rref: RRefId) -> str:
            owned = values.get(rref)
            is_there = owned is not None and owned.future.done() and owned.future._error is None
            return type(owned.future._result).__qualname__ if owned is not None and is_there else ""

        return reference_facts(protocol, self._tables.name, value_of, now, most), left_out

    def debug_rrefs(self) -> list[LiveRRef]:
        """Every reference that this worker owns or holds, and its holders."""
        self.drain()
        with self._tables.lock:
            names = {state.owner: state.owner_name for state in self._tables.states.values()}
            return live_rrefs(self._tables.protocol, lambda node: names.get(node) or self._tables.name(node))

    # ------------------------------------------------------------ inside

    def _new_id(self) -> UniqueId:
        return UniqueId(self.me.worker, new_number(next(self._numbers)), self.me.incarnation)

    def _fork_pb(self, state: HandleState, fork: ForkId, parent: ForkId | None) -> value_pb2.RRefFork:
        return value_pb2.RRefFork(
            rref=id_to_pb(state.rref),
            fork=id_to_pb(fork),
            parent=None if parent is None else id_to_pb(parent),
            owner=state.owner.worker,
            owner_incarnation=state.owner.incarnation,
            owner_name=state.owner_name,
            is_serial=state.is_serial,
        )
