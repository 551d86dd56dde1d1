"""The shell around the reference counting of one worker: a lock, Python objects, and the agent's connections.

Threads: every method may be called on any thread and never waits for the network, except
`delete_all_user_and_unforked_owner_rrefs`. The lock is held while tables change, and never while messages are handed to
the agent, futures are completed or user objects die: those may come back here.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import NotInitialized, RRefError, WorkerLost
from rpcdist.rpc._rref import actions, events
from rpcdist.rpc._rref.handles import Handle, HandleState, OwnerValue, failed_future, fresh_copy
from rpcdist.rpc._rref.host import RRefHost
from rpcdist.rpc._rref.identifiers import ForkId, Incarnation, ReferenceShare, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Reason
from rpcdist.rpc._rref.problems import FORK_AFTER_DELETION, GONE, Losses, creation_error, owner_lost, replaced
from rpcdist.rpc._rref.protobuf import decode_message, encode_message, id_from_pb, id_to_pb
from rpcdist.rpc._rref.protocol import RRefProtocol
from rpcdist.rpc._rref.report import LiveRRef, counts, leaks, live_rrefs
from rpcdist.rpc._rref.rref_token import Token
from rpcdist.rpc.future import Future
from rpcdist.transport.fork import check_not_forked

__all__ = ["RRefManager"]

WhenThere = Callable[[Future[Any]], object]


class RRefManager:
    """All remote references of one worker.

    Args:
        host: knows the other workers, and sends messages to them.
        wrap: makes the public object of a handle.
        on_released: called when nobody refers to a value of this worker any more; any thread.
    """

    def __init__(
        self, host: RRefHost, wrap: Callable[[Handle], Any], on_released: Callable[[RRefId], object] = lambda rref: None
    ) -> None:
        self._host = host
        self._wrap = wrap
        self._on_released = on_released
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.me = Incarnation(host.me.id, host.me.incarnation)
        self.my_name = host.me.name
        self._protocol = RRefProtocol(self.me)
        self._numbers = itertools.count()
        self._states: dict[UniqueId, HandleState] = {}
        self._values: dict[RRefId, OwnerValue] = {}
        self._fetches: dict[ReferenceShare, list[WhenThere]] = {}
        self._num_waiting = 0  # threads, for `_changed`; the lock is around it
        self._losses = Losses()
        self._dropped: deque[tuple[RRefId, UniqueId]] = deque()
        self.closed = False

    def __repr__(self) -> str:
        return f"<RRefManager {self._protocol!r}>"

    # ------------------------------------------------------------ references that are made here

    def own(self, value: object) -> Handle:
        """A local reference to a value. Nobody else knows it until it is shared."""
        rref = self._new_id()
        owned = OwnerValue(rref)
        owned.set(value)
        return self._add_handle(rref, rref, self.me, self.my_name, owned)

    def create_remote(self, owner: int, is_serial: bool = False) -> tuple[Any, ReferenceShare]:
        """Begins a `remote()`: the reference, and what the call says that its result is.

        Whoever makes the call reports how it ends: `on_created` or `on_creation_failed`, also when it was not sent.

        Raises:
            OwnerLost: the owner is declared dead.
        """
        node = self._node(owner, None)
        rref, fork = self._new_id(), self._new_id()
        if self.closed:
            raise NotInitialized
        event = events.CreateRemote(rref, fork, node)
        handle = self._feed_new(event, rref, fork, node, self._host.name_of(owner))
        if handle.state.error is not None:
            raise fresh_copy(handle.state.error)
        handle.state.is_serial = is_serial
        return self._wrap(handle), ReferenceShare(rref, fork)

    def on_created(self, share: ReferenceShare) -> None:
        """The reply to `remote()` says that the owner holds the result."""
        self._feed(events.Created(share.rref, share.fork))

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        """`remote()` failed. The error surfaces where the reference is used."""
        with self._lock:
            state = self._states.get(share.fork)
            waiters = [] if state is None else self._set_error(state, creation_error(exc, state.owner_name))
        for waiter in waiters:
            waiter()
        self._feed(events.CreationFailed(share.rref, share.fork))

    # ------------------------------------------------------------ remote() at the owner

    def accept_creation(self, share: ReferenceShare, creator: int, incarnation: int | None = None) -> OwnerValue:
        """The call of a `remote()` arrived. Its outcome goes to `set_value` or `set_error`.

        Raises:
            LeaseExpired, RRefError: the creator has given this call up, or is declared dead: do not run it.
        """
        if self.closed:
            raise RRefError(GONE)
        rref, fork = share
        event = events.CreationAccepted(rref, fork, self._node(creator, incarnation))
        value = OwnerValue(rref)

        def prepare() -> None:
            nonlocal value
            value = self._values.setdefault(rref, value)

        for action in self._feed(event, prepare, owned=rref):
            if isinstance(action, actions.RefuseCreation):
                raise self._error(action.reason, f"remote() of {rref}", self.me)
        return value

    def set_value(self, entry: OwnerValue, value: object) -> None:
        """Runs callbacks of those who wait: not on the I/O loop."""
        entry.set(value)
        self._feed(events.CreationFinished(entry.rref))

    def set_error(self, entry: OwnerValue, exc: BaseException) -> None:
        entry.fail(exc)
        self._feed(events.CreationFinished(entry.rref))

    def when_there(
        self, share: ReferenceShare, then: WhenThere, requester: int, incarnation: int | None = None
    ) -> None:
        """Has `then` called once for a user's fetch, which may come before its `remote()`.

        It is called at once, or on the thread that makes the value, with a future that is done: of the value, or of why
        there will be none. Others use the same future: raise only a `fresh_copy` of its error.
        """
        if self.closed:
            then(failed_future(RRefError(GONE)))
            return
        event = events.FetchArrived(*share, self._node(requester, incarnation))
        self._feed(event, lambda: self._fetches.setdefault(share, []).append(then))

    # ------------------------------------------------------------ references in messages

    def share(self, rref: Any, to: int) -> value_pb2.RRefFork:
        """A new fork for a message to a worker. Any failure to deliver it goes to `share_failed`.

        Raises:
            RRefError: the reference is unusable: deleted, its owner lost, its creation failed.
        """
        state = self.check_sharable(rref)
        child = self._new_id()
        if not state.confirmed:  # whoever gets the share may ask the owner before a creation that lingers is there
            self._host.flush(state.owner.worker)
        event = events.Share(state.rref, state.id, child, self._node(to, None))
        if (value := state.value) is not None:
            self._feed(event, lambda: self._values.setdefault(state.rref, value), owned=state.rref)
        else:
            self._feed(event)
        return self._fork_pb(state, child, None if state.value is not None else state.id)

    def check_sharable(self, rref: Any) -> HandleState:
        """Raises `RRefError` if the reference cannot be shared."""
        state: HandleState = rref._handle.state
        state.check(FORK_AFTER_DELETION)
        if self.closed:
            raise RRefError(FORK_AFTER_DELETION)
        if rref._home.me != self.me:
            raise RRefError(
                f"{rref!r} belongs to worker {rref._home.my_name!r} of this process, so worker {self.my_name!r} cannot "
                "share it; make the call as the former"
            )
        return state

    def receive(self, fork: value_pb2.RRefFork, sender: int, incarnation: int | None = None) -> Token:
        """A fork arrived in a message. Cheap; runs on the I/O loop."""
        rref, id = id_from_pb(fork.rref), id_from_pb(fork.fork)
        owner = Incarnation(fork.owner, fork.owner_incarnation)
        parent = id_from_pb(fork.parent) if fork.HasField("parent") else None
        event = events.Received(rref, id, parent, owner, self._node(sender, incarnation))
        handle = self._feed_new(event, rref, id, owner, fork.owner_name)
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
        with self._lock:
            remaining = [0]

            def settled() -> None:
                with self._lock:
                    remaining[0] -= 1
                    last = remaining[0] == 0
                if last:
                    done._complete(None)

            remaining[0] = sum(token.state.when_settled(settled) for token in tokens)
            return done if remaining[0] else None

    def share_failed(self, fork: value_pb2.RRefFork, to: int) -> None:
        """The message with this fork is lost, or may be."""
        self._feed(events.ShareFailed(id_from_pb(fork.rref), id_from_pb(fork.fork), self._node(to, None)))

    def connection_broken(self, worker_id: int, on_the_way: Iterable[value_pb2.RRefFork] = ()) -> None:
        """Messages to a worker may be lost; the forks in `on_the_way` travel in messages that are still being sent."""
        children = frozenset(id_from_pb(fork.fork) for fork in on_the_way)
        self._feed(events.ConnectionBroken(self._node(worker_id, None), children))

    def on_message(self, sender: int, incarnation: int, message: rref_pb2.RRefMessage) -> None:
        """A control message arrived."""
        self._feed(events.MessageArrived(Incarnation(sender, incarnation), decode_message(message)))

    # ------------------------------------------------------------ death of others

    def worker_lost(self, worker_id: int, exc: WorkerLost, incarnation: int | None = None) -> None:
        """A worker is declared dead: its values are gone."""
        self._lose(self._node(worker_id, incarnation), exc)

    def lease_ended(self, worker_id: int, incarnation: int | None = None) -> None:
        """Nothing was heard of a worker for the length of a lease: its references are dropped."""
        self._feed(events.LeaseEnded(self._node(worker_id, incarnation)))

    def worker_found(self, worker_id: int, incarnation: int) -> None:
        """A worker is connected. If it was declared dead, its new values can be referred to again."""
        node = Incarnation(worker_id, incarnation)
        with self._lock:
            self._losses.forget(node)
        self._feed(events.HolderFound(node))

    def is_lost(self, worker_id: int) -> bool:
        return self._node(worker_id, None) in self._protocol.lost

    def _lose(self, node: Incarnation, exc: WorkerLost) -> None:
        with self._lock:
            self._losses.note(node, exc)
        self._feed(events.HolderLost(node))

    # ------------------------------------------------------------ use by a user

    def owner_of(self, state: HandleState) -> int:
        """The owner's id, if it is still the same process; raises `OwnerLost` otherwise."""
        if self._is_replaced(state.owner):
            self._lose(state.owner, replaced(state.owner_name))
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
        while self._dropped:
            try:
                rref, id = self._dropped.popleft()
            except IndexError:  # another thread has taken the last one
                return
            with self._lock:
                state = self._states.pop(id, None)
            self._feed(events.HandleDropped(rref, id))
            del state  # it may be the last to hold the value, whose end runs user code: not under the lock

    def delete_all_user_and_unforked_owner_rrefs(self, timeout_s: float, others: bool = True) -> bool:
        """Drops every reference that this worker holds, and waits until the owners were told; blocks.

        Args:
            timeout_s: limit of the whole, in seconds.
            others: wait also until the other workers have dropped what this one owns.

        Returns:
            Whether all of that happened in time.
        """
        self.drain()
        with self._lock:
            for state in self._states.values():
                state.deleted = state.value is None
        self._feed(events.DropAll())
        deadline = Deadline.after(timeout_s)
        with self._changed:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(lambda: self._is_idle(others), deadline.wait_s())
            finally:
                self._num_waiting -= 1

    def _is_idle(self, others: bool) -> bool:
        tables = self._protocol
        return not tables.users.forks and not tables.users.parked and not (others and tables.owners.entries)

    def close(self) -> None:
        """After shutdown: users can do nothing any more; local values stay readable. Idempotent."""
        with self._lock:
            self.closed = True
            for state in self._states.values():
                state.deleted = state.value is None
            fetches = [then for waiting in self._fetches.values() for then in waiting]
            values = list(self._values.values())
            self._fetches.clear()
            self._values.clear()
        gone = RRefError(GONE)
        for then in fetches:
            then(failed_future(gone))
        for value in values:
            value.fail(gone)

    def check_leaks(self) -> None:
        """Raises `RRefError` naming the values of this worker that others still hold."""
        self.drain()
        with self._lock:
            text = leaks(self._protocol)
        if text:
            raise RRefError(text)

    # ------------------------------------------------------------ views

    def debug_info(self) -> dict[str, str]:
        """torch's counters, as text."""
        self.drain()
        with self._lock:
            return counts(self._protocol)

    def debug_rrefs(self) -> list[LiveRRef]:
        """Every reference that this worker owns or holds, and who holds it."""
        self.drain()
        with self._lock:
            names = {state.owner: state.owner_name for state in self._states.values()}
            return live_rrefs(self._protocol, lambda node: names.get(node) or self._name(node))

    # ------------------------------------------------------------ inside

    def _new_id(self) -> UniqueId:
        return UniqueId(self.me.worker, next(self._numbers), self.me.incarnation)

    def _node(self, worker_id: int, incarnation: int | None) -> Incarnation:
        return Incarnation(worker_id, self._host.incarnation_of(worker_id) if incarnation is None else incarnation)

    def _name(self, node: Incarnation) -> str:
        return self._host.name_of(node.worker)

    def _is_replaced(self, node: Incarnation) -> bool:
        return self._host.incarnation_of(node.worker) not in (0, node.incarnation)

    def _feed_new(
        self, event: events.RRefEvent, rref: RRefId, id: UniqueId, owner: Incarnation, owner_name: str
    ) -> Handle:
        """Feeds an event that makes a handle. Handle and value are in the tables before the protocol speaks of them."""
        state = HandleState(rref, id, owner, owner_name, OwnerValue(rref) if owner == self.me else None)

        def prepare() -> None:
            self._states[id] = state
            if state.value is not None:
                state.value = self._values.setdefault(rref, state.value)

        handle = Handle(state, self._dropped)
        self._feed(event, prepare, owned=rref if owner == self.me else None)
        return handle

    def _add_handle(
        self, rref: RRefId, id: UniqueId, owner: Incarnation, owner_name: str, value: OwnerValue | None
    ) -> Handle:
        state = HandleState(rref, id, owner, owner_name, value)
        with self._lock:
            self._states[id] = state
        return Handle(state, self._dropped)

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

    def _feed(
        self, event: events.RRefEvent, prepare: Callable[[], object] | None = None, owned: RRefId | None = None
    ) -> Sequence[actions.RRefAction]:
        """The doorway: the protocol decides under the lock, its actions are carried out without it.

        Args:
            event: what happened.
            prepare: changes tables of the manager in the same step, before.
            owned: a value that `prepare` put into the table; it stays only if the protocol has an entry for it.
        """
        check_not_forked()  # the lock may be held for ever there
        effects: list[Callable[[], object]] = []
        with self._lock:
            if prepare is not None:
                prepare()
            if self.closed:
                return ()
            todo = self._protocol.handle(event)
            for action in todo:
                _ACTIONS[type(action)](self, action, effects)
            if owned is not None and owned not in self._protocol.owners.entries:
                self._release_value(actions.ReleaseValue(owned), effects)
            if self._num_waiting:
                self._changed.notify_all()
        for effect in effects:
            effect()
        return todo

    def _send(self, action: actions.SendControl, effects: list[Callable[[], object]]) -> None:
        effects.append(lambda: self._send_now(action))

    def _send_now(self, action: actions.SendControl) -> None:
        if not self._is_replaced(action.to):
            self._host.send_control(action.to.worker, encode_message(action.message))
        elif action.to not in self._losses:
            self._lose(action.to, replaced(self._name(action.to)))

    def _confirm(self, action: actions.Confirm, effects: list[Callable[[], object]]) -> None:
        state = self._states.get(action.handle)
        if state is not None:
            state.confirmed = True
            effects.extend(state.take_waiters())

    def _fail(self, action: actions.Fail, effects: list[Callable[[], object]]) -> None:
        state = self._states.get(action.handle)
        if state is not None:
            effects.extend(self._set_error(state, self._error(action.reason, str(state), state.owner)))

    def _set_error(self, state: HandleState, error: Exception) -> list[Callable[[], object]]:
        """The first error stays. [Note: kept errors]"""
        if state.error is None:
            state.error = fresh_copy(error)
        return state.take_waiters()

    def _fail_value(self, action: actions.FailValue, effects: list[Callable[[], object]]) -> None:
        value = self._values.get(action.rref)
        if value is not None:
            error = self._error(action.reason, str(action.rref), self.me)
            effects.append(lambda: value.fail(error))

    def _serve(self, action: actions.Serve, effects: list[Callable[[], object]]) -> None:
        value = self._values[action.rref]
        for then in self._fetches.pop(ReferenceShare(action.rref, action.fork), ()):
            effects.append(partial(value.future.add_done_callback, then))

    def _refuse_fetch(self, action: actions.RefuseFetch, effects: list[Callable[[], object]]) -> None:
        error = self._error(action.reason, str(action.rref), self.me)
        for then in self._fetches.pop(ReferenceShare(action.rref, action.fork), ()):
            effects.append(partial(then, failed_future(error)))

    def _refuse_creation(self, action: actions.RefuseCreation, effects: list[Callable[[], object]]) -> None:
        """`accept_creation` looks for it."""

    def _release_value(self, action: actions.ReleaseValue, effects: list[Callable[[], object]]) -> None:
        value = self._values.pop(action.rref, None)
        effects.append(lambda: value)  # dies after the lock: user code may run
        effects.append(partial(self._on_released, action.rref))

    def _error(self, reason: Reason, what: str, owner: Incarnation) -> Exception:
        return self._losses.error(reason, what, owner, self._name(owner))


_ACTIONS: dict[type[actions.RRefAction], Callable[[RRefManager, Any, list[Callable[[], object]]], None]] = {
    actions.SendControl: RRefManager._send,
    actions.Confirm: RRefManager._confirm,
    actions.Fail: RRefManager._fail,
    actions.FailValue: RRefManager._fail_value,
    actions.Serve: RRefManager._serve,
    actions.RefuseFetch: RRefManager._refuse_fetch,
    actions.RefuseCreation: RRefManager._refuse_creation,
    actions.ReleaseValue: RRefManager._release_value,
}
