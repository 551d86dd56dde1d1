"""The tables of one worker's remote references, and the doorway to the protocol, which decides what happens to them.

Threads: every method may be called on any thread. The lock is held while tables change, and never while messages are
handed to the agent, futures are completed or user objects die: those may come back here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from rpcdist._proto import rref_pb2
from rpcdist.errors import Cancelled, DeadlineExceeded, LeaseExpired, OwnerLost, RRefError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._rref import events
from rpcdist.rpc._rref.events import Reason, UserDeleted
from rpcdist.rpc._rref.handles import Dropped, Handle, HandleState, OwnerValue, failed_future
from rpcdist.rpc._rref.identifiers import Incarnation, ReferenceShare, RRefId, UniqueId
from rpcdist.rpc._rref.protobuf import encode_deletions, encode_message
from rpcdist.rpc._rref.protocol import RRefProtocol
from rpcdist.rpc._values.exceptions import copied, text_of
from rpcdist.rpc.future import Future
from rpcdist.transport.fork import check_not_forked


class RRefHost(Protocol):
    """The manager's agent: names of other workers, and a way to send them messages."""

    @property
    def me(self) -> Identity:
        """This worker."""

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        """Delivers at least once, unless the worker dies. Any thread, never blocks."""

    def flush(self, to: int) -> None:
        """Has what lingers on its way to a worker sent now. Any thread, never blocks."""

    def name_of(self, worker_id: int) -> str:
        """A worker's name, or a text with the id if it is unknown."""

    def incarnation_of(self, worker_id: int) -> int:
        """Of the process that has this id now; 0 if it is unknown."""

    def was_worker(self, worker_id: int, incarnation: int) -> bool:
        """Whether a process is a worker, or was one before another took its place."""


GONE = "RPC was shut down in this process, and its remote references with it"
FORK_AFTER_DELETION = "Cannot call fork an UserRRef after deletion."


def owner_lost(exc: WorkerLost, what: str) -> OwnerLost:
    """The loss of a worker, as an error for users of its values."""
    if isinstance(exc, OwnerLost):
        return exc
    error = OwnerLost(exc.worker, what, exc.last_seen_s, exc.reason)
    error.__cause__ = copied(exc)
    return error


def replaced(name: str) -> WorkerLost:
    """For a process that is gone, and was not declared dead."""
    return WorkerLost(name, "a remote reference", 0.0, "the process left, or another one took its place")


def describe(reason: Reason, what: str, owner: str) -> Exception:
    """The error for a reason that the protocol gives; `what` names the reference."""
    if reason is Reason.LEASE_EXPIRED:
        return LeaseExpired(
            f"{what}: its owner {owner!r} has not heard of this process for too long, and dropped its references. "
            "Create a new one, or ask a worker that holds it to send it again."
        )
    if reason is Reason.OWNER_LOST:
        return OwnerLost(owner, f"use of {what}", 0.0, "it is declared dead")
    if reason is Reason.CREATION_FAILED:
        return RRefError(
            f"RRef creation via rpc.remote() failed: the call never reached {owner!r}, so {what} has no value."
        )
    if reason is Reason.SHARE_LOST:
        return RRefError(f"{what} is unusable: its sender gave up the message that carried it. Ask for it again.")
    if reason is Reason.NOT_HELD:
        return RRefError(
            f"{what} is refused by its owner {owner!r}: the worker that asked does not hold the share that it named, "
            "which was released, or is another worker's. Use a reference that was sent to this worker."
        )
    return RRefError(
        f"{what} is unknown to its owner {owner!r}: the worker that shared it died before the owner knew of the share, "
        "or all references to it were dropped."
    )


def creation_error(exc: BaseException, owner: str) -> Exception:
    """The error of every use of the reference after its `remote()` failed with `exc`.

    An error that the owner reported is raised as it is. If the call itself failed, it is unknown whether the value
    exists.
    """
    kind = type(exc)  # a user's exception may break `isinstance`
    if issubclass(kind, WorkerLost):
        assert isinstance(exc, WorkerLost)
        error: Exception = OwnerLost(exc.worker, "RRef creation via rpc.remote()", exc.last_seen_s, exc.reason)
    elif issubclass(kind, DeadlineExceeded):
        error = RRefError(
            "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
            f"{owner!r} does not exist: {text_of(exc)}"
        )
    elif issubclass(kind, Cancelled) or not issubclass(kind, Exception):
        error = RRefError(f"RRef creation via rpc.remote() on {owner!r} failed: {text_of(exc)}")
    else:
        return cast(Exception, exc)
    error.__cause__ = copied(exc)
    return error


WhenThere = Callable[[Future[Any]], object]


