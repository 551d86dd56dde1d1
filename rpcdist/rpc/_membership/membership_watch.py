"""Calls functions of the user when a worker comes or goes, and logs a line about each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rpcdist.rpc._peers.demultiplexer import Lifetime
from rpcdist.rpc._peers.directory import MemberEvent
from rpcdist.rpc._values.exceptions import traceback_of
from rpcdist.rpc.worker_info import WorkerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A worker joined the job, left it, or was lost.

    Attributes:
        kind: "joined", "left" (by `shutdown`), or "lost" (it died, or does not answer, or was replaced).
        worker: its name and rank.
        role: as its `RpcOptions` say.
        reason: why it was declared lost; else empty.
    """

    kind: Literal["joined", "left", "lost"]
    worker: WorkerInfo
    role: str = ""
    reason: str = ""


Callback = Callable[[MembershipChange], object]


class MembershipWatch:
    """One per agent. Functions are added on any thread; they are called one at a time, in the order of the changes, by
    a thread of the pool, so they may block and call other workers.

    Args:
        submit: gives jobs to the pool.
        lifetime: of the agent; losses are not told once all workers leave.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], object], lifetime: Lifetime) -> None:
        self._submit = submit
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callback] = {}
        self._changes: deque[MembershipChange] = deque()
        self._is_running = False
        self._lost: set[str] = set()  # the names of those in the log

    def add(self, callback: Callback) -> Callable[[], None]:
        """Has a function called at each change, until the function that is returned is called."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def all_leave(self, losses: Mapping[str, str]) -> None:
        """All workers leave by agreement: connections that end are not reported any more.

        Args:
            losses: the workers lost before, by name, and why. The agreement may arrive before the event, and this
                worker may have joined after the loss.
        """
        with self._lock:
            self._lifetime.all_leave = True
            unheard = [(name, reason) for name, reason in losses.items() if name not in self._lost]
        for name, reason in unheard:
            logger.warning("worker %r is lost: %s", name, reason)

    def on_member(self, event: MemberEvent) -> None:
        """A worker came or went; on the I/O loop."""
        who = event.member.identity
        is_lost = event.kind == "lost"
        with self._lock:
            if self._lifetime.all_leave:
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
