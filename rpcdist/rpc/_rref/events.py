"""What can happen to the reference counting of one worker. The shell reports; the protocol decides."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, Incarnation, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Message


@dataclass(frozen=True, slots=True)
class RRefEvent:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class CreateRemote(RRefEvent):
    """`remote()` begins here: the call that carries `fork` is about to leave for `owner` (which may be this worker)."""

    rref: RRefId
    fork: ForkId
    owner: Incarnation


@dataclass(frozen=True, slots=True)
class Created(RRefEvent):
    """The reply to `remote()` arrived: the owner has it."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class CreationFailed(RRefEvent):
    """`remote()` failed for its caller; whether the call reached the owner is unknown."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class CreationAccepted(RRefEvent):
    """At the owner: the call of a `remote()` arrived."""

    rref: RRefId
    fork: ForkId
    creator: Incarnation


@dataclass(frozen=True, slots=True)
class CreationFinished(RRefEvent):
    """At the owner: the function of a `remote()` ended, by value or error."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class Share(RRefEvent):
    """A message to `to` is about to carry `child`, a new fork of the local handle `holder`."""

    rref: RRefId
    holder: UniqueId
    child: ForkId
    to: Incarnation


@dataclass(frozen=True, slots=True)
class ShareFailed(RRefEvent):
    """The message that carried `child` is lost, or may be."""

    rref: RRefId
    child: ForkId


@dataclass(frozen=True, slots=True)
class Received(RRefEvent):
    """A message from `sender` carried `fork`. `parent` is the sender's own fork; None where the sender is the owner."""

    rref: RRefId
    fork: ForkId
    parent: ForkId | None
    owner: Incarnation
    sender: Incarnation


@dataclass(frozen=True, slots=True)
class HandleDropped(RRefEvent):
    """No Python object holds this handle any more."""

    rref: RRefId
    handle: UniqueId


@dataclass(frozen=True, slots=True)
class FetchArrived(RRefEvent):
    """At the owner: `sender` asks for the value on behalf of its fork."""

    rref: RRefId
    fork: ForkId
    sender: Incarnation


@dataclass(frozen=True, slots=True)
class MessageArrived(RRefEvent):
    """A control message."""

    sender: Incarnation
    message: Message


@dataclass(frozen=True, slots=True)
class HolderLost(RRefEvent):
    """A worker is declared dead."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class HolderFound(RRefEvent):
    """A worker is connected that may have been declared dead."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class LeaseEnded(RRefEvent):
    """Nothing was heard of a worker for as long as its lease lasts."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class ConnectionBroken(RRefEvent):
    """Messages to a worker may be lost. `on_the_way` are children whose messages have not been given up."""

    node: Incarnation
    on_the_way: frozenset[ForkId] = frozenset()


@dataclass(frozen=True, slots=True)
class DropAll(RRefEvent):
    """Shutdown: every handle of this worker counts as dropped."""
