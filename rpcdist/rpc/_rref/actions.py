"""What the reference counting asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, Node, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Message, Reason

__all__ = ["Action", "Confirm", "Fail", "FailValue", "RefuseCreation", "RefuseFetch", "ReleaseValue", "Send", "Serve"]


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions."""


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Hand a control message to the reliable channel. Never to this worker itself."""

    to: Node
    message: Message


@dataclass(frozen=True, slots=True)
class Confirm(Action):
    """The owner counts this handle."""

    rref: RRefId
    handle: UniqueId


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """Every use of this handle raises from now on. The protocol has forgotten it."""

    rref: RRefId
    handle: UniqueId
    reason: Reason


@dataclass(frozen=True, slots=True)
class Serve(Action):
    """Answer the fetches of this fork with the value (as soon as it is there)."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class RefuseFetch(Action):
    """Answer the fetches of this fork with an error."""

    rref: RRefId
    fork: ForkId
    reason: Reason


@dataclass(frozen=True, slots=True)
class RefuseCreation(Action):
    """Do not run the call of this `remote()`."""

    rref: RRefId
    fork: ForkId
    reason: Reason


@dataclass(frozen=True, slots=True)
class FailValue(Action):
    """The `remote()` of this value will never come: whoever waits for the value gets an error."""

    rref: RRefId
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReleaseValue(Action):
    """The owner's table has no entry for it any more: forget the value."""

    rref: RRefId
