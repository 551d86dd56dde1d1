"""Drives the handshake over any connection that carries messages: a gRPC stream, or a raw socket through a pipe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import AuthenticationFailed, ConnectFailed, ProtocolViolation, RpcdistError, TransportError
from rpcdist.ids import Identity
from rpcdist.time_limits import FIRST_PAUSE_S, HANDSHAKE_LIMIT_S, LONGEST_PAUSE_S, QUICK_ANSWER_LIMIT_S
from rpcdist.transport._channels.socket_pipe import connected_pipe
from rpcdist.transport._tls.tls_socket import StreamSocket, TlsSocket
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake, ServerHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.unix_sockets import names_senders

T = TypeVar("T")


class HandshakePipe(Protocol):
    """Carries the messages of a handshake; used on the I/O loop."""

    async def read(self) -> bytes | None:
        """The next message; None if the peer closed the connection. Raises `TransportError` if it broke."""

    async def write(self, data: bytes) -> None:
        """Sends a message; raises `TransportError` if the connection broke."""


async def prove_client(
    pipe: HandshakePipe,
    handshake: ClientHandshake,
    other_way: Callable[[ClientHandshake], Awaitable[T | None]] | None = None,
) -> T | None:
    """Runs the handshake of the connecting side. The caller limits the time, and closes the connection after an error.

    Args:
        handshake: not started.
        other_way: tries a better channel (`ClientHandshake.other_way`), when the server has proven itself and this side
            has not. If it returns a result, the handshake ends there.

    Returns:
        The result of `other_way`; None when the handshake is done.

    Raises:
        AuthenticationFailed: one of the two sides refused; see `handshake.refusal_code`.
        ProtocolViolation: the peer sent something that is not a handshake message.
        TransportError: the connection broke.
    """
    await _send(pipe, handshake, handshake.start())
    while not handshake.done:
        reply = handshake.receive(await _read(pipe))
        if other_way is not None and handshake.other_way is not None:
            found = await other_way(handshake)
            if found is not None:
                return found
            other_way = None
        if reply is not None:
            await _send(pipe, handshake, reply)
        if handshake.failure is not None and reply is not None:
            await _until_read(pipe)
        handshake.check()
    return None


async def open_proven(
    connect: Callable[[], Awaitable[socket.socket]],
    address: str,
    credentials: Credentials,
    role: str,
    expected: Identity | None = None,
    purpose: str = "",
) -> tuple[StreamSocket, ClientHandshake]:
    """Opens a raw connection and proves both ends. With a purpose, it tries again while the peer is too busy: as long
    as the peer says so, and for `HANDSHAKE_LIMIT_S` if connections with TLS break, since the peer cannot say so within
    the TLS handshake.

    Args:
        role, expected, purpose: see `ClientHandshake`.

    Raises:
        OSError: no process listened there.
        AuthenticationFailed, ProtocolViolation, TransportError: see `prove_client`. The peer refuses connections for
            this purpose by `ProtocolViolation`, and connections of this kind by `ConnectFailed`.
    """
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    tls_deadline = Deadline.after(HANDSHAKE_LIMIT_S)
    while True:
        used: StreamSocket = (raw := await connect())
        handshake: ClientHandshake | None = None
        try:
            used, pipe, ends = await connected_pipe(raw, address, credentials)
            own = (credentials.token, credentials.job, role, credentials.identity)
            handshake = ClientHandshake(*own, purpose=purpose, channel=ends, expected=expected, credentials=credentials)
            await prove_client(pipe, handshake)
            names_senders(raw, on=False)
            return used, handshake
        except AuthenticationFailed as exc:
            used.close()
            code = handshake.refusal_code if handshake is not None and purpose else None
            if code == pb.Refusal.POLICY:
                raise ProtocolViolation(f"no connection for {purpose.partition('/')[2]!r}: {exc}") from exc
            if code == pb.Refusal.CHANNEL:
                raise ConnectFailed(address, str(exc)) from exc
            if code != pb.Refusal.BUSY:
                raise
        except TransportError as exc:
            used.close()
            may_be_busy = purpose and not isinstance(exc, ProtocolViolation) and not tls_deadline.expired()
            if not (may_be_busy and (handshake is None or isinstance(used, TlsSocket))):
                raise
        except BaseException:
            used.close()
            raise
        await asyncio.sleep(next(pauses))


async def prove_server(pipe: HandshakePipe, handshake: ServerHandshake) -> None:
    """Runs the handshake of the accepting side; see `prove_client`."""
    while not handshake.done:
        reply = handshake.receive(await _read(pipe))
        if reply is not None:
            await write_step(pipe, reply)
        handshake.check()


async def _send(pipe: HandshakePipe, handshake: ClientHandshake, step: pb.Handshake) -> None:
    """Sends a message. If the server has closed the connection, raises its refusal, which is still unread."""
    try:
        await write_step(pipe, step)
    except TransportError:
        if handshake.failure is None:
            with suppress(ProtocolViolation, TransportError, TimeoutError):
                async with asyncio.timeout(QUICK_ANSWER_LIMIT_S):
                    handshake.receive(await _read(pipe))
            handshake.check()
        raise


async def write_step(pipe: HandshakePipe, step: pb.Handshake) -> None:
    """Sends one message of a handshake."""
    await pipe.write(step.SerializeToString())


async def _read(pipe: HandshakePipe) -> pb.Handshake:
    data = await pipe.read()
    if data is None:  # not a violation: the peer may have been cancelled
        raise TransportError("the connection was closed during the handshake")
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolViolation(f"{len(data)} bytes arrived before the handshake was finished")
    try:
        return pb.Handshake.FromString(data)
    except DecodeError as exc:
        text = f"the {len(data)} bytes that arrived are not a handshake. Is the peer an rpcdist process?"
        raise ProtocolViolation(text) from exc


async def _until_read(pipe: HandshakePipe) -> None:
    """Waits, bounded, until the server has read the refusal: closing the connection earlier would discard it."""
    with suppress(RpcdistError, TimeoutError):
        async with asyncio.timeout(QUICK_ANSWER_LIMIT_S):
            await pipe.read()  # the server ends the connection
