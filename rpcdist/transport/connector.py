"""Opens links to other processes: over a Unix socket or TCP where that is possible, else over gRPC.

On one host, the address of a server leads to the name of its Unix socket. Between hosts, gRPC is asked first: once the
server has proven itself there, and before this process has done so, its TCP port is known from the handshake, and is
tried. Whatever goes wrong on a raw socket leaves gRPC, which stands already: nothing is sent twice, and addresses that
are translated on the way, or ports that are closed, cost a moment and no error.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc.aio

from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import AuthenticationFailed, ConnectFailed, TransportError
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage, try_for_descriptor
from rpcdist.time_limits import (
    CONNECT_FIRST_PAUSE_S,
    CONNECT_LONGEST_PAUSE_S,
    LOCAL_HANDSHAKE_LIMIT_S,
    REFUSAL_LIMIT_S,
    TCP_CHANNEL_LIMIT_S,
)
from rpcdist.transport import fork
from rpcdist.transport._channels.channel import DirectChannel, ReadChannel
from rpcdist.transport._channels.channel_choice import Channels, allowed_channels
from rpcdist.transport._channels.grpc_channel import GrpcClientChannel, connect_grpc, grpc_ends
from rpcdist.transport._channels.proving import prove_client
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.stream_sockets import connect_tcp, connect_unix, local_name
from rpcdist.transport._channels.tls_pipe import connected_pipe
from rpcdist.transport._striping.stripe_connection import StripePlace
from rpcdist.transport._striping.stripe_taker import PAYLOAD_TAKER, payload_purpose
from rpcdist.transport._tls.tls_policy import TLS_VARIABLE
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.addresses import split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.link import Link
from rpcdist.transport.roles import SOCKET_ROLE, socket_purpose
from rpcdist.transport.session import NullHandler, Session, SessionHandler
from rpcdist.transport.unary_proof import SESSION_PATH, RequestProver
from rpcdist.transport.unix_sockets import names_senders

logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """The link that a caller asks for; see `Connector.connect`."""

    address: str
    role: str
    expected: Identity | None
    handler: SessionHandler | None
    passed_over: list[tuple[str, str]]  # grows while better channels are tried in vain


class Connector:
    """The opening side of a process. Use it on the I/O loop.

    Attributes:
        links: the open ones.
        ended_traffic: the bytes of the others; see `Session.traffic`.

    Args:
        io: the I/O loop that the links run on.
        credentials: what this process proves itself with.
        silence_limit_s: silence after which a peer is declared lost, in seconds.
    """

    def __init__(self, io: IoLoop, credentials: Credentials, silence_limit_s: float) -> None:
        self.links: set[Link] = set()
        self.ended_traffic: Counter[tuple[str, str]] = Counter()
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
        wanted = _Wanted(address, role, expected, handler, [])
        deadline = Deadline.after(timeout_s)
        # Who takes no messages makes unary calls only, and gRPC's connection is there for these.
        channels = allowed_channels() if handler is not None else Channels(local=False, tcp=False)
        may_be_local = channels.local
        try:
            async with asyncio.timeout(deadline.wait_s()):
                await self._credentials.tls_policy.check_plain(split_address(address)[0])
        except TimeoutError as exc:
            raise ConnectFailed(address, "nobody has said which address that name stands for", timeout_s) from exc
        pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S)
        while True:
            try:
                if may_be_local:
                    limit = deadline.earlier(Deadline.after(min(timeout_s / 2, LOCAL_HANDSHAKE_LIMIT_S)))
                    try:
                        return await self._connect_raw(connect_unix(local_name(address)), wanted, limit)
                    except (TransportError, TimeoutError) as exc:
                        logger.info("no local channel to %s, so the network is used: %s", address, _reason(exc))
                        wanted.passed_over.append(("local", _reason(exc)))
                        may_be_local = False
                    except OSError as exc:  # nobody there; perhaps not yet
                        if own_shortage(exc) is not None:
                            raise
                        logger.debug("no local channel to %s: %s", address, exc)
                try_for_descriptor()
                return await self._connect_by_grpc(wanted, channels.tcp, deadline)
            except TimeoutError as exc:
                silence = "nobody answered there; does the process run, is the port open?"
                raise ConnectFailed(address, own_shortage() or silence, timeout_s) from exc
            except AuthenticationFailed:
                raise
            except (OSError, RuntimeError, MemoryError) as exc:
                reason = self._passing_reason(exc)
                if reason is None:
                    raise
                pause_s = next(pauses)
                if not retry:
                    raise ConnectFailed(address, reason) from exc
                if pause_s >= deadline.remaining_s():
                    raise ConnectFailed(address, reason, timeout_s) from exc
                await asyncio.sleep(pause_s)

    def _passing_reason(self, exc: Exception) -> str | None:
        """Why an attempt failed that may be repeated: nobody listened, or this process lacked something itself."""
        if (shortage := own_shortage(exc)) is not None:
            return shortage
        if not isinstance(exc, ConnectFailed):
            return None
        policy = self._credentials.tls_policy
        if not policy.encrypts_grpc:
            return f"{exc.reason} ({TLS_VARIABLE} is off here; is it off there, too?)"
        if policy.files is not None:
            return f"{exc.reason} (or does not trust {self._credentials.tls_source}, or they expired by its clock)"
        return exc.reason

    async def _connect_raw(
        self,
        connecting: Coroutine[Any, Any, socket.socket],
        wanted: _Wanted,
        limit: Deadline,
        tcp: tuple[str, int] | None = None,
    ) -> Link:
        """The link over a raw socket; `tcp`: where it leads.

        Raises:
            OSError: nobody was there. (`TransportError` is one, too.)
            TransportError, TimeoutError: the handshake failed; whatever is wrong, gRPC has the last word.
        """
        async with asyncio.timeout(limit.wait_s()):
            used, handshake = await self._proven(connecting, wanted)
        channel = SocketChannel(used, wanted.address)
        return self._link(wanted, channel, handshake, None, tcp)

    async def _proven(
        self, connecting: Coroutine[Any, Any, socket.socket], wanted: _Wanted, purpose: str = ""
    ) -> tuple[socket.socket | TlsSocket, ClientHandshake]:
        """A raw connection whose two ends have proven themselves."""
        raw = await connecting
        used: socket.socket | TlsSocket = raw
        try:
            used, pipe, ends = await connected_pipe(raw, wanted.address, self._credentials)
            handshake = self._credentials.client_handshake(wanted.role, wanted.expected, purpose=purpose, channel=ends)
            await prove_client(pipe, handshake)
            names_senders(raw, on=False)
        except BaseException:
            used.close()
            raise
        return used, handshake

    async def _open_payload_connections(
        self, place: tuple[str, int], wanted: _Wanted, session_id: bytes, count: int
    ) -> list[socket.socket | TlsSocket]:
        """Those that carry a session's large messages; see `OpenConnections`."""
        opened: list[socket.socket | TlsSocket] = []
        wanted = wanted._replace(role=SOCKET_ROLE)
        try:
            async with asyncio.timeout(TCP_CHANNEL_LIMIT_S):
                for index in range(count):
                    purpose = socket_purpose(PAYLOAD_TAKER, payload_purpose(session_id, StripePlace(index, count)))
                    opened.append((await self._proven(connect_tcp(*place), wanted, purpose))[0])
        except BaseException:
            for connection in opened:
                connection.close()
            raise
        return opened

    async def _connect_by_grpc(self, wanted: _Wanted, may_be_tcp: bool, deadline: Deadline) -> Link:
        """The link over gRPC, or over TCP where the server is reached in that way, too."""
        connection, ends = self._grpc_connection(wanted.address)
        handshake = self._credentials.client_handshake(wanted.role, wanted.expected, channel=ends)

        async def try_tcp(handshake: ClientHandshake) -> Link | None:
            return await self._connect_by_tcp(wanted, handshake)

        try:
            async with asyncio.timeout(deadline.wait_s()):
                call: Any = connection.stream_stream(SESSION_PATH)()
                tls = self._credentials.tls_policy.encrypts_grpc
                channel = GrpcClientChannel(call, wanted.address, tls)
                link = await prove_client(channel, handshake, try_tcp if may_be_tcp else None)
        except AuthenticationFailed as exc:
            await connection.close()
            source = self._credentials.tls_source
            if handshake.failure is None and source is not None:  # it was TLS that failed
                await self._tell(wanted)
                raise AuthenticationFailed(f"{exc} This process uses {source}.") from exc
            raise
        except BaseException:
            await connection.close()
            raise
        if link is not None:
            channel.abort("TCP is used")
            await connection.close()  # an idle one would take a descriptor at both ends
            return link
        return self._link(wanted, channel, handshake, connection)

    async def _tell(self, wanted: _Wanted) -> None:
        """Has a process of this host refuse the token in a handshake, which it logs: of TLS it hears nothing."""
        limit = Deadline.after(REFUSAL_LIMIT_S)
        with suppress(OSError, TimeoutError):
            link = await self._connect_raw(connect_unix(local_name(wanted.address)), wanted, limit)
            await link.close()

    async def _connect_by_tcp(self, wanted: _Wanted, proven: ClientHandshake) -> Link | None:
        """The link to a server that has proven itself on gRPC; None if its TCP port does not lead there."""
        if proven.other_way is None:
            return None
        server, port = proven.other_way
        host, _ = split_address(wanted.address)
        limit = Deadline.after(TCP_CHANNEL_LIMIT_S)
        try:
            wanted = wanted._replace(expected=server)
            return await self._connect_raw(connect_tcp(host, port), wanted, limit, (host, port))
        except (OSError, RuntimeError) as exc:  # RuntimeError: no thread could be started to look up the name
            logger.info("no TCP channel to %s, so gRPC is used: %s", wanted.address, _reason(exc))
            wanted.passed_over.append(("tcp", f"port {port}: {_reason(exc)}"))
            return None

    def _ended(self, link: Link) -> None:
        self.links.discard(link)
        self.ended_traffic.update(link.session.traffic())

    def _grpc_connection(self, address: str) -> tuple[grpc.aio.Channel, str]:
        """One of its own for each link, and what both sides call it."""
        shown = self._credentials.tls.certificate() if self._credentials.tls_policy.encrypts_grpc else None
        return connect_grpc(address, shown), grpc_ends(shown and shown.fingerprint)

    def _link(
        self,
        wanted: _Wanted,
        channel: ReadChannel | DirectChannel,
        handshake: ClientHandshake,
        connection: grpc.aio.Channel | None,
        tcp: tuple[str, int] | None = None,
    ) -> Link:
        keys = handshake.session
        opener = partial(self._open_payload_connections, tcp, wanted, keys.session_id) if tcp else None
        session = Session(
            self._io,
            channel,
            handshake.peer,
            role=wanted.role,
            id=keys.session_id,
            handler=wanted.handler or NullHandler(),
            silence_limit_s=self._silence_limit_s,
            by_me=True,
            has_payload_connections=tcp is not None,
            open_connections=opener,
        )
        host, port = split_address(wanted.address)
        fork.note_peer_port(port, host)
        prover = RequestProver(keys)

        def connect() -> grpc.aio.Channel:
            return self._grpc_connection(wanted.address)[0]

        link = Link(self._io, wanted.address, session, connect, connection, prover, self._ended)
        link.passed_over = tuple(wanted.passed_over)
        self.links.add(link)
        return link


def _reason(exc: Exception) -> str:
    return str(exc) or "no answer in time"
