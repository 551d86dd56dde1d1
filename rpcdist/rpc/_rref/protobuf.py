"""Between the pure protocol's messages and `proto/rref.proto`."""

from __future__ import annotations

from rpcdist._proto import rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.rpc._rref import messages
from rpcdist.rpc._rref.identifiers import UniqueId

__all__ = ["decode_message", "encode_message", "id_from_pb", "id_to_pb"]

_WITH_FORK: dict[str, type[messages.ForkMessage]] = {
    "fork_request": messages.ForkRequest,
    "fork_confirmed": messages.ForkConfirmed,
    "child_confirmed": messages.ChildConfirmed,
    "user_deleted": messages.UserDeleted,
    "share_query": messages.ShareQuery,
    "share_lost": messages.ShareLost,
    "creation_query": messages.CreationQuery,
}
_WITHOUT_FORK: dict[str, type[messages.Message]] = {
    "creation_probe": messages.CreationProbe,
    "creation_over": messages.CreationOver,
}
_NAMES = {kind: name for name, kind in (*_WITH_FORK.items(), *_WITHOUT_FORK.items())}
_NAMES[messages.ForkRefused] = "fork_refused"


def id_to_pb(id: UniqueId) -> value_pb2.UniqueId:
    return value_pb2.UniqueId(created_on=id.created_on, local_id=id.local_id, incarnation=id.incarnation)


def id_from_pb(id: value_pb2.UniqueId) -> UniqueId:
    return UniqueId(id.created_on, id.local_id, id.incarnation)


def encode_message(message: messages.Message) -> rref_pb2.RRefMessage:
    encoded = rref_pb2.RRefMessage()
    body = getattr(encoded, _NAMES[type(message)])
    body.rref.CopyFrom(id_to_pb(message.rref))
    if isinstance(message, messages.ForkMessage):
        body.fork.CopyFrom(id_to_pb(message.fork))
    else:
        body.SetInParent()
    if isinstance(message, messages.ForkRefused):
        body.reason = int(message.reason)
    return encoded


def decode_message(encoded: rref_pb2.RRefMessage) -> messages.Message:
    """Raises `ProtocolViolation` for a message of a kind, or with a reason, that this version does not know."""
    name = encoded.WhichOneof("body")
    if name == "fork_refused":
        refused = encoded.fork_refused
        try:
            reason = messages.Reason(refused.reason)
        except ValueError as exc:
            raise ProtocolViolation(f"a reference was refused for a reason that is none: {exc}") from exc
        return messages.ForkRefused(id_from_pb(refused.rref), id_from_pb(refused.fork), reason)
    if name in _WITH_FORK:
        body = getattr(encoded, name)
        return _WITH_FORK[name](id_from_pb(body.rref), id_from_pb(body.fork))
    if name in _WITHOUT_FORK:
        return _WITHOUT_FORK[name](id_from_pb(getattr(encoded, name).rref))
    raise ProtocolViolation(f"a reference-counting message of an unknown kind arrived: {encoded!r}")
