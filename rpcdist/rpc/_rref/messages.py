"""The control messages of the reference counting, as the pure protocol sees them.

`proto/rref.proto` has the same messages on the wire; `protobuf.py` translates.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, RRefId


class Reason(enum.IntEnum):
    """Why a reference cannot be used. The numbers are those of `ForkRefused.Reason` in `proto/rref.proto`."""

    UNKNOWN = 0  # the owner does not hold the value (any more)
    LEASE_EXPIRED = 1  # the owner dropped everything that this user held
    CREATION_FAILED = 2  # the remote() that should have made the value never reached the owner
    OWNER_LOST = 3  # the owner died
    SHARE_LOST = 4  # the message that carried the reference was given up by its sender
    NOT_HELD = 5  # the owner does not count this fork for who names it


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
    """Owner -> creator: somebody names a reference of yours that I do not know; is its remote() under way?"""


@dataclass(frozen=True, slots=True)
class CreationOver(Message):
    """Creator -> owner: it is not; you have seen it, or never will."""
