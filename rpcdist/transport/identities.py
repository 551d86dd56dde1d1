"""Identities of processes in messages: their wire form, and who matches whom."""

from __future__ import annotations

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport.peer_text import is_name, printable


def identity_to_proto(identity: Identity) -> pb.Identity:
    """The wire form of an identity."""
    return pb.Identity(name=identity.name, id=identity.id, incarnation=identity.incarnation)


def identity_from_proto(message: pb.Identity) -> Identity:
    """The identity in a message; raises `ProtocolViolation` where its name or id is out of bounds."""
    if message.id < -1 or not (is_name(message.name) or (message.id == -1 and message.name == "")):
        raise ProtocolViolation(
            f"an identity has a malformed name ({printable(message.name[:40])!r}) or id ({message.id})"
        )
    return Identity(message.name, message.id, message.incarnation)


def identity_fields(identity: Identity) -> tuple[bytes, bytes, bytes]:
    """What the transcript of a handshake says of an identity."""
    return (
        identity.name.encode(),
        identity.id.to_bytes(8, "big", signed=True),
        identity.incarnation.to_bytes(8, "big"),
    )


def matches(expected: Identity | None, peer: Identity) -> bool:
    """Whether `peer` is who was expected. None, an empty name, an id of -1 and an incarnation of 0 match anybody."""
    return expected is None or (
        expected.name in ("", peer.name)
        and expected.id in (-1, peer.id)
        and expected.incarnation in (0, peer.incarnation)
    )


def named(identity: Identity | None) -> str:
    """For messages."""
    if identity is None or not identity.name:
        return "anybody"
    return f"worker {identity.name!r} (id {identity.id}, incarnation {identity.incarnation:x})"
