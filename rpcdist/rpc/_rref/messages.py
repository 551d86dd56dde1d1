"""The identifiers, messages and shell actions of the reference counting.

The functions at the end convert messages to and from their wire form in `proto/rref.proto`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation, raised_as
from rpcdist.ids import ProcessId, UniqueId

RRefId = UniqueId  # the referenced value
ForkId = UniqueId  # one holder's share of it


class ReferenceShare(NamedTuple):
    """A reference and one holder's share of it."""

    rref: RRefId
    fork: ForkId


T = TypeVar("T", bound=Hashable)


def remember(members: dict[T, None], member: T, limit: int = 4096) -> None:
    """Adds a member to a bounded set, and drops the oldest above `limit`."""
    members[member] = None
    if len(members) > limit:
        del members[next(iter(members))]


class Reason(enum.IntEnum):
    """Why a reference cannot be used; numbered like `ForkRefused.Reason` in `proto/rref.proto`."""

    UNKNOWN = 0  # the owner does not hold the value (any more)
    LEASE_EXPIRED = 1  # the owner dropped all of this user's forks
    CREATION_FAILED = 2  # the remote() that creates the value never reached the owner
    OWNER_LOST = 3  # the owner died
    SHARE_LOST = 4  # the sender could not deliver the message with the reference
    NOT_HELD = 5  # the owner does not count this fork for the worker that names it
    TOO_MANY = 6  # the worker holds the maximum number of forks at this owner


class MessageKind(enum.Enum):
    """The kinds of control messages; the values are the names in `proto/rref.proto`."""

    FORK_REQUEST = "fork_request"  # user -> owner: I now hold this fork; count it
    FORK_CONFIRMED = "fork_confirmed"  # owner -> user: counted
    FORK_REFUSED = "fork_refused"  # owner -> user: not counted, with the reason
    CHILD_CONFIRMED = "child_confirmed"  # child -> parent user: you may drop your fork; mine is counted, or has failed
    USER_DELETED = "user_deleted"  # user -> owner: this fork is gone
    SHARE_QUERY = "share_query"  # sharer -> receiver: if you do not hold this fork, refuse it; its message may be lost
    SHARE_LOST = "share_lost"  # receiver -> sharer: I do not hold that fork, and never will
    CREATION_QUERY = "creation_query"  # creator -> owner: my remote() failed here; confirm the fork, or refuse the call
    CREATION_PROBE = "creation_probe"  # owner -> creator: a worker names your reference; is its remote() in progress?
    CREATION_OVER = "creation_over"  # creator -> owner: no; you have received it, or never will


NO_FORK: Final = UniqueId(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Message:
    """A control message about a reference or one of its forks.

    Attributes:
        fork: the fork; `NO_FORK` in `CREATION_PROBE` and `CREATION_OVER`.
        reason: why a fork is refused; only used in `FORK_REFUSED`.
    """

    kind: MessageKind
    rref: RRefId
    fork: ForkId = NO_FORK
    reason: Reason = Reason.UNKNOWN


class Actions(ABC):
    """The shell's actions. The protocol calls them while it decides, so they must not call the protocol."""

    @abstractmethod
    def send(self, to: ProcessId, message: Message) -> None:
        """Sends a control message over the reliable channel; one to this worker itself arrives after the decision."""

    @abstractmethod
    def settle_handle(self, handle: UniqueId, failed: Reason | None = None) -> None:
        """Confirms a handle that the owner counts, or fails it for good: then the protocol has already dropped it."""

    @abstractmethod
    def answer_fetch(self, rref: RRefId, fork: ForkId, sender: ProcessId, refused: Reason | None = None) -> None:
        """Answers the sender's fetches of this fork with the value, once it is available, or with an error."""

    @abstractmethod
    def fail_value(self, rref: RRefId, reason: Reason) -> None:
        """Fails a value whose `remote()` will never arrive, so that threads waiting for it get an error."""

    @abstractmethod
    def release_value(self, rref: RRefId) -> None:
        """Drops a value that has no entry in the owner's table any more."""


# ---------------------------------------------------------------- the wire form, `proto/rref.proto`

_IDS: Final = Struct("<qqQqqQ")
NamedIds = tuple[Any, ...]
"""The fields of a `UniqueId`, as a tuple that equals it."""


def id_to_pb(id: UniqueId) -> value_pb2.UniqueId:
    return value_pb2.UniqueId(created_on=id.created_on, local_id=id.local_id, incarnation=id.incarnation)


def id_from_pb(id: value_pb2.UniqueId) -> UniqueId:
    return UniqueId(id.created_on, id.local_id, id.incarnation)


def encode_messages(messages: Sequence[Message]) -> rref_pb2.RRefMessage:
    if len(messages) > 1:
        ids = b"".join([_IDS.pack(*message.rref, *message.fork) for message in messages])
        return rref_pb2.RRefMessage(users_deleted=rref_pb2.UsersDeleted(ids=ids))
    (message,) = messages
    encoded = rref_pb2.RRefMessage()
    body = getattr(encoded, message.kind.value)
    body.rref.CopyFrom(id_to_pb(message.rref))
    if message.fork is not NO_FORK:
        body.fork.CopyFrom(id_to_pb(message.fork))
    if message.kind is MessageKind.FORK_REFUSED:
        body.reason = int(message.reason)
    return encoded


def decode_messages(
    encoded: rref_pb2.RRefMessage, is_counted: Callable[[NamedIds, NamedIds], bool]
) -> Sequence[Message]:
    """Decodes one message, or several deletions.

    Args:
        is_counted: whether a fork of a reference is counted here. Deletions of other forks have no effect, and are
            skipped: decoding one takes ten times as long as this check.

    Raises:
        ProtocolViolation: unknown kind or reason, or truncated.
    """
    if encoded.WhichOneof("body") != "users_deleted":
        return (_decode(encoded),)
    ids = encoded.users_deleted.ids
    if len(ids) % _IDS.size:
        raise ProtocolViolation(f"a list of deleted references has {len(ids)} bytes, not a multiple of {_IDS.size}")
    counted = [pair for pair in _IDS.iter_unpack(ids) if is_counted(pair[:3], pair[3:])]
    return [
        Message(MessageKind.USER_DELETED, UniqueId(*pair[:3]), UniqueId(*pair[3:])) for pair in dict.fromkeys(counted)
    ]


def _decode(encoded: rref_pb2.RRefMessage) -> Message:
    name = encoded.WhichOneof("body")
    if name is None:
        raise ProtocolViolation(f"a reference-counting message of an unknown kind arrived: {encoded!r}")
    kind, body = MessageKind(name), getattr(encoded, name)
    if kind in (MessageKind.CREATION_PROBE, MessageKind.CREATION_OVER):
        return Message(kind, id_from_pb(body.rref))
    with raised_as(ProtocolViolation, "a refusal of a reference has an unknown reason", ValueError):
        reason = Reason(body.reason) if kind is MessageKind.FORK_REFUSED else Reason.UNKNOWN
    return Message(kind, id_from_pb(body.rref), id_from_pb(body.fork), reason)
