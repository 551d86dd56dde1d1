"""The shell around one worker's reference counting: connects it to Python objects and the agent's connections.

Any thread may call any method. Only `delete_all_user_and_unforked_owner_rrefs` and `check_leaks` wait for the network.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import NotInitialized, ProtocolViolation, RRefError, WorkerLost
from rpcdist.ids import Identity, ProcessId, UniqueId, new_number
from rpcdist.inspection import ReferenceFacts
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.router import REPLACED
from rpcdist.rpc._rref.handles import (
    FORK_AFTER_DELETION,
    GONE,
    Dropped,
    Handle,
    HandleState,
    creation_error,
    describe,
    failed_future,
    owner_lost,
    quiet_future,
    replaced,
)
from rpcdist.rpc._rref.messages import (
    Actions,
    ForkId,
    Message,
    MessageKind,
    Reason,
    ReferenceShare,
    RRefId,
    decode_messages,
    encode_messages,
    id_from_pb,
    id_to_pb,
)
from rpcdist.rpc._rref.protocol import RRefProtocol, counts, is_held, leaks, reference_facts
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future
from rpcdist.time_limits import CLOSE_STEP_LIMIT_S
from rpcdist.transport.fork import check_not_forked

T = TypeVar("T")
WhenThere = Callable[[Future[Any]], object]

MOST_AT_ONCE: Final = 64
"""References that end in one step, and in one message, so that dropping a hundred thousand does not hold the lock."""


class RRefShell(Actions):
    """All remote references of one worker: handles, values, waiting fetches, and the protocol's tables.

    The lock is held while tables change, but not while messages are sent, futures are completed or user objects are
    destroyed, since all of these may call this class again.

    Args:
        directory: the names and processes of other workers.
        send_control: delivers a message to a worker at least once, unless the worker dies; any thread, never blocks.
        flush: sends a worker's queued messages now; any thread, never blocks.
        wrap: makes the public object of a handle.
        on_released: called on any thread when a value of this worker has no reference left, with a list of which the
            value is the only item: the value is destroyed with the list, or when the list is emptied.

    Attributes:
        protocol: makes the decisions; gets events from `_feed` and `forget`.
        states: the states of this worker's handles, by fork.
        values: the values that this worker owns.
        fetches: functions to call when a value is available, by share and requesting process.
        losses: why processes were declared dead; one entry per process.
        dropped: collected handles that were not processed yet.
    """

    def __init__(
        self,
        directory: Directory,
        send_control: Callable[[int, rref_pb2.RRefMessage], object],
        flush: Callable[[int], object],
        wrap: Callable[[Handle], Any],
        on_released: Callable[[RRefId, list[object]], object] = lambda rref, held: None,
    ) -> None:
        self._directory = directory
        self._send_control = send_control
        self._flush = flush
        self.wrap = wrap
        self._on_released = on_released
        self.me = directory.me.process
        self.my_name = directory.me.name
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards everything below
        self._changed = threading.Condition(self._lock)  # notified of each change if threads wait
        self._num_waiting = 0  # threads in `_wait_for`
        self.protocol = RRefProtocol(self.me, self)
        self._effects: list[Callable[[], object]] = []  # effects of the current decision; run without the lock
        self._deleted: dict[ProcessId, list[Message]] = {}  # by owner, forks deleted in the current decision
        self._to_myself: list[Message] = []  # delivered after the current decision
        self.states: dict[UniqueId, HandleState] = {}
        self.values: dict[RRefId, Future[Any]] = {}
        self.fetches: dict[tuple[ReferenceShare, ProcessId], list[WhenThere]] = {}
        self.losses: dict[ProcessId, WorkerLost] = {}
        # Processes of unknown workers that messages were sent to, by worker id, until one is found or lost.
        self._strangers: dict[int, set[ProcessId]] = {}
        self.dropped: Dropped = deque()
        self._is_closed = False  # after shutdown, the protocol gets no more events

    # ------------------------------------------------------------ references made here

    def own(self, value: object) -> Handle:
        """Makes a local reference to a value; other workers do not know it until it is shared."""
        rref = self._new_id()
        owned = quiet_future()
        owned._complete(value)
        state = HandleState(rref, rref, self.me, self.my_name, owned)
        handle = Handle(state, self.dropped)  # before its state is in the table: only the handle's end removes that
        with self._lock:
            self.states[rref] = state
        return handle

    def create_remote(self, owner: int, is_serial: bool = False) -> tuple[Any, ReferenceShare]:
        """Begins a `remote()`; returns the reference, and the share that the call must name for its result.

        The caller must report the outcome with `on_created` or `on_creation_failed`, even if the call is not sent.

        Raises:
            OwnerLost: the owner was declared dead.
        """
        node = self._node(owner, None)
        rref, fork = self._new_id(), self._new_id()
        if self._is_closed:
            raise NotInitialized
        begin = partial(self.protocol.create_remote, rref, fork, node)
        handle = self._feed_new(begin, rref, fork, node, self._name(node))
        if handle.state.error is not None:
            raise copied(handle.state.error)
        handle.state.is_serial = is_serial
        return self.wrap(handle), ReferenceShare(rref, fork)

    def on_created(self, share: ReferenceShare) -> None:
        self._feed(partial(self.protocol.created, share.fork))

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        """Handles a failed `remote()`; uses of the reference raise the error."""
        with self._lock:
            state = self.states.get(share.fork)
            waiters = [] if state is None else self._set_error(state, creation_error(exc, state.owner_name))
        for waiter in waiters:
            waiter()
        self._feed(partial(self.protocol.creation_failed, *share))

    # ------------------------------------------------------------ remote() at the owner

    def accept_creation(self, share: ReferenceShare, creator: int, incarnation: int | None = None) -> None:
        """Accepts an arrived `remote()`. Its outcome must go to `set_value` or `set_error`.

        Raises:
            LeaseExpired, RRefError: do not run the call: its creator has abandoned it, or was declared dead.
        """
        if self._is_closed:
            raise RRefError(GONE)
        rref, fork = share
        node = self._node(creator, incarnation)

        def accept() -> Reason | None:
            self.values.setdefault(rref, quiet_future())
            refused = self.protocol.creation_accepted(rref, fork, node)
            self._keep_if_known(rref)
            return refused

        if (refused := self._feed(accept)) is not None:
            raise self._error(refused, f"remote() of {rref}", self.me)

    def set_value(self, rref: RRefId, value: object) -> None:
        """Sets the value and runs the callbacks that wait for it, so do not call this on the I/O loop."""
        if (owned := self.values.get(rref)) is not None:  # None after `close`
            owned._complete(value)
        self._feed(partial(self.protocol.creation_finished, rref))

    def set_error(self, rref: RRefId, exc: Exception) -> None:
        if (owned := self.values.get(rref)) is not None:
            owned._fail(copied(exc))
        self._feed(partial(self.protocol.creation_finished, rref))

    def value_there(self, share: ReferenceShare, requester: int, incarnation: int) -> Future[Any] | None:
        """A faster `when_there` for a value that is available: returns its future, or None."""
        check_not_forked()
        with self._lock:
            if self._is_closed or not self.protocol.owners.serves_at_once(*share, ProcessId(requester, incarnation)):
                return None
            future = self.values[share.rref]
        return future if future.done() else None

    def when_there(
        self, share: ReferenceShare, then: WhenThere, requester: int, incarnation: int | None = None
    ) -> None:
        """Calls `then` once for a user's fetch, which may arrive before the `remote()`.

        It runs at once, or on the thread that makes the value, with a done future of the value or the error. The future
        is shared, so raise only a `copied` of its error.
        """
        if self._is_closed:
            then(failed_future(RRefError(GONE)))
            return
        sender = self._node(requester, incarnation)

        def fetch() -> None:
            self.fetches.setdefault((share, sender), []).append(then)
            self.protocol.fetch_arrived(*share, sender)

        self._feed(fetch)

    # ------------------------------------------------------------ references in messages

    def share(self, rref: Any, to: int, incarnation: int | None = None) -> value_pb2.RRefFork:
        """Makes a fork for a message to a worker. Report any failure to deliver it to `share_failed`.

        Args:
            incarnation: of the receiving process if the session is known; None for the process that has the id now.

        Raises:
            RRefError: the reference is unusable: deleted, its owner lost, or its creation failed.
        """
        state = self.check_sharable(rref)
        child = self._new_id()
        if not state.confirmed:  # the receiver's request must not reach the owner before a queued creation
            self._flush(state.owner.worker)
        receiver = self._node(to, incarnation)

        def count() -> None:
            if state.owned is not None:
                self.values.setdefault(state.rref, state.owned)
            else:
                state.check(FORK_AFTER_DELETION)  # if it failed meanwhile, the protocol has dropped it
            self.protocol.share(state.rref, state.id, child, receiver)

        self._feed(count)
        return value_pb2.RRefFork(
            rref=id_to_pb(state.rref),
            fork=id_to_pb(child),
            parent=None if state.owned is not None else id_to_pb(state.id),
            owner=state.owner.worker,
            owner_incarnation=state.owner.incarnation,
            owner_name=state.owner_name,
            is_serial=state.is_serial,
        )

    def check_sharable(self, rref: Any) -> HandleState:
        """Raises `RRefError` if the reference cannot be shared."""
        state: HandleState = rref._handle.state
        state.check(FORK_AFTER_DELETION)
        if self._is_closed:
            raise RRefError(FORK_AFTER_DELETION)
        if rref._calls.me != self.me:
            raise RRefError(
                f"worker {self.my_name!r} cannot share {rref!r}, which belongs to worker {rref._calls.my_name!r} of "
                "this process; make the call as that worker"
            )
        return state

    def receive(self, fork: value_pb2.RRefFork, sender: int, incarnation: int | None = None) -> Handle:
        """Makes a handle for a fork that arrived in a message. Cheap; runs on the I/O loop.

        Raises:
            ProtocolViolation: the fork is already here; accepting it twice would drop it too early.
        """
        rref, id = id_from_pb(fork.rref), id_from_pb(fork.fork)
        if id in self.states:
            raise ProtocolViolation(f"share {id} of {rref} arrived, but this worker already has it")
        owner = ProcessId(fork.owner, fork.owner_incarnation)
        parent = id_from_pb(fork.parent) if fork.HasField("parent") else None
        arrive = partial(self.protocol.received, rref, id, parent, owner, self._node(sender, incarnation))
        handle = self._feed_new(arrive, rref, id, owner, fork.owner_name)
        handle.state.is_serial = fork.is_serial
        return handle

    def confirmation(self, handles: Iterable[Handle]) -> Future[None] | None:
        """Returns a future that is done when the owners have settled these forks; None if they already have."""
        done: Future[None] = Future()
        num_left = 0

        def settled() -> None:
            nonlocal num_left
            with self._lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                done._complete(None)

        with self._lock:
            for state in (handle.state for handle in handles):
                if not state.confirmed and state.error is None:
                    state.waiters.append(settled)
                    num_left += 1
            return done if num_left else None

    def share_failed(self, fork: value_pb2.RRefFork) -> None:
        """Handles a message with this fork that is or may be lost."""
        self._feed(partial(self.protocol.share_failed, id_from_pb(fork.rref), id_from_pb(fork.fork)))

    def connection_broken(self, worker_id: int, on_the_way: Iterable[value_pb2.RRefFork] = ()) -> None:
        """Handles possibly lost messages to a worker; messages with the forks in `on_the_way` are still being sent."""
        children = frozenset(id_from_pb(fork.fork) for fork in on_the_way)
        self._feed(partial(self.protocol.connection_broken, self._node(worker_id, None), children))

    def on_message(self, sender: int, incarnation: int, message: rref_pb2.RRefMessage) -> None:
        node = ProcessId(sender, incarnation)
        arrived = decode_messages(message, self.protocol.owners.counts)
        for at in range(0, len(arrived), MOST_AT_ONCE):
            self._feed(partial(self._arrive, node, arrived[at : at + MOST_AT_ONCE]))

    def _arrive(self, sender: ProcessId, messages: Sequence[Message]) -> None:
        for message in messages:
            self.protocol.message_arrived(sender, message)

    # ------------------------------------------------------------ loss and return of workers (I/O loop)

    def on_lost(self, worker: Identity, exc: WorkerLost) -> None:
        """Handles a worker declared dead: its values are gone."""
        self._lose(worker.process, exc)
        for stranger in self._take_strangers(worker.id):  # any of them may be this process
            self._lose(stranger, exc)
            self.forget(stranger)

    def on_replaced(self, worker: Identity) -> None:
        """Handles a worker, perhaps never connected, that another process has replaced."""
        self.on_lost(worker, WorkerLost(worker.name, "a connection", 0.0, REPLACED))

    def on_lease_ended(self, worker: Identity) -> None:
        """Drops the references of a worker that was silent for the length of a lease."""
        self._feed(partial(self.protocol.lease_ended, worker.process))

    def on_found(self, worker: Identity) -> None:
        """Handles a connected worker. If it was declared dead, its new values can be referenced again."""
        node = worker.process
        with self._lock:
            self.losses.pop(node, None)
        self._take_strangers(worker.id)
        self._feed(partial(self.protocol.holder_found, node))

    def forget(self, node: ProcessId) -> None:
        """Drops all state of a process that was never a worker, since peers may invent any number of processes."""
        with self._lock:
            self.losses.pop(node, None)
            self.protocol.forget(node)

    def is_lost(self, worker_id: int) -> bool:
        return self._node(worker_id, None) in self.protocol.lost

    def _lose(self, node: ProcessId, exc: WorkerLost) -> None:
        with self._lock:
            self.losses.setdefault(node, exc)
        self._feed(partial(self.protocol.holder_lost, node))

    def _take_strangers(self, worker_id: int) -> Iterable[ProcessId]:
        """Removes and returns the processes of an unknown worker that messages were sent to."""
        with self._lock:
            return self._strangers.pop(worker_id, ())

    # ------------------------------------------------------------ use of references

    def owner_of(self, state: HandleState) -> int:
        """Returns the owner's id; raises `OwnerLost` if another process has it now."""
        if self._is_replaced(state.owner):
            self._lose(state.owner, replaced(state.owner_name))
            state.check("")
        return state.owner.worker

    def fetch_error(self, state: HandleState, exc: WorkerLost) -> WorkerLost:
        """Turns a lost connection to the owner into `OwnerLost`, but keeps a `WorkerLost` that is the value's error."""
        if exc.worker != state.owner_name:
            return exc
        return owner_lost(exc, f"to_here() of {state.rref}")

    # ------------------------------------------------------------ drops, and the end

    def drain(self) -> None:
        """Drops the collected handles. Called often, on any thread: by a timer, and before messages are sent."""
        self.protocol.owners.now = time.monotonic()
        while ended := self._take_dropped():
            with self._lock:
                states = [self.states.pop(handle, None) for _, handle in ended]
            self._feed(partial(self._drop, ended))
            del states  # may destroy values, which runs user code: not under the lock

    def _drop(self, ended: Sequence[tuple[RRefId, UniqueId]]) -> None:
        for rref, handle in ended:
            self.protocol.handle_dropped(rref, handle)

    def _take_dropped(self) -> list[tuple[RRefId, UniqueId]]:
        dropped, ended = self.dropped, list[tuple[RRefId, UniqueId]]()
        with suppress(IndexError):  # another thread has taken the last one
            while dropped and len(ended) < MOST_AT_ONCE:
                ended.append(dropped.popleft())
        return ended

    def delete_all_user_and_unforked_owner_rrefs(self, timeout_s: float, others: bool = True) -> bool:
        """Drops every reference that this worker holds, and waits until the owners are notified; blocks.

        Args:
            others: also wait until the other workers, except lost ones, have dropped their references to this one's
                values.

        Returns:
            Whether all of that happened in time.
        """
        self.drain()

        def drop_all() -> None:
            for state in self.states.values():
                state.deleted = state.owned is None
            self.protocol.drop_all()

        self._feed(drop_all)
        return self._wait_for(lambda: self._is_idle(others), timeout_s)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = Deadline.after(timeout_s)
        with self._changed:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(condition, deadline.wait_s())
            finally:
                self._num_waiting -= 1

    def _is_idle(self, others: bool) -> bool:
        users = self.protocol.users
        return not users.forks and not users.parked and not (others and is_held(self.protocol))

    def close(self) -> None:
        """Makes all references to remote values unusable, after shutdown; local values stay readable. Idempotent."""
        with self._lock:
            self._is_closed = True
            for state in self.states.values():
                state.deleted = state.owned is None
            fetches = [then for waiting in self.fetches.values() for then in waiting]
            values = list(self.values.values())
            self.fetches.clear()
            self.values.clear()
        gone = RRefError(GONE)
        for then in fetches:
            then(failed_future(gone))
        for value in values:
            value._fail(copied(gone))

    def check_leaks(self) -> None:
        """Raises `RRefError` that names this worker's values still held by others at shutdown; blocks.

        First waits for the last releases, which may arrive shortly after the last work has ended.
        """
        self.drain()
        self._wait_for(lambda: not leaks(self.protocol), CLOSE_STEP_LIMIT_S)
        with self._lock:
            text = leaks(self.protocol)
        if text:
            raise RRefError(text)

    # ------------------------------------------------------------ views

    def debug_info(self) -> dict[str, str]:
        self.drain()
        with self._lock:
            return counts(self.protocol)

    def facts(self, now: float, most: int) -> tuple[list[ReferenceFacts], int]:
        """Lists the references that this worker owns and holds, at most `most` of each, and counts the rest."""
        protocol, values = self.protocol, self.values
        left_out = sum(max(0, len(table) - most) for table in (protocol.owners.entries, protocol.users.forks))

        def value_of(rref: RRefId) -> str:
            owned = values.get(rref)
            is_there = owned is not None and owned.done() and owned._error is None
            return type(owned._result).__qualname__ if owned is not None and is_there else ""

        return reference_facts(protocol, self._name, value_of, now, most), left_out

    def debug_rrefs(self) -> list[ReferenceFacts]:
        """Lists every reference that this worker owns or holds, with its holders."""
        self.drain()
        return self.facts(time.monotonic(), sys.maxsize)[0]

    # ------------------------------------------------------------ decisions

    def _feed_new(
        self, decide: Callable[[], object], rref: RRefId, id: UniqueId, owner: ProcessId, owner_name: str
    ) -> Handle:
        """Calls `_feed` for an event that makes a handle; its state and value are in the tables before the decision."""
        state = HandleState(rref, id, owner, owner_name, quiet_future() if owner == self.me else None)

        def prepare_and_decide() -> None:
            self.states[id] = state
            if state.owned is not None:
                state.owned = self.values.setdefault(rref, state.owned)
            decide()
            if state.owned is not None:
                self._keep_if_known(rref)

        handle = Handle(state, self.dropped)
        self._feed(prepare_and_decide)
        return handle

    def _feed(self, decide: Callable[[], T]) -> T | None:
        """Runs `decide` under the lock, and then its effects without the lock.

        Returns the result of `decide`; None after shutdown, when it is not called.
        """
        check_not_forked()  # in a forked child, the lock may never be released
        with self._lock:
            if self._is_closed:
                return None
            decided = decide()
            while self._to_myself:
                self.protocol.message_arrived(self.me, self._to_myself.pop(0))
            effects, self._effects = self._effects, []
            deleted, self._deleted = self._deleted, {}
            if self._num_waiting:
                self._changed.notify_all()
        for effect in effects:
            effect()
        for owner, messages in deleted.items():
            for at in range(0, len(messages), MOST_AT_ONCE):
                self._send_now(owner, messages[at : at + MOST_AT_ONCE])
        return decided

    def _keep_if_known(self, rref: RRefId) -> None:
        """Removes a value that was just added to the table, unless the protocol has an entry for it."""
        if rref not in self.protocol.owners.entries:
            self.release_value(rref)

    def _send_now(self, to: ProcessId, messages: Sequence[Message]) -> None:
        if not self._is_replaced(to):
            if not self._directory.incarnation_of(to.worker):
                with self._lock:
                    self._strangers.setdefault(to.worker, set()).add(to)
            self._send_control(to.worker, encode_messages(messages))
        elif to not in self.losses:
            self._lose(to, replaced(self._name(to)))
            if not self._directory.was_worker(to.worker, to.incarnation):  # a peer invented it
                self.forget(to)

    # ------------------------------------------------------------ actions of the protocol, under the lock

    def send(self, to: ProcessId, message: Message) -> None:
        if to == self.me:
            self._to_myself.append(message)
        elif message.kind is MessageKind.USER_DELETED:
            self._deleted.setdefault(to, []).append(message)
        else:
            self._effects.append(partial(self._send_now, to, (message,)))

    def settle_handle(self, handle: UniqueId, failed: Reason | None = None) -> None:
        state = self.states.get(handle)
        if state is None:
            return
        if failed is not None:
            self._effects += self._set_error(state, self._error(failed, str(state), state.owner))
        else:
            state.confirmed = True
            self._effects += state.take_waiters()

    def answer_fetch(self, rref: RRefId, fork: ForkId, sender: ProcessId, refused: Reason | None = None) -> None:
        if refused is None:
            future = self.values[rref]
        else:
            future = failed_future(self._error(refused, str(rref), self.me))
        for then in self.fetches.pop((ReferenceShare(rref, fork), sender), ()):
            self._effects.append(partial(future._when_done, then))

    def fail_value(self, rref: RRefId, reason: Reason) -> None:
        value = self.values.get(rref)
        if value is not None:
            self._effects.append(partial(value._fail, self._error(reason, str(rref), self.me)))

    def release_value(self, rref: RRefId) -> None:
        held: list[object] = [self.values.pop(rref, None)]  # destroyed without the lock: may run user code
        self._effects.append(partial(self._on_released, rref, held))

    # ------------------------------------------------------------ helpers

    def _set_error(self, state: HandleState, error: Exception) -> list[Callable[[], object]]:
        """Keeps the first error; returns the functions to call without the lock. [Note: kept errors]"""
        if state.error is None:
            state.error = copied(error)
        return state.take_waiters()

    def _error(self, reason: Reason, what: str, owner: ProcessId) -> Exception:
        if reason is Reason.OWNER_LOST and owner in self.losses:
            return owner_lost(self.losses[owner], f"use of {what}")
        return describe(reason, what, self._name(owner))

    def _node(self, worker_id: int, incarnation: int | None) -> ProcessId:
        return ProcessId(worker_id, self._directory.incarnation_of(worker_id) if incarnation is None else incarnation)

    def _name(self, node: ProcessId) -> str:
        return self._directory.name_of(node.worker)

    def _is_replaced(self, node: ProcessId) -> bool:
        return self._directory.incarnation_of(node.worker) not in (0, node.incarnation)

    def _new_id(self) -> UniqueId:
        return UniqueId(self.me.worker, new_number(next(self._numbers)), self.me.incarnation)
