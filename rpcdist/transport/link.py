"""A link: an authenticated connection that this process opened to the server of another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from rpcdist.errors import ConnectFailed, ProtocolViolation
from rpcdist.time_limits import CONNECTION_CLOSE_LIMIT_S, LEAVE_LIMIT_S
from rpcdist.transport._channels.grpc_channel import mapped_errors
from rpcdist.transport._framing.message_parts import parsed
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.keys import PACKAGE, Metadata, SessionKeys, cut, joined, request_metadata
from rpcdist.transport.session import Session

Reply = TypeVar("Reply", bound=Message)


@dataclass(eq=False, repr=False)
class Link:
    """A proven session with a server, and unary calls beside it. Use it on the I/O loop.

    Attributes:
        address: host:port of the server.
        passed_over: the better channels that failed, each with the reason.

    Args:
        connect: makes gRPC's connection at the first unary call, if the session uses a raw channel.
        connection: the gRPC connection of the session, which unary calls share. The link closes it.
        keys: prove the unary calls.
        on_ended: called once, when the session has ended.
    """

    io: InitVar[IoLoop]
    address: str
    session: Session
    _connect: Callable[[], grpc.aio.Channel]
    _connection: grpc.aio.Channel | None
    _keys: SessionKeys
    _on_ended: Callable[[Link], object]
    passed_over: tuple[tuple[str, str], ...] = ()
    _num_calls: int = 0  # unary
    _closes: bool = False  # at this end

    def __post_init__(self, io: IoLoop) -> None:
        self.peer = self.session.peer  # the process that answered at the address
        self._task = io.spawn(self._run(), f"rpcdist link to {self.peer.name}")

    def __repr__(self) -> str:
        return f"<Link to {self.peer.name} at {self.address}, {self.session!r}>"

    async def _run(self) -> None:
        try:
            await self.session.run()
        finally:
            self._on_ended(self)
            # A stopping server answers its calls before it ends its sessions, but the replies may arrive after the
            # session has ended, so the connection stays open for a moment.
            if self._connection is not None:
                await self._connection.close(None if self._closes else LEAVE_LIMIT_S)

    async def unary(
        self, service: str, method: str, request: Message, reply_type: type[Reply], timeout_s: float | None
    ) -> Reply:
        """Calls a service method.

        Args:
            service: name without the package, such as `"Store"`.
            method: such as `"Get"`.
            timeout_s: limit in seconds; None waits as long as the peer lives.

        Raises:
            DeadlineExceeded, ConnectFailed, AuthenticationFailed, TransportError.

        Cancellation also cancels the handler at the other end.
        """
        path = f"/{PACKAGE}.{service}/{method}"
        with self._calling(path) as metadata:
            call: Any = self._for_unary().unary_unary(path, type(request).SerializeToString)
            return parsed(reply_type, await call(request, timeout=timeout_s, metadata=metadata))

    async def in_pieces(
        self,
        service: str,
        method: str,
        request: Message,
        reply_type: type[Reply],
        piece_type: type[Message],
        timeout_s: float | None,
    ) -> Reply:
        """Like `unary`, for a method whose request and reply are streams of pieces; see [Note: pieces]."""
        path = f"/{PACKAGE}.{service}/{method}"
        with self._calling(path) as metadata:
            pieces = cut(request.SerializeToString(), piece_type)
            method_call: Any = self._for_unary().stream_stream(path)
            call = method_call(pieces, timeout=timeout_s, metadata=metadata)
            return parsed(reply_type, await joined(call, piece_type))

    def _for_unary(self) -> grpc.aio.Channel:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    @contextmanager
    def _calling(self, path: str) -> Iterator[Metadata]:
        """Yields the metadata that prove the call; turns errors of gRPC into errors of this package."""
        self._num_calls += 1
        metadata = request_metadata(self._keys, self._num_calls, path)
        if self.session.closed_reason is not None:
            raise ConnectFailed(self.address, self.session.closed_reason)
        with mapped_errors(self.address):
            try:
                yield metadata
            except asyncio.CancelledError as exc:
                self._raise_if_closed(exc)
                raise
            except (DecodeError, ProtocolViolation) as exc:
                raise ProtocolViolation(f"{self.address} sent a reply to {path} that cannot be parsed ({exc})") from exc

    def _raise_if_closed(self, exc: asyncio.CancelledError) -> None:
        """Raises if the closing connection cancelled the call, and not the call's own caller."""
        task = asyncio.current_task()
        if self.session.closed_reason is not None and (task is None or not task.cancelling()):
            raise ConnectFailed(self.address, self.session.closed_reason) from exc

    async def close(self, timeout_s: float = CONNECTION_CLOSE_LIMIT_S) -> None:
        """Ends the session and the connection; idempotent; bounded."""
        self._closes = True
        self.session.close("closed at this end")
        await asyncio.wait({self._task}, timeout=timeout_s)
