"""What happens to connections and workers, published to the parts of the agent that need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

from rpcdist.errors import WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._peers.directory import MemberEvent
from rpcdist.rpc._peers.network import MessageSink, PeerSession

P = ParamSpec("P")


class Event(Generic[P]):
    """One kind of event, and who listens to it."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []

    def listen(self, listener: Callable[P, object]) -> None:
        """Has a function called at each event, after those that listen already."""
        self._listeners.append(listener)

    def publish(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the listeners, in the order in which they were added."""
        for listener in self._listeners:
            listener(*args, **kwargs)


class PeerEvents:
    """One per agent. Events are published on the I/O loop, so listeners must be short and run no user code.

    Attributes:
        opened: a worker has opened a session to this one.
        broken: a session has ended, whoever opened it, for this reason. What was sent on it may not have arrived, and
            what was asked on it will not be answered. The worker may be alive.
        lost: a worker is declared dead. It may come at any time after `broken`, or without it.
        lease_ended: nothing was heard of a worker for the length of a lease.
        replaced: another process has taken the place of this one.
        found: a worker that was declared lost lives: there is a connection with it again.
        member: a worker came or went, by what the coordinator says or this worker's own detector.
    """

    def __init__(self) -> None:
        self.opened: Event[[PeerSession]] = Event()
        self.broken: Event[[MessageSink, str]] = Event()
        self.lost: Event[[Identity, WorkerLost]] = Event()
        self.lease_ended: Event[[Identity]] = Event()
        self.replaced: Event[[Identity]] = Event()
        self.found: Event[[Identity]] = Event()
        self.member: Event[[MemberEvent]] = Event()
