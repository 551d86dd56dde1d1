"""What can happen to the reference counting of one worker. The shell reports; the protocol decides."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdist.rpc._rref.identifiers import ForkId, Node, RRefId, UniqueId
from rpcdist.rpc._rref.messages import Message

__all__ = [
    "Arrived",
    "ConnectionBroken",
    "CreateRemote",
    "Created",
    "CreationAccepted",
    "CreationFailed",
    "CreationFinished",
    "DropAll",
    "Event",
    "FetchArrived",
    "HandleDropped",
    "LeaseEnded",
    "Received",
    "Share",
    "ShareFailed",
    "WorkerLost",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class CreateRemote(Event):
    """`remote()` begins here: the call that carries `fork` is about to leave for `owner` (which may be this worker)."""

    rref: RRefId
    fork: ForkId
    owner: Node


@dataclass(frozen=True, slots=True)
class Created(Event):
    """The reply to `remote()` arrived: the owner has it."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class CreationFailed(Event):
    """`remote()` failed for its caller; whether the call reached the owner is unknown."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class CreationAccepted(Event):
    """At the owner: the call of a `remote()` arrived."""

    rref: RRefId
    fork: ForkId
    creator: Node


@dataclass(frozen=True, slots=True)
class CreationFinished(Event):
    """At the owner: the function of a `remote()` ended, by value or error."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class Share(Event):
    """A message to `to` is about to carry `child`, a new fork of the local handle `holder`."""

    rref: RRefId
    holder: UniqueId
    child: ForkId
    to: Node


@dataclass(frozen=True, slots=True)
class ShareFailed(Event):
    """The message that carried `child` is lost, or may be."""

    rref: RRefId
    child: ForkId
    to: Node


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A message from `sender` carried `fork`. `parent` is the sender's own fork; None where the sender is the owner."""

    rref: RRefId
    fork: ForkId
    parent: ForkId | None
    owner: Node
    sender: Node


@dataclass(frozen=True, slots=True)
class HandleDropped(Event):
    """No Python object holds this handle any more."""

    rref: RRefId
    handle: UniqueId


@dataclass(frozen=True, slots=True)
class FetchArrived(Event):
    """At the owner: `sender` asks for the value on behalf of its fork."""

    rref: RRefId
    fork: ForkId
    sender: Node


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A control message."""

    sender: Node
    message: Message


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker is declared dead."""

    node: Node


@dataclass(frozen=True, slots=True)
class LeaseEnded(Event):
    """Nothing was heard of a worker for as long as its lease lasts."""

    node: Node


@dataclass(frozen=True, slots=True)
class ConnectionBroken(Event):
    """Messages to a worker may be lost. `on_the_way` are children whose messages have not been given up."""

    node: Node
    on_the_way: frozenset[ForkId] = frozenset()


@dataclass(frozen=True, slots=True)
class DropAll(Event):
    """Shutdown: every handle of this worker counts as dropped."""
