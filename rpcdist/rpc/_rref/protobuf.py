"""Between the pure protocol's messages and `proto/rref.proto`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.rpc._rref.messages import NO_FORK, Message, MessageKind, Reason, UniqueId

_IDS: Final = Struct("<qqQqqQ")
NamedIds = tuple[Any, ...]
"""The fields of a `UniqueId`, to which it is equal."""


def id_to_pb(id: UniqueId) -> value_pb2.UniqueId:
    return value_pb2.UniqueId(created_on=id.created_on, local_id=id.local_id, incarnation=id.incarnation)


def id_from_pb(id: value_pb2.UniqueId) -> UniqueId:
    return UniqueId(id.created_on, id.local_id, id.incarnation)


def encode_message(message: Message) -> rref_pb2.RRefMessage:
    encoded = rref_pb2.RRefMessage()
    body = getattr(encoded, message.kind.value)
    body.rref.CopyFrom(id_to_pb(message.rref))
    if message.fork is not NO_FORK:
        body.fork.CopyFrom(id_to_pb(message.fork))
    if message.kind is MessageKind.FORK_REFUSED:
        body.reason = int(message.reason)
    return encoded


def encode_deletions(deleted: Sequence[Message]) -> rref_pb2.RRefMessage:
    """One message for all of them, which go to one owner."""
    if len(deleted) == 1:
        return encode_message(deleted[0])
    ids = b"".join([_IDS.pack(*message.rref, *message.fork) for message in deleted])
    return rref_pb2.RRefMessage(users_deleted=rref_pb2.UsersDeleted(ids=ids))


def decode_messages(
    encoded: rref_pb2.RRefMessage, is_counted: Callable[[NamedIds, NamedIds], bool]
) -> Sequence[Message]:
    """One message, or several deletions.

    Args:
        is_counted: whether a fork of a reference is counted here. The deletions of others would change nothing, and
            what is made for each takes ten times as long as this question.

    Raises:
        ProtocolViolation: it is of a kind, or has a reason, that this version does not know, or is cut off.
    """
    if encoded.WhichOneof("body") != "users_deleted":
        return (_decode(encoded),)
    ids = encoded.users_deleted.ids
    if len(ids) % _IDS.size:
        raise ProtocolViolation(f"the deletion of references arrived in {len(ids)} bytes, which is no number of them")
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
    try:
        reason = Reason(body.reason) if kind is MessageKind.FORK_REFUSED else Reason.UNKNOWN
    except ValueError as exc:
        raise ProtocolViolation(f"a reference was refused for a reason that is none: {exc}") from exc
    return Message(kind, id_from_pb(body.rref), id_from_pb(body.fork), reason)
