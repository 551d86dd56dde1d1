"""Identities of processes in messages: their wire form, their comparison, and text that peers sent."""

from __future__ import annotations

from typing import Final

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity

# ---------------------------------------------------------------- text that a peer sent

MAX_NAME_LENGTH: Final = 128
MAX_REASON_LENGTH: Final = 600


def is_name(text: str) -> bool:
    """Whether it may be the name of a job or a process: not empty, printable, and short enough."""
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


def printable(text: str | bytes) -> str:
    """The text without control characters, which could forge log lines or steer a terminal."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def identity_to_proto(identity: Identity) -> pb.Identity:
    """The wire form of an identity."""
    return pb.Identity(name=identity.name, id=identity.id, incarnation=identity.incarnation)


def identity_from_proto(message: pb.Identity) -> Identity:
    """The identity in a message; raises `ProtocolViolation` if its name or id is out of bounds."""
    if message.id < -1 or not (is_name(message.name) or (message.id == -1 and message.name == "")):
        text = f"an identity has a malformed name ({printable(message.name[:40])!r}) or id ({message.id})"
        raise ProtocolViolation(text)
    return Identity(message.name, message.id, message.incarnation)


def identity_fields(identity: Identity) -> tuple[bytes, bytes, bytes]:
    """The form of an identity in the transcript of a handshake."""
    id, incarnation = identity.id.to_bytes(8, "big", signed=True), identity.incarnation.to_bytes(8, "big")
    return identity.name.encode(), id, incarnation


def matches(expected: Identity | None, peer: Identity) -> bool:
    """Whether `peer` is the expected one. None, an empty name, an id of -1 and an incarnation of 0 match any peer."""
    return expected is None or (
        expected.name in ("", peer.name)
        and expected.id in (-1, peer.id)
        and expected.incarnation in (0, peer.incarnation)
    )


def named(identity: Identity | None) -> str:
    """The text for an identity in messages."""
    if identity is None or not identity.name:
        return "any process"
    return f"worker {identity.name!r} (id {identity.id}, incarnation {identity.incarnation:x})"
