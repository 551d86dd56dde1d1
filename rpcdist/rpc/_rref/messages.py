"""The messages and actions of the reference counting: plain data.

Workers exchange messages; the protocol tells its shell what to do by actions. `proto/rref.proto` has the same messages
on the wire; `protobuf.py` translates.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, Incarnation, RRefId, UniqueId


class Reason(enum.IntEnum):
    """Why a reference cannot be used. The numbers are those of `ForkRefused.Reason` in `proto/rref.proto`."""

    UNKNOWN = 0  # the owner does not hold the value (any more)
    LEASE_EXPIRED = 1  # the owner dropped everything that this user held
    CREATION_FAILED = 2  # the remote() that should have made the value never reached the owner
    OWNER_LOST = 3  # the owner died
    SHARE_LOST = 4  # the message that carried the reference was given up by its sender
    NOT_HELD = 5  # the owner does not count this fork for the worker that names it


@dataclass(frozen=True, slots=True)
class Message:
    """Base: all messages are about one reference."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class ForkMessage(Message):
    """Base of those about one fork of the reference."""

    fork: ForkId


@dataclass(frozen=True, slots=True)
class ForkRequest(ForkMessage):
    """User -> owner: I hold this fork now; count it."""


@dataclass(frozen=True, slots=True)
class ForkConfirmed(ForkMessage):
    """Owner -> user: counted."""


@dataclass(frozen=True, slots=True)
class ForkRefused(ForkMessage):
    """Owner -> user: not counted, and why."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class ChildConfirmed(ForkMessage):
    """Child -> parent user: the fork that you gave me is counted, or given up; yours may go."""


@dataclass(frozen=True, slots=True)
class UserDeleted(ForkMessage):
    """User -> owner: this fork is gone."""


@dataclass(frozen=True, slots=True)
class ShareQuery(ForkMessage):
    """Sharer -> receiver: the message with this fork may be lost; refuse it from now on if you do not know it."""


@dataclass(frozen=True, slots=True)
class ShareLost(ForkMessage):
    """Receiver -> sharer: I do not hold that fork, and never will."""


@dataclass(frozen=True, slots=True)
class CreationQuery(ForkMessage):
    """Creator -> owner: my remote() failed here; confirm the fork, or refuse the call from now on."""


@dataclass(frozen=True, slots=True)
class CreationProbe(Message):
    """Owner -> creator: a worker names a reference of yours that I do not know; is its remote() under way?"""


@dataclass(frozen=True, slots=True)
class CreationOver(Message):
    """Creator -> owner: it is not; you have seen it, or never will."""


@dataclass(frozen=True, slots=True)
class SendControl:
    """Hand a control message to the reliable channel. Never to this worker itself."""

    to: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class Confirm:
    """The owner counts this handle."""

    rref: RRefId
    handle: UniqueId


@dataclass(frozen=True, slots=True)
class Fail:
    """Every use of this handle raises from now on. The protocol has forgotten it."""

    rref: RRefId
    handle: UniqueId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Serve:
    """Answer the sender's fetches of this fork with the value (as soon as it is there)."""

    rref: RRefId
    fork: ForkId
    sender: Incarnation


@dataclass(frozen=True, slots=True)
class RefuseFetch:
    """Answer the sender's fetches of this fork with an error."""

    rref: RRefId
    fork: ForkId
    sender: Incarnation
    reason: Reason


@dataclass(frozen=True, slots=True)
class RefuseCreation:
    """Do not run the call of this `remote()`."""

    rref: RRefId
    fork: ForkId
    reason: Reason


@dataclass(frozen=True, slots=True)
class FailValue:
    """The `remote()` of this value will never come: threads that wait for the value get an error."""

    rref: RRefId
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReleaseValue:
    """The owner's table has no entry for it any more: forget the value."""

    rref: RRefId


RRefAction = SendControl | Confirm | Fail | Serve | RefuseFetch | RefuseCreation | FailValue | ReleaseValue
