"""Drives the handshake over the channel of a session, whose first envelopes carry nothing else."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rpcdist._proto import handshake_pb2, rpc_pb2
from rpcdist.errors import ProtocolViolation, RpcdistError, TransportError
from rpcdist.time_limits import REFUSAL_LIMIT_S
from rpcdist.transport._channels.channel import Channel
from rpcdist.transport._framing.frames import Chunk, parse
from rpcdist.transport.handshake import MAX_HANDSHAKE_BYTES, ClientHandshake, ServerHandshake

__all__ = ["prove_client", "prove_server"]


async def prove_client(channel: Channel, handshake: ClientHandshake) -> None:
    """Runs the handshake of the side that opened the channel. The caller limits the time, and closes after an error.

    Raises:
        AuthenticationFailed: one of the two refused.
        ProtocolViolation: something else than a handshake arrived.
        TransportError: the channel broke.
    """
    await _write(channel, handshake.start())
    while not handshake.done:
        reply = handshake.receive(await _read(channel))
        if reply is not None:
            await _write(channel, reply)
        if handshake.failure is not None and reply is not None:
            await _until_heard(channel)
        handshake.check()


async def prove_server(channel: Channel, handshake: ServerHandshake) -> None:
    """The same for the side that accepted the channel."""
    while not handshake.done:
        reply = handshake.receive(await _read(channel))
        if reply is not None:
            await _write(channel, reply)
        handshake.check()


async def _write(channel: Channel, step: handshake_pb2.Handshake) -> None:
    await channel.write(rpc_pb2.Envelope(handshake=step).SerializeToString())


async def _read(channel: Channel) -> handshake_pb2.Handshake:
    data = await channel.read()
    if data is None:  # no violation: the peer may have been cancelled, and has done nothing wrong
        raise TransportError("the connection was closed during the handshake")
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolViolation(f"{len(data)} bytes arrived before the handshake was finished")
    envelope = parse(data)
    if isinstance(envelope, Chunk) or envelope.messages or not envelope.HasField("handshake"):
        raise ProtocolViolation("a message arrived before the handshake was finished")
    return envelope.handshake


async def _until_heard(channel: Channel) -> None:
    """Waits, bounded, until the server has read why it was refused; a connection that closes first throws that away."""
    with suppress(RpcdistError, TimeoutError):
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            await channel.read()  # the server ends the channel
