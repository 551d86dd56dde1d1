"""`GroupWatch`: a group's watch and its sockets, from the first moment of the group to its last; and `StateKeeper`.

The latter is the common part of a group's engine and of its device's watchdog: events go to the group's state.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import connect_watch, exchange_addresses
from rpcdist.collectives._group.group_failure import GroupFailure, WatchListener
from rpcdist.collectives._group.local_process import bind_host
from rpcdist.collectives._group.state import Action, GroupState
from rpcdist.collectives._group.watch import Watch
from rpcdist.deadline import Deadline
from rpcdist.time_limits import THREAD_GRACE_S


class StateKeeper(ABC):
    """Owns the state of a group; any thread may bring it events (it is a `WatchListener`).

    Attributes:
        state: read by others, changed by the keeper only.
        abort_hooks: called, each once, when the group fails and before its operations do, on any thread.
    """

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.abort_hooks: dict[int, Callable[[], object]] = {}

    @abstractmethod
    def _handle(self, event: Callable[[], Sequence[Action]]) -> Sequence[Action]:
        """Calls an event of the state, under the lock, and carries out the actions, without it; returns them."""

    def opened(self) -> None:
        """All ranks are connected: acts on what was heard while the group was made."""
        self._handle(self.state.open)

    def fail(self, failure: GroupFailure) -> bool:
        """Ends the group on this rank only: another rank said so. Returns False when it had failed before."""
        return bool(self._handle(partial(self.state.fail, failure, heard=True)))

    def fail_everywhere(self, failure: GroupFailure) -> GroupFailure:
        """Makes it the group's failure, unless there is one, tells the other ranks, and returns the one that counts."""
        self._handle(partial(self.state.fail, failure, heard=False))
        return self.state.failure or failure

    def rank_left(self, rank: int, last_sequence: int) -> None:
        """A rank left the group in order, after taking part in all operations up to `last_sequence`."""
        self._handle(partial(self.state.leave, rank, last_sequence))

    def where(self) -> tuple[int, str]:
        """The newest operation that this rank has called, and what it does now, in words."""
        return self.state.where(time.monotonic())


class GroupWatch(WatchListener):
    """Connects the watch of a group before anything else of it, so that a rank that dies meanwhile is noticed.

    It keeps in the group's state what the watch hears, until there is an engine to act on it.

    Args:
        context: describes the group, which has more than one rank.
        state: the state of the group, which its engine goes on with.
        deadline: for the other ranks to come.
        unix_sockets: whether other ranks may reach this one through Unix sockets.

    Attributes:
        bootstrap: how the ranks reach one another.
        reached_rank_0: whether this rank, another one than rank 0, has reached the Unix socket of that.
        hub: connects to the other ranks.
        reporter: tells the other ranks what this one found.

    Raises (constructor):
        RendezvousError: some ranks did not come; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    def __init__(self, context: GroupContext, state: GroupState, deadline: Deadline, unix_sockets: bool = True) -> None:
        self._state = state
        self._check = context.check  # raises when a member cannot come any more; None where nobody would know
        self._lock = threading.Lock()
        self._group: StateKeeper | None = None
        self._sockets = context.process.acquire_sockets(bind_host(context.store))
        self.hub = self._sockets.hub
        try:
            self.bootstrap = exchange_addresses(context, self.hub, deadline, unix_sockets)
            sockets = connect_watch(context, self.hub, self.bootstrap, deadline)
            self.reached_rank_0 = context.rank != 0 and sockets[0].family == socket.AF_UNIX
            self.reporter = Watch(self._sockets.node, context.rank, context.ranks, context.name, self)
            self.reporter.start(sockets, deadline.remaining_s() + THREAD_GRACE_S)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raises when the group cannot be made any more."""
        if self._check is not None:
            self._check()
        failure = self._state.setup_failure()
        if failure is not None:
            raise failure.error(f"making group {self._state.group!r}")

    def hand_over(self, group: StateKeeper) -> None:
        """The group is made, and acts on what the watch heard and hears."""
        with self._lock:
            self._group = group
        group.opened()

    def leave(self, sequence: int) -> None:
        """Tells the other ranks that this one leaves after that many operations; bounded; idempotent."""
        self.reporter.close(sequence)

    def release(self) -> None:
        """Gives the sockets back, once nothing of the group uses them; call it once. Blocks, bounded."""
        self._sockets.release()

    def give_up(self) -> None:
        """The group cannot be made: tells the other ranks, and gives the sockets back."""
        self.leave(0)
        self.release()

    # ------------------------------------------------------------ WatchListener

    def fail(self, failure: GroupFailure) -> None:
        with self._lock:  # so that nothing is written to the state here once the group has it
            if self._group is None:
                self._state.fail(failure, heard=True)
                return
        self._group.fail(failure)

    def rank_left(self, rank: int, last_sequence: int) -> None:
        with self._lock:
            if self._group is None:
                self._state.leave(rank, last_sequence)
                return
        self._group.rank_left(rank, last_sequence)

    def where(self) -> tuple[int, str]:
        return self._state.where(0.0) if self._group is None else self._group.where()
