"""Opens links to other processes: over the local channel where there is one, else over gRPC."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import grpc.aio

from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, TransportError
from rpcdist.ids import Identity
from rpcdist.time_limits import CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, LOCAL_HANDSHAKE_LIMIT_S
from rpcdist.transport import fork
from rpcdist.transport._channels.channel import Channel
from rpcdist.transport._channels.grpc_channel import CHANNEL_OPTIONS, GrpcClientChannel
from rpcdist.transport._channels.local_connections import connect_local
from rpcdist.transport._channels.proving import prove_client
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.addresses import split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.link import Link
from rpcdist.transport.session import NullHandler, Session, SessionHandler
from rpcdist.transport.unary_proof import SESSION_PATH, RequestProver

__all__ = ["Connector"]


logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """The link that a caller asks for; see `Connector.connect`."""

    address: str
    role: str
    expected: Identity | None
    handler: SessionHandler | None


class Connector:
    """The opening side of a process. Use it on the I/O loop.

    Attributes:
        links: the open ones.

    Args:
        io: the I/O loop that the links run on.
        credentials: what this process proves itself with.
        silence_limit_s: silence after which a peer is declared lost, in seconds.
    """

    def __init__(self, io: IoLoop, credentials: Credentials, silence_limit_s: float) -> None:
        self.links: set[Link] = set()
        self._io = io
        self._credentials = credentials
        self._silence_limit_s = silence_limit_s

    async def connect(
        self,
        address: str,
        role: str,
        timeout_s: float,
        handler: SessionHandler | None = None,
        expected: Identity | None = None,
        retry: bool = True,
    ) -> Link:
        """Connects, proves the token in both directions and starts the session.

        Args:
            address: host:port.
            role: what the connection is for.
            timeout_s: limit for all of it, in seconds.
            handler: gets the session's messages; without one only unary calls are possible.
            expected: who should answer there.
            retry: whether to try again, until the time is over, while nobody listens there.

        Raises:
            ConnectFailed: nobody answered.
            AuthenticationFailed: the token is wrong on one side, or somebody else answered than the one expected.

        Cancellation closes the connection.
        """
        wanted = _Wanted(address, role, expected, handler)
        deadline = Deadline.after(timeout_s)
        may_be_local = handler is not None  # else it makes unary calls only, and gRPC's connection is there for these
        pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S)
        while True:
            if may_be_local and (local := connect_local(address)) is not None:
                link = await self._connect_locally(local, wanted, min(timeout_s / 2, LOCAL_HANDSHAKE_LIMIT_S))
                if link is not None:
                    return link
                may_be_local = False
            try:
                return await self._connect_by_grpc(wanted, deadline)
            except TimeoutError as exc:
                reason = "nobody answered there; does the process run, is the port open?"
                raise ConnectFailed(address, reason, timeout_s) from exc
            except ConnectFailed as exc:
                if not retry:
                    raise
                pause_s = next(pauses)
                if pause_s >= deadline.remaining_s():
                    raise ConnectFailed(address, exc.reason, timeout_s) from exc
                await asyncio.sleep(pause_s)

    async def _connect_locally(self, channel: SocketChannel, wanted: _Wanted, limit_s: float) -> Link | None:
        """The link over the local channel; None if the handshake fails there, and the channel is closed then.

        Whatever is wrong with the channel, gRPC has the last word: there it is the address itself that is asked.
        """
        handshake = self._credentials.client_handshake(wanted.role, wanted.expected)
        try:
            async with asyncio.timeout(limit_s):
                await prove_client(channel, handshake)
        except (TransportError, TimeoutError) as exc:
            channel.abort("the handshake failed")
            reason = str(exc) or f"no answer for {limit_s:.1f} s"
            logger.info("no local channel to %s, so gRPC is used: %s", wanted.address, reason)
            return None
        except BaseException:
            channel.abort("the handshake was cancelled")
            raise
        return self._link(wanted, channel, handshake, _grpc_connection(wanted.address))

    async def _connect_by_grpc(self, wanted: _Wanted, deadline: Deadline) -> Link:
        handshake = self._credentials.client_handshake(wanted.role, wanted.expected)
        connection = _grpc_connection(wanted.address)
        try:
            async with asyncio.timeout(deadline.wait_s()):
                channel = GrpcClientChannel(connection.stream_stream(SESSION_PATH)(), wanted.address)
                await prove_client(channel, handshake)
        except BaseException:
            await connection.close()
            raise
        return self._link(wanted, channel, handshake, connection)

    def _link(
        self, wanted: _Wanted, channel: Channel, handshake: ClientHandshake, connection: grpc.aio.Channel
    ) -> Link:
        keys = handshake.session
        session = Session(
            self._io,
            channel,
            handshake.peer,
            role=wanted.role,
            id=keys.session_id,
            handler=wanted.handler or NullHandler(),
            silence_limit_s=self._silence_limit_s,
            by_me=True,
        )
        host, port = split_address(wanted.address)
        fork.note_peer_port(port, host)
        link = Link(self._io, wanted.address, session, connection, RequestProver(keys), self.links.discard)
        self.links.add(link)
        return link


def _grpc_connection(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
