"""The tables of one worker's remote references, and the doorway to the protocol, which decides what happens to them.

Threads: every method may be called on any thread. The lock is held while tables change, and never while messages are
handed to the agent, futures are completed or user objects die: those may come back here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rpcdist._proto import rref_pb2
from rpcdist.errors import WorkerLost
from rpcdist.rpc._rref import actions, events
from rpcdist.rpc._rref.handles import Dropped, Handle, HandleState, OwnerValue, failed_future
from rpcdist.rpc._rref.host import RRefHost
from rpcdist.rpc._rref.identifiers import Incarnation, ReferenceShare, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Reason, UserDeleted
from rpcdist.rpc._rref.problems import Losses, replaced
from rpcdist.rpc._rref.protobuf import encode_deletions, encode_message
from rpcdist.rpc._rref.protocol import RRefProtocol
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future
from rpcdist.transport.fork import check_not_forked

WhenThere = Callable[[Future[Any]], object]


class RRefTables:
    """Handles, values, waiting fetches, and what the protocol knows of them.

    Attributes:
        lock: guards everything here.
        changed: notified of each change while `num_waiting` is not 0.
        protocol: decides; to be fed by `feed` alone.
        states: of the handles of this worker, by fork.
        values: that this worker owns.
        fetches: by share, and who names it: who is to be called when the value is there.
        losses: why other workers were declared dead.
        dropped: the handles that were collected, and not noticed yet.
        closed: after shutdown; nothing is fed any more.

    Args:
        me: this worker.
        host: knows the other workers, and sends messages to them.
        on_released: called when nobody refers to a value of this worker any more, with a list of which the value is
            the only item: the value ends when the list does, or where it is emptied; any thread.
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
        self.losses = Losses()
        self.dropped: Dropped = deque()
        self.closed = False

    def __repr__(self) -> str:
        return f"<RRefTables {self.protocol!r}>"

    # ------------------------------------------------------------ who others are

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
            self.losses.note(node, exc)
        self.feed(events.HolderLost(node))

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
        """A handle that the protocol need not know of: of a value that nobody else has heard of."""
        state = HandleState(rref, id, owner, owner_name, value)
        handle = Handle(state, self.dropped)  # before its state is in the table, which only its end takes out
        with self.lock:
            self.states[id] = state
        return handle

    def feed(
        self, event: events.RRefEvent, prepare: Callable[[], object] | None = None, owned: RRefId | None = None
    ) -> Sequence[actions.RRefAction]:
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
                self._release_value(actions.ReleaseValue(owned), effects)
            if self.num_waiting:
                self.changed.notify_all()
        for effect in effects:
            effect()
        return todo

    def feed_deletions(self, events: Sequence[events.HandleDropped | events.MessageArrived]) -> None:
        """`feed` for several events that end references: as a user, or, by what users tell, as the owner.

        The protocol answers those with nothing but deletions, of which an owner gets one message, and values that go.
        """
        check_not_forked()
        effects: list[Callable[[], object]] = []
        deleted: dict[Incarnation, list[UserDeleted]] = {}
        with self.lock:
            if self.closed:
                return
            for event in events:
                for action in self.protocol.handle(event):
                    if isinstance(action, actions.SendControl) and isinstance(action.message, UserDeleted):
                        deleted.setdefault(action.to, []).append(action.message)
                    else:
                        _ACTIONS[type(action)](self, action, effects)
            if self.num_waiting:
                self.changed.notify_all()
        for effect in effects:
            effect()
        for owner, messages in deleted.items():
            self._send_now(owner, encode_deletions(messages))

    def _send(self, action: actions.SendControl, effects: list[Callable[[], object]]) -> None:
        effects.append(lambda: self._send_now(action.to, encode_message(action.message)))

    def _send_now(self, to: Incarnation, message: rref_pb2.RRefMessage) -> None:
        if not self.is_replaced(to):
            self._host.send_control(to.worker, message)
        elif to not in self.losses:
            self.lose(to, replaced(self.name(to)))

    def _confirm(self, action: actions.Confirm, effects: list[Callable[[], object]]) -> None:
        state = self.states.get(action.handle)
        if state is not None:
            state.confirmed = True
            effects.extend(state.take_waiters())

    def _fail(self, action: actions.Fail, effects: list[Callable[[], object]]) -> None:
        state = self.states.get(action.handle)
        if state is not None:
            effects.extend(self.set_error(state, self.error(action.reason, str(state), state.owner)))

    def set_error(self, state: HandleState, error: Exception) -> list[Callable[[], object]]:
        """The first error stays; returns whom to call without the lock. [Note: kept errors]"""
        if state.error is None:
            state.error = copied(error)
        return state.take_waiters()

    def _fail_value(self, action: actions.FailValue, effects: list[Callable[[], object]]) -> None:
        value = self.values.get(action.rref)
        if value is not None:
            error = self.error(action.reason, str(action.rref), self.me)
            effects.append(lambda: value.fail(error))

    def _serve(self, action: actions.Serve, effects: list[Callable[[], object]]) -> None:
        value = self.values[action.rref]
        for then in self._take_fetches(action):
            effects.append(partial(value.future._when_done, then))

    def _refuse_fetch(self, action: actions.RefuseFetch, effects: list[Callable[[], object]]) -> None:
        error = self.error(action.reason, str(action.rref), self.me)
        for then in self._take_fetches(action):
            effects.append(partial(then, failed_future(error)))

    def _take_fetches(self, action: actions.Serve | actions.RefuseFetch) -> Sequence[WhenThere]:
        return self.fetches.pop((ReferenceShare(action.rref, action.fork), action.sender), ())

    def _refuse_creation(self, action: actions.RefuseCreation, effects: list[Callable[[], object]]) -> None:
        """`accept_creation` looks for it."""

    def _release_value(self, action: actions.ReleaseValue, effects: list[Callable[[], object]]) -> None:
        value = self.values.pop(action.rref, None)
        held: list[object] = [value]  # dies after the lock: user code may run
        effects.append(partial(self._on_released, action.rref, held))

    def error(self, reason: Reason, what: str, owner: Incarnation) -> Exception:
        """What a user sees of a reason that the protocol gave; `what` names the reference."""
        return self.losses.error(reason, what, owner, self.name(owner))


_ACTIONS: dict[type[actions.RRefAction], Callable[[RRefTables, Any, list[Callable[[], object]]], None]] = {
    actions.SendControl: RRefTables._send,
    actions.Confirm: RRefTables._confirm,
    actions.Fail: RRefTables._fail,
    actions.FailValue: RRefTables._fail_value,
    actions.Serve: RRefTables._serve,
    actions.RefuseFetch: RRefTables._refuse_fetch,
    actions.RefuseCreation: RRefTables._refuse_creation,
    actions.ReleaseValue: RRefTables._release_value,
}
