"""The errors that a user of a remote reference sees."""

from __future__ import annotations

from typing import cast

from rpcdist.errors import Cancelled, DeadlineExceeded, LeaseExpired, OwnerLost, RRefError, WorkerLost
from rpcdist.rpc._rref.identifiers import Incarnation
from rpcdist.rpc._rref.messages import Reason
from rpcdist.rpc._values.exceptions import copied, text_of

GONE = "RPC was shut down in this process, and its remote references with it"
FORK_AFTER_DELETION = "Cannot call fork an UserRRef after deletion."


class Losses:
    """Why workers were declared dead; one entry for each process that died during ours."""

    def __init__(self) -> None:
        self._losses: dict[Incarnation, WorkerLost] = {}

    def __contains__(self, node: Incarnation) -> bool:
        return node in self._losses

    def note(self, node: Incarnation, exc: WorkerLost) -> None:
        """The first report stays."""
        self._losses.setdefault(node, exc)

    def forget(self, node: Incarnation) -> None:
        """It lives after all."""
        self._losses.pop(node, None)

    def error(self, reason: Reason, what: str, owner: Incarnation, owner_name: str) -> Exception:
        """What the use of a reference raises that the protocol gave up."""
        if reason is Reason.OWNER_LOST and owner in self._losses:
            return owner_lost(self._losses[owner], f"use of {what}")
        return describe(reason, what, owner_name)


def owner_lost(exc: WorkerLost, what: str) -> OwnerLost:
    """The loss of a worker, as those see it who refer to its values."""
    if isinstance(exc, OwnerLost):
        return exc
    error = OwnerLost(exc.worker, what, exc.last_seen_s, exc.reason)
    error.__cause__ = copied(exc)
    return error


def replaced(name: str) -> WorkerLost:
    """For a process that is gone although nobody has declared it dead."""
    return WorkerLost(name, "a remote reference", 0.0, "the process left, or another one took its place")


def describe(reason: Reason, what: str, owner: str) -> Exception:
    """The error for a reason that the protocol gives; `what` names the reference."""
    if reason is Reason.LEASE_EXPIRED:
        return LeaseExpired(
            f"{what}: its owner {owner!r} has not heard of this process for too long, and dropped its references. "
            "Create it anew, or get it again from somebody who holds it."
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
    """What every use of the reference raises after its `remote()` failed with `exc`.

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
