"""Opens links to other processes: over a Unix socket or TCP if possible, otherwise over gRPC.

On one host, the address of a server determines the name of its Unix socket. Between hosts, the handshake begins over
gRPC. The server, once it has proven itself, sends its TCP port, and the connector tries that port before it proves
itself over gRPC. If the raw socket fails for any reason, the gRPC connection is still open: nothing is sent twice, and
translated addresses or closed ports cost a moment and cause no error.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import grpc.aio

from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import AuthenticationFailed, ConnectFailed, TransportError
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage, try_for_descriptor
from rpcdist.time_limits import (
    ATTEMPT_LIMIT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUICK_ANSWER_LIMIT_S,
    SIDE_ATTEMPT_LIMIT_S,
)
from rpcdist.transport import fork
from rpcdist.transport._channels.channel import ReadChannel, allowed_channels
from rpcdist.transport._channels.grpc_channel import GrpcClientChannel, connect_grpc, grpc_ends
from rpcdist.transport._channels.proving import open_proven, prove_client
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.stream_sockets import connect_tcp, connect_unix
from rpcdist.transport._tls.tls_policy import TLS_VARIABLE
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.addresses import split_address
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.keys import SESSION_PATH
from rpcdist.transport.link import Link
from rpcdist.transport.roles import SOCKET_ROLE, socket_purpose
from rpcdist.transport.session import NullHandler, Session, SessionHandler
from rpcdist.transport.striping import PAYLOAD_TAKER, payload_purpose
from rpcdist.transport.unix_sockets import local_name

logger = logging.getLogger(__name__)

_NO_ANSWER: Final = "no process answered. Check that the process runs, and that a firewall does not block the port"


class _Wanted(NamedTuple):
    """The link that a caller asks for; see `Connector.connect`."""

    address: str
    role: str
    expected: Identity | None
    handler: SessionHandler | None
    passed_over: list[tuple[str, str]]  # the better channels that failed, with reasons; grows during the attempt


class Connector:
    """The connecting side of a process. Use it on the I/O loop.

    Attributes:
        ended_traffic: the bytes of links that have ended; see `Session.traffic`.

    Args:
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
            role: the service that the connection is for.
            timeout_s: limit for the whole operation, in seconds.
            handler: gets the session's messages; without a handler only unary calls are possible.
            expected: the identity that should answer.
            retry: whether to retry until the timeout while no process listens there.

        Raises:
            ConnectFailed: no process answered.
            AuthenticationFailed: the token is wrong on one side, or another process than the expected one answered.

        Cancellation closes the connection.
        """
        wanted = _Wanted(address, role, expected, handler, [])
        deadline = Deadline.after(timeout_s)
        # A caller without a handler makes only unary calls, which use gRPC's connection.
        channels = allowed_channels() if handler is not None else frozenset[str]()
        may_be_local = "local" in channels
        try:
            async with asyncio.timeout(deadline.wait_s()):
                await self._credentials.tls_policy.check_plain(split_address(address)[0])
        except TimeoutError as exc:
            raise ConnectFailed(address, "the name could not be resolved in time", timeout_s) from exc
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        reason: str | None = None
        while True:
            began = time.monotonic()
            try:
                if may_be_local:
                    limit = deadline.earlier(Deadline.after(min(timeout_s / 2, ATTEMPT_LIMIT_S)))
                    try:
                        return await self._connect_raw(partial(connect_unix, local_name(address)), wanted, limit)
                    except (TransportError, TimeoutError) as exc:
                        logger.info("no local channel to %s, so the network is used: %s", address, _reason(exc))
                        wanted.passed_over.append(("local", _reason(exc)))
                        may_be_local = False
                    except OSError as exc:  # no process listens there, perhaps not yet
                        if own_shortage(exc) is not None:
                            raise
                        logger.debug("no local channel to %s: %s", address, exc)
                try_for_descriptor()
                return await self._connect_by_grpc(wanted, "tcp" in channels, deadline)
            except TimeoutError as exc:
                # The deadline may leave the last attempt no time; the attempt before it is then the one that says why.
                if not reason or time.monotonic() - began >= LONGEST_PAUSE_S:
                    reason = _NO_ANSWER
                raise ConnectFailed(address, own_shortage() or reason, timeout_s) from exc
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
        """The reason of a failure that another attempt may avoid: no process listened, or this process was short of a
        resource. None for other failures.
        """
        if (shortage := own_shortage(exc)) is not None:
            return shortage
        if not isinstance(exc, ConnectFailed):
            return None
        policy = self._credentials.tls_policy
        if not policy.encrypts_grpc:
            return f"{exc.reason} ({TLS_VARIABLE} is off in this process; check that it is also off in the peer)"
        if policy.files is not None:
            return (
                f"{exc.reason} (or the peer does not trust {self._credentials.tls_source}, or they have expired by the "
                "peer's clock)"
            )
        return exc.reason

    async def _connect_raw(
        self,
        connect: Callable[[], Coroutine[Any, Any, socket.socket]],
        wanted: _Wanted,
        limit: Deadline,
        tcp: tuple[str, int] | None = None,
    ) -> Link:
        """Makes the link over a raw socket; `tcp` is its address, if it is a TCP socket.

        Raises:
            OSError: no process listened there. (`TransportError` is a subclass.)
            TransportError, TimeoutError: the handshake failed; the caller then falls back to gRPC.
        """
        async with asyncio.timeout(limit.wait_s()):
            own, address = self._credentials, wanted.address
            used, handshake = await open_proven(connect, address, own, wanted.role, wanted.expected)
        channel = SocketChannel(used, wanted.address)
        return self._link(wanted, channel, handshake, None, tcp)

    async def _open_payload_connections(
        self, place: tuple[str, int], wanted: _Wanted, session_id: bytes, count: int
    ) -> list[StreamSocket]:
        """Opens the connections for a session's large messages; see `OpenConnections`."""
        opened: dict[int, StreamSocket] = {}

        async def open_one(index: int) -> None:
            purpose = socket_purpose(PAYLOAD_TAKER, payload_purpose(session_id, (index, count)))
            own, expected, connect = self._credentials, wanted.expected, partial(connect_tcp, *place)
            opened[index], _ = await open_proven(connect, wanted.address, own, SOCKET_ROLE, expected, purpose)

        try:  # in parallel: each of them takes several round trips
            async with asyncio.timeout(SIDE_ATTEMPT_LIMIT_S), asyncio.TaskGroup() as group:
                for index in range(count):
                    group.create_task(open_one(index), name=f"rpcdist payload connection {index}")
        except BaseException as exc:
            for connection in opened.values():
                connection.close()
            if isinstance(exc, BaseExceptionGroup):
                raise exc.exceptions[0] from None
            raise
        return [opened[index] for index in range(count)]

    async def _connect_by_grpc(self, wanted: _Wanted, may_be_tcp: bool, deadline: Deadline) -> Link:
        """Makes the link over gRPC, or over TCP if the server can be reached that way."""
        connection, ends = self._grpc_connection(wanted.address)
        own = self._credentials
        handshake = ClientHandshake(
            own.token, own.job, wanted.role, own.identity, channel=ends, expected=wanted.expected, credentials=own
        )
        try_tcp = partial(self._connect_by_tcp, wanted)
        try:
            async with asyncio.timeout(deadline.wait_s()):
                call: Any = connection.stream_stream(SESSION_PATH)()
                tls = self._credentials.tls_policy.encrypts_grpc
                channel = GrpcClientChannel(call, wanted.address, tls)
                link = await prove_client(channel, handshake, try_tcp if may_be_tcp else None)
        except AuthenticationFailed as exc:
            await connection.close()
            source = self._credentials.tls_source
            if handshake.failure is None and source is not None:  # TLS failed, not the handshake
                await self._fail_locally(wanted)
                raise AuthenticationFailed(f"{exc} This process uses {source}.") from exc
            raise
        except BaseException:
            await connection.close()
            raise
        if link is not None:
            channel.abort("TCP is used")
            await connection.close()  # an idle connection would take a descriptor at both ends
            return link
        return self._link(wanted, channel, handshake, connection)

    async def _fail_locally(self, wanted: _Wanted) -> None:
        """Repeats the handshake on this host without TLS: a server logs a wrong token, but no failure of TLS."""
        limit = Deadline.after(QUICK_ANSWER_LIMIT_S)
        with suppress(OSError, TimeoutError):
            link = await self._connect_raw(partial(connect_unix, local_name(wanted.address)), wanted, limit)
            await link.close()

    async def _connect_by_tcp(self, wanted: _Wanted, proven: ClientHandshake) -> Link | None:
        """Makes the link to a server that is proven over gRPC; None if its TCP port cannot be used."""
        if proven.other_way is None:
            return None
        server, port = proven.other_way
        host, _ = split_address(wanted.address)
        limit = Deadline.after(SIDE_ATTEMPT_LIMIT_S)
        try:
            wanted = wanted._replace(expected=server)
            return await self._connect_raw(partial(connect_tcp, host, port), wanted, limit, (host, port))
        except (OSError, RuntimeError) as exc:  # RuntimeError: no thread for the name lookup could be started
            logger.info("no TCP channel to %s, so gRPC is used: %s", wanted.address, _reason(exc))
            wanted.passed_over.append(("tcp", f"port {port}: {_reason(exc)}"))
            return None

    def _ended(self, link: Link) -> None:
        self.links.discard(link)
        self.ended_traffic.update(link.session.traffic())

    def _grpc_connection(self, address: str) -> tuple[grpc.aio.Channel, str]:
        """A new gRPC connection for a link, and the name that both sides give it."""
        shown = self._credentials.tls.certificate() if self._credentials.tls_policy.encrypts_grpc else None
        return connect_grpc(address, shown), grpc_ends(shown and shown.fingerprint)

    def _link(
        self,
        wanted: _Wanted,
        channel: ReadChannel | SocketChannel,
        handshake: ClientHandshake,
        connection: grpc.aio.Channel | None,
        tcp: tuple[str, int] | None = None,
    ) -> Link:
        keys, address = handshake.session, wanted.address
        opener = partial(self._open_payload_connections, tcp, wanted, keys.session_id) if tcp else None
        session = Session(
            self._io,
            channel,
            handshake.peer,
            role=wanted.role,
            id=keys.session_id,
            handler=wanted.handler or NullHandler(),
            silence_limit_s=self._silence_limit_s,
            opened_by_me=True,
            open_connections=opener,
        )
        host, port = split_address(address)
        fork.note_peer_port(port, host)
        new_connection, passed_over = lambda: self._grpc_connection(address)[0], tuple(wanted.passed_over)
        link = Link(self._io, address, session, new_connection, connection, keys, self._ended, passed_over)
        self.links.add(link)
        return link


def _reason(exc: Exception) -> str:
    return str(exc) or "no answer in time"
