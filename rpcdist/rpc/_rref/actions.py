"""What the reference counting asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, Incarnation, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Message, Reason


@dataclass(frozen=True, slots=True)
class RRefAction:
    """Base of all actions."""


@dataclass(frozen=True, slots=True)
class SendControl(RRefAction):
    """Hand a control message to the reliable channel. Never to this worker itself."""

    to: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class Confirm(RRefAction):
    """The owner counts this handle."""

    rref: RRefId
    handle: UniqueId


@dataclass(frozen=True, slots=True)
class Fail(RRefAction):
    """Every use of this handle raises from now on. The protocol has forgotten it."""

    rref: RRefId
    handle: UniqueId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Serve(RRefAction):
    """Answer the sender's fetches of this fork with the value (as soon as it is there)."""

    rref: RRefId
    fork: ForkId
    sender: Incarnation


@dataclass(frozen=True, slots=True)
class RefuseFetch(RRefAction):
    """Answer the sender's fetches of this fork with an error."""

    rref: RRefId
    fork: ForkId
    sender: Incarnation
    reason: Reason


@dataclass(frozen=True, slots=True)
class RefuseCreation(RRefAction):
    """Do not run the call of this `remote()`."""

    rref: RRefId
    fork: ForkId
    reason: Reason


@dataclass(frozen=True, slots=True)
class FailValue(RRefAction):
    """The `remote()` of this value will never come: whoever waits for the value gets an error."""

    rref: RRefId
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReleaseValue(RRefAction):
    """The owner's table has no entry for it any more: forget the value."""

    rref: RRefId