class RRefTables:
    """Handles, values, waiting fetches, and what the protocol knows of them.

    Attributes:
        lock: guards everything here.
        changed: notified of each change while `num_waiting` is not 0.
        protocol: decides; only `feed` and `feed_deletions` give it events.
        states: of the handles of this worker, by fork.
        values: that this worker owns.
        fetches: by share, and the worker that names it: the functions to call when the value is there.
        losses: why other workers were declared dead.
        dropped: the handles that were collected, and not noticed yet.
        closed: after shutdown; nothing is fed any more.

    Args:
        on_released: called when no reference to a value of this worker is left, with a list of which the value is the
            only item: the value ends with the list, or when the list is emptied; any thread.
    """

    def __init__(self, me: Incarnation, host: RRefHost, on_released: Callable[[RRefId, list[object]], object]) -> None:
        self._host = host
        self._on_released = on_released
        self.me = me
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.num_waiting = 0  # threads
        self.protocol = RRefProtocol(me)
        self.states: dict[UniqueId, HandleState] = {}
        self.values: dict[RRefId, OwnerValue] = {}
        self.fetches: dict[tuple[ReferenceShare, Incarnation], list[WhenThere]] = {}
        self.losses: dict[Incarnation, WorkerLost] = {}  # one for each process that died during ours
        self.strangers: dict[
            int, set[Incarnation]
        ] = {}  # processes of unknown workers, by id, until one is found or lost
        self.dropped: Dropped = deque()
        self.closed = False

    # ------------------------------------------------------------ other workers

    def node(self, worker_id: int, incarnation: int | None) -> Incarnation:
        """A process of a worker; None for the one that has the id now."""
        return Incarnation(worker_id, self._host.incarnation_of(worker_id) if incarnation is None else incarnation)

    def name(self, node: Incarnation) -> str:
        """A worker's name, or a text with its id."""
        return self._host.name_of(node.worker)

    def is_replaced(self, node: Incarnation) -> bool:
        """Whether another process has its id now."""
        return self._host.incarnation_of(node.worker) not in (0, node.incarnation)

    def lose(self, node: Incarnation, exc: WorkerLost) -> None:
        """A process is declared dead, because of `exc`."""
        with self.lock:
            self.losses.setdefault(node, exc)
        self.feed(events.HolderLost(node))

    def take_strangers(self, worker_id: int) -> Iterable[Incarnation]:
        """The processes of an unknown worker that messages were sent to, each once."""
        with self.lock:
            return self.strangers.pop(worker_id, ())

    def forget(self, node: Incarnation) -> None:
        """Keeps nothing of a process that was never a worker: peers may make up any number of them."""
        with self.lock:
            self.losses.pop(node, None)
            self.protocol.forget(node)

    # ------------------------------------------------------------ the doorway

    def feed_new(
        self, event: events.RRefEvent, rref: RRefId, id: UniqueId, owner: Incarnation, owner_name: str
    ) -> Handle:
        """Feeds an event that makes a handle. Handle and value are in the tables before the protocol speaks of them."""
        state = HandleState(rref, id, owner, owner_name, OwnerValue(rref) if owner == self.me else None)

        def prepare() -> None:
            self.states[id] = state
            if state.value is not None:
                state.value = self.values.setdefault(rref, state.value)

        handle = Handle(state, self.dropped)
        self.feed(event, prepare, owned=rref if owner == self.me else None)
        return handle

    def add_handle(
        self, rref: RRefId, id: UniqueId, owner: Incarnation, owner_name: str, value: OwnerValue | None
    ) -> Handle:
        """A handle that the protocol need not know of: its value is known to no other worker."""
        state = HandleState(rref, id, owner, owner_name, value)
        handle = Handle(state, self.dropped)  # before its state is in the table, which only its end takes out
        with self.lock:
            self.states[id] = state
        return handle

    def feed(
        self, event: events.RRefEvent, prepare: Callable[[], object] | None = None, owned: RRefId | None = None
    ) -> Sequence[events.RRefAction]:
        """The doorway: the protocol decides under the lock, its actions are carried out without it.

        Args:
            event: what happened.
            prepare: changes the tables in the same step, before.
            owned: a value that `prepare` put into the table; it stays only if the protocol has an entry for it.
        """
        check_not_forked()  # the lock may be held for ever there
        effects: list[Callable[[], object]] = []
        with self.lock:
            if prepare is not None:
                prepare()
            if self.closed:
                return ()
            todo = self.protocol.handle(event)
            for action in todo:
                _ACTIONS[type(action)](self, action, effects)
            if owned is not None and owned not in self.protocol.owners.entries:
                self._release_value(events.ReleaseValue(owned), effects)
            if self.num_waiting:
                self.changed.notify_all()
        for effect in effects:
            effect()
        return todo

    def feed_deletions(self, ended: Sequence[events.HandleDropped | events.MessageArrived]) -> None:
        """`feed` for several events that end references: those of this worker, or those that users hold to its values.

        The protocol answers those with nothing but deletions, of which an owner gets one message, and values that go.
        """
        check_not_forked()
        effects: list[Callable[[], object]] = []
        deleted: dict[Incarnation, list[UserDeleted]] = {}
        with self.lock:
            if self.closed:
                return
            for event in ended:
                for action in self.protocol.handle(event):
                    if isinstance(action, events.SendControl) and isinstance(action.message, UserDeleted):
                        deleted.setdefault(action.to, []).append(action.message)
                    else:
                        _ACTIONS[type(action)](self, action, effects)
            if self.num_waiting:
                self.changed.notify_all()
        for effect in effects:
            effect()
        for owner, messages in deleted.items():
            self._send_now(owner, encode_deletions(messages))

    def _send(self, action: events.SendControl, effects: list[Callable[[], object]]) -> None:
        effects.append(lambda: self._send_now(action.to, encode_message(action.message)))

    def _send_now(self, to: Incarnation, message: rref_pb2.RRefMessage) -> None:
        if not self.is_replaced(to):
            if not self._host.incarnation_of(to.worker):
                with self.lock:
                    self.strangers.setdefault(to.worker, set()).add(to)
            self._host.send_control(to.worker, message)
        elif to not in self.losses:
            self.lose(to, replaced(self.name(to)))
            if not self._host.was_worker(to.worker, to.incarnation):  # a peer made it up
                self.forget(to)

    def _confirm(self, action: events.Confirm, effects: list[Callable[[], object]]) -> None:
        state = self.states.get(action.handle)
        if state is not None:
            state.confirmed = True
            effects.extend(state.take_waiters())

    def _fail(self, action: events.Fail, effects: list[Callable[[], object]]) -> None:
        state = self.states.get(action.handle)
        if state is not None:
            effects.extend(self.set_error(state, self.error(action.reason, str(state), state.owner)))

    def set_error(self, state: HandleState, error: Exception) -> list[Callable[[], object]]:
        """The first error stays; returns the functions to call without the lock. [Note: kept errors]"""
        if state.error is None:
            state.error = copied(error)
        return state.take_waiters()

    def _fail_value(self, action: events.FailValue, effects: list[Callable[[], object]]) -> None:
        value = self.values.get(action.rref)
        if value is not None:
            error = self.error(action.reason, str(action.rref), self.me)
            effects.append(lambda: value.fail(error))

    def _serve(self, action: events.Serve, effects: list[Callable[[], object]]) -> None:
        value = self.values[action.rref]
        for then in self._take_fetches(action):
            effects.append(partial(value.future._when_done, then))

    def _refuse_fetch(self, action: events.RefuseFetch, effects: list[Callable[[], object]]) -> None:
        error = self.error(action.reason, str(action.rref), self.me)
        for then in self._take_fetches(action):
            effects.append(partial(then, failed_future(error)))

    def _take_fetches(self, action: events.Serve | events.RefuseFetch) -> Sequence[WhenThere]:
        return self.fetches.pop((ReferenceShare(action.rref, action.fork), action.sender), ())

    def _refuse_creation(self, action: events.RefuseCreation, effects: list[Callable[[], object]]) -> None:
        """`accept_creation` looks for it."""

    def _release_value(self, action: events.ReleaseValue, effects: list[Callable[[], object]]) -> None:
        value = self.values.pop(action.rref, None)
        held: list[object] = [value]  # dies after the lock: user code may run
        effects.append(partial(self._on_released, action.rref, held))

    def error(self, reason: Reason, what: str, owner: Incarnation) -> Exception:
        """The error that a user sees for a reason that the protocol gave; `what` names the reference."""
        if reason is Reason.OWNER_LOST and owner in self.losses:
            return owner_lost(self.losses[owner], f"use of {what}")
        return describe(reason, what, self.name(owner))


_ACTIONS: dict[type[events.RRefAction], Callable[[RRefTables, Any, list[Callable[[], object]]], None]] = {
    events.SendControl: RRefTables._send,
    events.Confirm: RRefTables._confirm,
    events.Fail: RRefTables._fail,
    events.FailValue: RRefTables._fail_value,
    events.Serve: RRefTables._serve,
    events.RefuseFetch: RRefTables._refuse_fetch,
    events.RefuseCreation: RRefTables._refuse_creation,
    events.ReleaseValue: RRefTables._release_value,
}
