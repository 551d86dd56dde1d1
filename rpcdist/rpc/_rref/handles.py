"""Handles held by Python `RRef` objects, the shell's state for each, and the errors of their use.

A *handle* lives as long as Python objects hold it; then it adds itself to a queue. Its *state* stays in the shell's
tables until the shell reads the queue. An owned value is a `Future`; only its first outcome counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from rpcdist.at_exit import AtEnd
from rpcdist.errors import (
    BlockingInLoop,
    Cancelled,
    DeadlineExceeded,
    LeaseExpired,
    OwnerLost,
    RRefError,
    WorkerLost,
    text_of,
)
from rpcdist.ids import ProcessId, UniqueId
from rpcdist.rpc._rref.messages import Reason, RRefId
from rpcdist.rpc._rref.owner import MAX_HELD
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future

Dropped = deque[tuple[RRefId, UniqueId]]


def wait_for_value(owned: Future[Any], rref: RRefId, timeout_s: float | None) -> Any:
    """Waits for the value of a reference at its owner. [Note: kept errors]"""
    if not owned.done() and asyncio._get_running_loop() is not None:
        raise BlockingInLoop("waiting for the value of a reference", "await rref")
    try:
        error = owned.exception(timeout_s)
    except DeadlineExceeded as exc:
        # The same words as for a late call, because the caller gets whichever of the two errors comes first.
        raise DeadlineExceeded(
            "RPC ran for more than set timeout and will now be marked with an error: the value of "
            f"{rref!r} was not available in time"
        ) from exc
    if error is not None:
        raise copied(error)
    return owned.value()


def quiet_future() -> Future[Any]:
    """A future whose error is raised or reported elsewhere."""
    future: Future[Any] = Future()
    future.is_quiet = True
    return future


def derived_future(source: Future[Any]) -> Future[Any]:
    """Returns a future with the same outcome; cancelling it does not affect `source`."""
    derived = quiet_future()
    source._when_done(lambda done: copy_outcome(done, derived))
    return derived


def copy_outcome(source: Future[Any], target: Future[Any]) -> None:
    """Completes `target` like `source`, unless it is already complete."""
    error = source.exception()
    if error is not None:
        target._fail(copied(error))
    else:
        target._complete(source.value())


def failed_future(error: Exception) -> Future[Any]:
    future = quiet_future()
    future._fail(error)
    return future


@dataclass(slots=True, eq=False, repr=False)
class HandleState:
    """The state of a fork or local handle. Guarded by the shell's lock; single fields can be read without it."""

    rref: RRefId
    id: UniqueId
    owner: ProcessId
    owner_name: str
    owned: Future[Any] | None  # the value's future at the owner; None at users
    confirmed: bool = field(init=False)
    error: Exception | None = None
    deleted: bool = False
    is_serial: bool = False  # whether the value is an actor
    waiters: list[Callable[[], object]] = field(default_factory=list)  # called when it is confirmed or has failed

    def __post_init__(self) -> None:
        self.confirmed = self.owned is not None

    def take_waiters(self) -> list[Callable[[], object]]:
        waiters, self.waiters = self.waiters, []
        return waiters

    def check(self, use: str) -> None:
        if self.deleted:
            raise RRefError(use)
        if self.error is not None:
            raise copied(self.error)

    def __str__(self) -> str:
        if self.owned is not None:
            return f"OwnerRRef({self.rref})"
        return f"UserRRef(RRefId = {self.rref}, ForkId = {self.id})"


class Handle:
    """Keeps a reference alive. May be collected on any thread at any moment. [Note: Ctrl-C in finalizers]

    If the reference arrived in a message, its `RRef` object is only made when the message is unpickled.
    """

    __slots__ = ("_at_end", "state")

    def __init__(self, state: HandleState, dropped: Dropped) -> None:
        self.state = state
        self._at_end = AtEnd(dropped.append, (state.rref, state.id))


GONE = "RPC was shut down in this process, and its remote references with it"
FORK_AFTER_DELETION = "Cannot call fork an UserRRef after deletion."


def owner_lost(exc: WorkerLost, what: str) -> OwnerLost:
    """Turns the loss of a worker into an error for users of its values."""
    if isinstance(exc, OwnerLost):
        return exc
    error = OwnerLost(exc.worker, what, exc.last_seen_s, exc.reason, exc.was_sent)
    error.__cause__ = copied(exc)
    return error


def replaced(name: str) -> WorkerLost:
    """The error for a process that is gone without having been declared dead."""
    return WorkerLost(name, "a remote reference", 0.0, "the process left, or another one took its place")


def describe(reason: Reason, what: str, owner: str) -> Exception:
    """Returns the error for a protocol reason; `what` names the reference."""
    if reason is Reason.OWNER_LOST:
        return OwnerLost(owner, f"use of {what}", 0.0, "the owner was declared dead")
    texts = {
        Reason.UNKNOWN: f"the owner {owner!r} does not know {what}: all references to it were dropped, or the worker "
        "that shared it died before the owner counted the share.",
        Reason.LEASE_EXPIRED: f"{what}: its owner {owner!r} received nothing from this process for too long, and "
        "dropped its references. Create a new one, or have a worker that holds it send it again.",
        Reason.CREATION_FAILED: "RRef creation via rpc.remote() failed: the call never reached "
        f"{owner!r}, so {what} has no value.",
        Reason.SHARE_LOST: f"{what} is unusable: its sender could not deliver the message with it. Have it sent again.",
        Reason.NOT_HELD: f"the owner {owner!r} of {what} refused it: the requesting worker does not hold the share "
        "that it named, which was released or belongs to another worker. Use a reference that was sent to this worker.",
        Reason.TOO_MANY: f"the owner {owner!r} of {what} refused it: this worker already holds the maximum of "
        f"{MAX_HELD} references to values there. Drop some, or put several values behind one reference.",
    }
    return (LeaseExpired if reason is Reason.LEASE_EXPIRED else RRefError)(texts[reason])


def creation_error(exc: BaseException, owner: str) -> Exception:
    """Returns the error for every use of a reference whose `remote()` failed with `exc`.

    This is `exc` itself if the owner reported it. If the call itself failed, the value may or may not exist.
    """
    kind = type(exc)  # a user's exception may break `isinstance`
    if issubclass(kind, WorkerLost):
        assert isinstance(exc, WorkerLost)
        what = "RRef creation via rpc.remote()"
        error: Exception = OwnerLost(exc.worker, what, exc.last_seen_s, exc.reason, exc.was_sent)
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
