"""A link: this process's own authenticated connection to another one's server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ConnectFailed, ProtocolViolation, RpcdistError, TransportError
from rpcdist.ids import Identity
from rpcdist.transport._channels.grpc_channel import CHANNEL_OPTIONS, GrpcClientChannel, mapped_errors
from rpcdist.transport._channels.local_connections import LocalChannel, connect_local
from rpcdist.transport.handshake import ClientHandshake, SessionKeys, request_proof
from rpcdist.transport.session import NullHandler, Session, SessionHandler, expect_handshake

if TYPE_CHECKING:
    from rpcdist.transport.node import Node

__all__ = ["Link", "open_link"]

PACKAGE = "rpcdist"
SESSION_KEY = "rpcdist-session-bin"
COUNTER_KEY = "rpcdist-counter"
PROOF_KEY = "rpcdist-proof-bin"
REFUSAL_LIMIT_S = 1.0
LOCAL_LIMIT_S = 5.0  # of the handshake on the local channel; whoever is silent there for longer may not be the worker

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)


class Link:
    """A proven session with a server, and unary calls beside it. Use it on the I/O loop.

    Attributes:
        address: host:port of the server.
        peer: who answered there.
        session: the stream of envelopes.
    """

    def __init__(
        self, node: Node, address: str, channel: grpc.aio.Channel, session: Session, keys: SessionKeys
    ) -> None:
        self.address = address
        self.session = session
        self._node = node
        self._channel = channel
        self._keys = keys
        self._counter = itertools.count(1)
        self._task = node.io.spawn(self._run(), f"rpcdist link to {session.peer.name}")

    def __repr__(self) -> str:
        return f"<Link to {self.peer.name} at {self.address}, {self.session!r}>"

    @property
    def peer(self) -> Identity:
        return self.session.peer

    async def _run(self) -> None:
        try:
            await self.session.run()
        finally:
            self._node.links.discard(self)
            await self._channel.close()

    async def unary(
        self, service: str, method: str, request: Message, reply_type: type[Reply], timeout_s: float | None
    ) -> Reply:
        """One call of a service method.

        Args:
            service: without the package, e.g. `"Store"`.
            method: e.g. `"Get"`.
            request: the method's request.
            reply_type: the class of its reply.
            timeout_s: limit in seconds; None waits as long as the peer lives.

        Raises:
            DeadlineExceeded, ConnectFailed, AuthenticationFailed, TransportError.

        Cancelling it cancels the handler at the other end.
        """
        path = f"/{PACKAGE}.{service}/{method}"
        counter = next(self._counter)
        metadata = (
            (SESSION_KEY, self._keys.session_id),
            (COUNTER_KEY, str(counter)),
            (PROOF_KEY, request_proof(self._keys.key, path, counter)),
        )
        if self.session.closed_reason is not None:
            raise ConnectFailed(self.address, self.session.closed_reason)
        call = self._channel.unary_unary(path, type(request).SerializeToString, reply_type.FromString)
        with mapped_errors(self.address):
            try:
                reply: Reply = await call(request, timeout=timeout_s, metadata=metadata)
            except asyncio.CancelledError as exc:
                task = asyncio.current_task()
                if self.session.closed_reason is not None and (task is None or not task.cancelling()):
                    raise ConnectFailed(self.address, self.session.closed_reason) from exc
                raise
            except DecodeError as exc:
                raise ProtocolViolation(f"{self.address} sent a reply to {path} that cannot be parsed") from exc
        return reply

    async def close(self, timeout_s: float = 5.0) -> None:
        """Ends the session and the connection; idempotent; bounded."""
        self.session.close("closed at this end")
        await asyncio.wait({self._task}, timeout=timeout_s)


async def open_link(
    node: Node,
    address: str,
    *,
    role: str,
    timeout_s: float,
    handler: SessionHandler | None = None,
    expected: Identity | None = None,
    retry: bool = True,
) -> Link:
    """Connects, proves the token in both directions and starts the session.

    Args:
        node: this process.
        address: host:port.
        role: what the connection is for.
        timeout_s: limit for all of it, in seconds.
        retry: whether to try again, until then, while nobody listens there.
        handler: gets the session's messages; without one only unary calls are possible.
        expected: who should answer there.

    Raises:
        ConnectFailed: nobody answered.
        AuthenticationFailed: the token is wrong on one side, or somebody else answered than the one expected.

    Cancellation closes the connection.
    """
    deadline = time.monotonic() + timeout_s

    def hello() -> ClientHandshake:
        return ClientHandshake(
            node.token, node.job, role, node.identity, expected=expected, token_source=node.token_source
        )

    may_be_local = handler is not None  # else it makes unary calls only, and gRPC's connection is there for these
    attempt = 0
    while True:
        handshake = hello()
        if may_be_local and (local := connect_local(address)) is not None:
            if await _prove_local(local, address, handshake, min(timeout_s / 2, LOCAL_LIMIT_S)):
                # The channel is for unary calls beside the channel, and connects with the first of them.
                channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                return _link(node, address, channel, local, handshake, role, handler)
            may_be_local = False
            handshake = hello()
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                stream = GrpcClientChannel(channel.stream_stream(f"/{PACKAGE}.Rpc/Session")(), address)
                await _prove(stream, handshake)
            break
        except TimeoutError as exc:
            await channel.close()
            raise ConnectFailed(
                address, "nobody answered there; does the process run, is the port open?", timeout_s
            ) from exc
        except ConnectFailed as exc:
            await channel.close()
            if not retry:
                raise
            attempt += 1
            pause_s = random.uniform(0, min(0.02 * 2**attempt, 0.5))  # jitter: many workers wait for one coordinator
            if time.monotonic() + pause_s >= deadline:
                raise ConnectFailed(address, exc.reason, timeout_s) from exc
            await asyncio.sleep(pause_s)
        except BaseException:
            await channel.close()
            raise
    return _link(node, address, channel, stream, handshake, role, handler)


async def _prove_local(stream: LocalChannel, address: str, handshake: ClientHandshake, limit_s: float) -> bool:
    """Runs the handshake on the local channel; False if that fails, and the channel is closed then.

    Whatever is wrong with the channel, gRPC has the last word: there it is the address itself that is asked.
    """
    try:
        async with asyncio.timeout(limit_s):
            await _prove(stream, handshake)
    except (TransportError, TimeoutError) as exc:
        stream.abort("the handshake failed")
        logger.info(
            "no local channel to %s, so gRPC is used: %s", address, str(exc) or f"no answer for {limit_s:.1f} s"
        )
        return False
    except BaseException:
        stream.abort("the handshake was cancelled")
        raise
    return True


def _link(
    node: Node,
    address: str,
    channel: grpc.aio.Channel,
    stream: GrpcClientChannel | LocalChannel,
    handshake: ClientHandshake,
    role: str,
    handler: SessionHandler | None,
) -> Link:
    peer, keys = handshake.peer, handshake.session
    session = Session(
        node.io,
        stream,
        peer,
        role=role,
        id=keys.session_id,
        handler=handler or NullHandler(),
        silence_limit_s=node.options.peer_timeout_s,
        by_me=True,
    )
    node.note_peer_address(address)
    link = Link(node, address, channel, session, keys)
    node.links.add(link)
    return link


async def _prove(stream: GrpcClientChannel | LocalChannel, handshake: ClientHandshake) -> None:
    await stream.write(rpc_pb2.Envelope(handshake=handshake.start()).SerializeToString())
    while not handshake.done:
        envelope = expect_handshake(await stream.read())
        reply = handshake.receive(envelope.handshake)
        if reply is not None:
            await stream.write(rpc_pb2.Envelope(handshake=reply).SerializeToString())
        if handshake.failure is not None and reply is not None:
            await _until_heard(stream)
        handshake.check()


async def _until_heard(stream: GrpcClientChannel | LocalChannel) -> None:
    """Waits, bounded, until the server has read why it was refused; a connection that closes first throws that away."""
    with suppress(RpcdistError, TimeoutError):
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            await stream.read()  # the server ends the stream
