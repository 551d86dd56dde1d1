"""Drives the handshake over any connection that carries messages: gRPC's streams, and raw sockets through a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import ProtocolViolation, RpcdistError, TransportError
from rpcdist.time_limits import REFUSAL_LIMIT_S
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES

T = TypeVar("T")


class HandshakePipe(Protocol):
    """Carries the messages of a handshake; used on the I/O loop."""

    async def read(self) -> bytes | None:
        """The next message; None when the peer closed the connection. Raises `TransportError` when it broke."""

    async def write(self, data: bytes) -> None:
        """Sends one; raises `TransportError` when the connection broke."""


async def prove_client(
    pipe: HandshakePipe,
    handshake: ClientHandshake,
    other_way: Callable[[ClientHandshake], Awaitable[T | None]] | None = None,
) -> T | None:
    """Runs the handshake of the side that opened the connection. The caller limits the time, and closes after an error.

    Args:
        pipe: carries the messages.
        handshake: not started.
        other_way: called once the server has proven itself, before this side does, if the server can be reached in
            another way, too (`ClientHandshake.other_way`). Where it returns something, the handshake ends there.

    Returns:
        What `other_way` returned; None when the handshake is done.

    Raises:
        AuthenticationFailed: one of the two refused; `handshake.refusal_code` says which kind.
        ProtocolViolation: something else than a handshake arrived.
        TransportError: the connection broke.
    """
    await write_step(pipe, handshake.start())
    while not handshake.done:
        reply = handshake.receive(await _read(pipe))
        if other_way is not None and handshake.other_way is not None:
            found = await other_way(handshake)
            if found is not None:
                return found
            other_way = None
        if reply is not None:
            await _answer(pipe, handshake, reply)
        if handshake.failure is not None and reply is not None:
            await _until_heard(pipe)
        handshake.check()
    return None


async def prove_server(pipe: HandshakePipe, handshake: ServerHandshake) -> None:
    """The same for the side that accepted the connection."""
    while not handshake.done:
        reply = handshake.receive(await _read(pipe))
        if reply is not None:
            await write_step(pipe, reply)
        handshake.check()


async def _answer(pipe: HandshakePipe, handshake: ClientHandshake, reply: pb.Handshake) -> None:
    """Sends a message to a server that may have closed the connection: what it refused for lies unread then."""
    try:
        await write_step(pipe, reply)
    except TransportError:
        if handshake.failure is None:
            with suppress(ProtocolViolation, TransportError, TimeoutError):
                async with asyncio.timeout(REFUSAL_LIMIT_S):
                    handshake.receive(await _read(pipe))
            handshake.check()
        raise


async def write_step(pipe: HandshakePipe, step: pb.Handshake) -> None:
    """Sends one message of a handshake."""
    await pipe.write(step.SerializeToString())


async def _read(pipe: HandshakePipe) -> pb.Handshake:
    data = await pipe.read()
    if data is None:  # no violation: the peer may have been cancelled, and has done nothing wrong
        raise TransportError("the connection was closed during the handshake")
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolViolation(f"{len(data)} bytes arrived before the handshake was finished")
    try:
        return pb.Handshake.FromString(data)
    except DecodeError as exc:
        raise ProtocolViolation(
            f"{len(data)} bytes arrived that are no handshake; is the peer an rpcdist process?"
        ) from exc


async def _until_heard(pipe: HandshakePipe) -> None:
    """Waits, bounded, until the server has read why it was refused; a connection that closes first throws that away."""
    with suppress(RpcdistError, TimeoutError):
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            await pipe.read()  # the server ends the connection
