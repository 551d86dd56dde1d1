"""News of workers that join and leave: the coordinator sends it to each member, and the members confirm it.

The messages are control messages: numbered, sent again over a new connection, applied once, in order. `MembershipWatch`
calls the user's functions when a worker joins, leaves or is lost, and logs a line about each.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rpcdist._proto import membership_pb2 as pb
from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.rpc._membership.roster_messages import news_message, news_of
from rpcdist.rpc._membership.roster_service import NEWS_AT_ONCE, MembershipService
from rpcdist.rpc._peers.directory import Directory, MemberEvent
from rpcdist.rpc._peers.network import AnySession, Lifetime
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.exceptions import traceback_of
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import NEWS_PAUSE_S

logger = logging.getLogger(__name__)

GOODBYE: Final = rpc_pb2.Message(membership=pb.MembershipMessage())
"""The last message of a worker that leaves, to the workers that are connected to it. In a large world, the news of rank
0 comes later, and they would declare the worker lost when their connections end."""


@dataclass(eq=False, repr=False)
class MembershipNews:
    """Both ends of the news; one per agent, on the I/O loop.

    Args:
        service: the service, if it is in this process, which then sends the news to the others.
        watch: connects to a worker, so that its death is noticed.
        is_coordinator: whether a worker is the coordinator whose list has this worker.
    """

    _directory: Directory
    _service: MembershipService | None
    _send: Callable[[int, pb.MembershipMessage], None]
    _watch: Callable[[int], object]
    _lifetime: Lifetime
    _is_coordinator: Callable[[Identity], bool]
    _sent_at: float = float("-inf")
    _timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Starts sending news to the others, and watching them, at the coordinator.

        Workers may have joined since it took its own place. It knows them when this has returned.
        """
        if self._service is not None:
            self._service.announce_to(self._on_change, self._directory.me)
            self._on_change(is_urgent=True)
            for member in self._directory.living():
                if member.identity != self._directory.me:
                    self._watch(member.identity.id)

    def _on_change(self, is_urgent: bool) -> None:
        """Called when the list has changed: updates this worker immediately, and sends news to the others soon."""
        me, service = self._directory.me, self._service
        assert service is not None  # it calls this
        news = service.table.since(self._directory.version)
        self._directory.update(news)
        service.note_known(me, news.version)
        for member in news.members:
            if member.identity != me:
                self._watch(member.identity.id)
        self._send_soon(is_urgent)

    def _send_soon(self, is_urgent: bool) -> None:
        """Sends news at once; in a large world after a pause, in which further changes are merged."""
        assert self._service is not None
        num_members = len(self._service.table)
        pause_s = 0.0 if is_urgent else NEWS_PAUSE_S * max(num_members - NEWS_AT_ONCE, 0) / 1000
        wait_s = self._sent_at + pause_s - time.monotonic()
        if wait_s <= 0:
            self._send_all()
        elif self._timer is None and not self._lifetime.is_closed:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send_all)

    def _send_all(self) -> None:
        self.close()
        service = self._service
        if service is None or self._lifetime.is_closed:
            return
        self._sent_at = time.monotonic()
        messages: dict[int, pb.MembershipMessage] = {}  # most members know the same version
        for identity, known in service.table.due():
            if (message := messages.get(known)) is None:
                message = messages[known] = news_message(service.table.since(known))
            self._send(identity.id, message)

    def on_message(self, sender: Identity, message: pb.MembershipMessage, buffers: Sequence[ReceiveBuffer]) -> None:
        service = self._service
        if not message.version:  # `GOODBYE`
            if service is not None:
                service.left(sender)
            else:
                self._directory.on_left(sender)
        elif service is not None:
            service.note_known(sender, message.version)
            if message.version < service.table.version:
                self._send_soon(is_urgent=len(service.table) <= NEWS_AT_ONCE)
        elif self._is_coordinator(sender):
            news = news_of(message)
            self._directory.update(news)
            self._send(self._directory.coordinator, pb.MembershipMessage(version=self._directory.version))
            for identity, reason in news.departures.items():
                # The references that it held here are dropped when this worker's own detector agrees.
                if reason and self._directory.incarnation_of(identity.id) == identity.incarnation:
                    self._watch(identity.id)

    def close(self) -> None:
        """Sends no news until the list changes again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_broken(self, session: AnySession, reason: str) -> None:
        """Connects to the coordinator again, so that workers that never call it notice its death, too."""
        is_coordinator = session.peer.id == self._directory.coordinator and self._service is None
        if is_coordinator and not self._lifetime.is_ending:
            self._watch(self._directory.coordinator)


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A worker joined the job, left it, or was lost.

    Attributes:
        kind: "joined", "left" (by `shutdown`), or "lost" (it died, or does not answer, or was replaced).
        worker: its name and rank.
        role: its role, from its `RpcOptions`.
        reason: why it was declared lost; else empty.
    """

    kind: Literal["joined", "left", "lost"]
    worker: WorkerInfo
    role: str = ""
    reason: str = ""


Callback = Callable[[MembershipChange], object]


class MembershipWatch:
    """Calls functions of the user at changes; one per agent. Functions are added on any thread; a pool thread calls
    them one at a time, in the order of the changes, so they may block and call other workers.

    Args:
        lifetime: the agent's; changes are not reported once this worker or all workers leave.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], object], lifetime: Lifetime) -> None:
        self._submit = submit
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callback] = {}
        self._changes: deque[MembershipChange] = deque()
        self._is_running = False
        self._lost: set[str] = set()  # the names of lost workers that were logged

    def add(self, callback: Callback) -> Callable[[], None]:
        """Registers a function to be called at each change; returns a function that removes it."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def all_leave(self, losses: Mapping[str, str]) -> None:
        """Stops reporting connections that end, since all workers leave by agreement.

        Args:
            losses: the workers lost before, by name, with reasons. The agreement may arrive before the event, and this
                worker may have joined after the loss.
        """
        with self._lock:
            self._lifetime.all_leave = True
            unheard = [(name, reason) for name, reason in losses.items() if name not in self._lost]
        for name, reason in unheard:
            logger.warning("worker %r is lost: %s", name, reason)

    def on_member(self, event: MemberEvent) -> None:
        who = event.member.identity
        is_lost = event.kind == "lost"
        with self._lock:
            if self._lifetime.is_ending:
                return
            (self._lost.add if is_lost else self._lost.discard)(who.name)
        if is_lost:
            logger.warning("worker %r (rank %d) is lost: %s", who.name, who.id, event.reason)
        else:
            logger.info("worker %r (rank %d) has %s", who.name, who.id, event.kind)
        with self._lock:
            if not self._callbacks:
                return
            worker = WorkerInfo(who.name, who.id)
            self._changes.append(MembershipChange(event.kind, worker, event.member.role, event.reason))
            if self._is_running:
                return
            self._is_running = True
        self._submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._changes:
                    self._is_running = False
                    return
                change = self._changes.popleft()
                callbacks = list(self._callbacks.values())
            for callback in callbacks:
                try:
                    callback(change)
                except Exception as error:
                    logger.error("%r failed with %r:\n%s", callback, change, traceback_of(error))
