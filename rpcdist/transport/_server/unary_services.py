"""The gRPC methods that other parts register, each with one request and one reply: checks the caller, runs the handler.

[Note: pieces] gRPC limits the size of a message, so a larger one travels in pieces: the request and the reply of the
method are then streams of a message with the field `data`. Pieces from unproven callers are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from rpcdist._proto import handshake_pb2
from rpcdist.errors import Overloaded, ProtocolViolation, RpcdistError, described_error
from rpcdist.ids import Identity
from rpcdist.transport._channels.grpc_channel import refuse
from rpcdist.transport._framing.message_parts import parsed
from rpcdist.transport.keys import PACKAGE, ProvenSessions, cut, joined

logger = logging.getLogger(__name__)

CALL_BYTES: Final = 16 << 10
"""The memory counted for a waiting call in addition to its request; a reply of up to this size always has room."""
MAX_BYTES_UNDER_WAY: Final = 192 << 20
"""Limit for one caller, with replies that it has not read; above the largest message that travels in pieces."""

Undo = Callable[[], object]
Method = Callable[[Identity, Any], Awaitable[Any]]
"""A service method: takes the proven caller and the request, returns the reply. Runs on the I/O loop.

Both are messages, or bytes if they travel in pieces. It may return a tuple of the reply and a function that undoes what
it has done, which is called if a reply of more than some KiB has no room, or was not delivered.
"""


@dataclass(eq=False, repr=False)
class UnaryServices(grpc.GenericRpcHandler):
    """The registered services of one listener, or of all listeners. Lives on the I/O loop.

    Args:
        proven: the sessions that calls may belong to.
        on_call: called with gRPC's name of the connection of each call.
        others: finds the handler of calls to other services.
    """

    _proven: ProvenSessions
    _on_call: Callable[[str], object]
    _others: Callable[[grpc.HandlerCallDetails], Any] = lambda details: None
    names: list[str] = field(default_factory=list)
    # By path; the last item is true for requests in pieces.
    _methods: dict[str, tuple[type[Message], Method, bool]] = field(default_factory=dict)
    _num_running: int = 0
    _num_bytes: Counter[Identity] = field(default_factory=Counter)  # in unfinished calls, by caller
    _one_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        """Serves methods of a service; replaces earlier methods of the same name."""
        for method in descriptor.methods:
            if method.name in methods:
                request_type = GetMessageClass(method.input_type)
                path = f"/{descriptor.full_name}/{method.name}"
                self._methods[path] = request_type, methods[method.name], method.client_streaming
        if descriptor.full_name not in self.names:
            self.names.append(descriptor.full_name)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call; gRPC calls this method."""
        details = handler_call_details
        return self.handler(details.method, details.invocation_metadata) or self._others(details)

    def handler(self, path: str, metadata: Any) -> Any:
        """gRPC's handler for one call; None if there is no such method.

        The proof is checked here, before the request is read, so a stranger's request is never read.
        """
        found = self._methods.get(path)
        if found is None:
            return None
        peer = self._proven.peer_of(path, metadata)
        return _refuse_unread(path) if peer is None else self._answer(path, peer, *found)

    def _answer(self, path: str, peer: Identity, request_type: type[Message], method: Method, in_pieces: bool) -> Any:
        async def reply_to(request: Any, num_bytes: int, context: Any) -> tuple[bytes, Undo | None]:
            undo: Undo | None = None
            try:
                self._count(peer, CALL_BYTES + num_bytes, context)
                reply = await method(peer, request)
                if isinstance(reply, tuple):
                    reply, undo = reply
                data: bytes = reply if in_pieces else reply.SerializeToString()
                num_bytes = len(data) if in_pieces else 2 * len(data)  # gRPC copies a whole message
                if num_bytes > CALL_BYTES:
                    self._count(peer, num_bytes - CALL_BYTES, context)
                return data, undo
            except RpcdistError as exc:
                if undo is not None:
                    undo()
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(exc))
            except Exception as exc:
                logger.exception("the handler of %s failed", path)
                await context.abort(grpc.StatusCode.INTERNAL, described_error(exc))
            raise AssertionError("`abort` raises")

        async def handle(data: bytes, context: Any) -> bytes:
            self._on_call(context.peer())
            try:
                request = parsed(request_type, data)
            except (DecodeError, ProtocolViolation) as exc:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request of {path} cannot be parsed: {exc}")
            with self._running():
                return (await reply_to(request, len(data), context))[0]

        async def handle_pieces(pieces: AsyncIterable[bytes], context: Any) -> None:
            self._on_call(context.peer())
            with self._running():
                try:
                    request = await joined(self._counting(pieces, peer, context), request_type)
                except (DecodeError, ProtocolViolation, Overloaded) as exc:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request of {path}: {exc}")
                reply, undo = await reply_to(request, 0, context)
                try:
                    for piece in cut(reply, request_type):
                        await context.write(piece)
                except BaseException:
                    if undo is not None:
                        undo()
                    raise

        if in_pieces:
            return grpc.stream_stream_rpc_method_handler(handle_pieces)
        return grpc.unary_unary_rpc_method_handler(handle)

    def _count(self, peer: Identity, num_bytes: int, context: Any) -> None:
        """Counts bytes of a call until its reply is written to the connection, or the connection breaks.

        Raises:
            Overloaded: the peer would exceed its limit.
        """
        under_way = self._num_bytes[peer]
        if under_way and under_way + num_bytes > MAX_BYTES_UNDER_WAY:
            raise Overloaded(
                f"a call of a service, or its reply, needs {num_bytes} bytes while calls of worker {peer.name!r} "
                f"already use {under_way} here; the limit is {MAX_BYTES_UNDER_WAY}. Wait for fewer keys at once, and "
                "read the replies"
            )
        self._num_bytes[peer] += num_bytes

        def is_over(_context: Any) -> None:
            self._num_bytes[peer] -= num_bytes
            if not self._num_bytes[peer]:
                del self._num_bytes[peer]

        context.add_done_callback(is_over)

    async def _counting(self, pieces: AsyncIterable[bytes], peer: Identity, context: Any) -> AsyncIterator[bytes]:
        async for piece in pieces:
            self._count(peer, len(piece), context)
            yield piece

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._one_ended.set()

    async def drain(self, timeout_s: float) -> None:
        """Waits until the calls that are being handled have their replies, or until the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_running:
                    self._one_ended.clear()
                    await self._one_ended.wait()
        except TimeoutError:
            logger.debug("%s unary calls were still running when the transport closed", self._num_running)


def _refuse_unread(path: str) -> Any:
    async def refuse_it(_requests: Any, context: Any) -> None:
        reason = f"{path} needs a proven session; open {PACKAGE}.Rpc/Session first"
        await refuse(context, handshake_pb2.Refusal(reason=reason))

    return grpc.stream_stream_rpc_method_handler(refuse_it)  # gRPC reads a stream only on demand
