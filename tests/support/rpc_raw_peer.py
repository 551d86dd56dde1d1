"""A peer written by hand on bare gRPC: it may lack the token, and may send what no worker would."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import grpc
import grpc.aio
import rpc_victim_functions as functions
from chunk_envelopes import messages_of

from rpcdist import rpc
from rpcdist._proto import handshake_pb2, rpc_pb2
from rpcdist.ids import Identity
from rpcdist.testing import RpcWorld, eventually
from rpcdist.transport._channels.grpc_channel import connect_grpc, grpc_ends
from rpcdist.transport._framing.frames import frame
from rpcdist.transport._tls.certificate import Certificate
from rpcdist.transport._tls.job_authority import JobAuthority
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.keys import SessionKeys
from rpcdist.transport.wire_messages import ReplyMessage

__all__ = [
    "SESSION",
    "STRANGER",
    "RawClient",
    "answers_of",
    "call_raw",
    "connected",
    "end_of_session",
    "run_on_loop",
    "status_of",
    "unharmed",
]

SESSION = "/rpcdist.Rpc/Session"
STRANGER = Identity("stranger", 77, 12345)
T = TypeVar("T")

# gRPC's poller keeps the loop that it has seen first; a test that closes it makes noise in the next one.
_runner = asyncio.Runner()
atexit.register(_runner.close)


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    return _runner.run(coroutine)


@contextmanager
def unharmed(world: RpcWorld) -> Iterator[str]:
    """Where worker a listens. It and its connection to worker b come out of the block as they went in."""
    before = world["a"].run(functions.connection_to, "b"), world["b"].run(functions.connection_to, "a")
    yield world["a"].run(functions.address)
    assert (world["a"].run(functions.connection_to, "b"), world["b"].run(functions.connection_to, "a")) == before
    assert world["b"].run(rpc.rpc_sync, "a", functions.pid) == world["a"].pid
    eventually(lambda: world["a"].run(functions.num_unproven) == 0, "no handshake is open")
    assert "Traceback" not in world["a"].output(), world["a"].output()


@cache
def certificate_of_job() -> Certificate:
    """The certificate of a peer with the token."""
    return JobAuthority(os.environ["RPCDIST_TOKEN"].encode()).issue(STRANGER, "default")


def connected(address: str) -> Any:
    """A channel for bytes; grpc's types know only those of messages."""
    return connect_grpc(address, certificate_of_job())


async def status_of(awaitable: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    try:
        result = await asyncio.wait_for(awaitable, 20.0)
    except grpc.aio.AioRpcError as exc:
        return exc.code(), exc.details() or ""
    return grpc.StatusCode.OK, repr(result)


async def call_raw(channel: Any, path: str, request: bytes, metadata: Any = ()) -> tuple[Any, str]:
    if path == SESSION:

        async def session() -> object:
            call = channel.stream_stream(path)(metadata=metadata)
            await call.write(request)
            while (reply := await call.read()) is not grpc.aio.EOF:
                pass
            return reply

        return await status_of(session())
    return await status_of(channel.unary_unary(path)(request, metadata=metadata))


class RawClient:
    """A hand-written peer that holds the token."""

    def __init__(self, channel: Any, role: str = "rpc", identity: Identity = STRANGER) -> None:
        self.call = channel.stream_stream(SESSION)()
        token = os.environ["RPCDIST_TOKEN"].encode()
        ends = grpc_ends(certificate_of_job().fingerprint)
        self._handshake = ClientHandshake(token, "default", role, identity, channel=ends)

    async def prove(self) -> SessionKeys:
        await self._send(self._handshake.start())
        while not self._handshake.done:
            reply = self._handshake.receive(handshake_pb2.Handshake.FromString(await self.call.read()))
            if reply is not None:
                await self._send(reply)
            self._handshake.check()
        return self._handshake.session

    async def _send(self, step: handshake_pb2.Handshake) -> None:
        await self.call.write(step.SerializeToString())

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """How the server ended the session."""

        async def read() -> None:
            while await self.call.read() is not grpc.aio.EOF:
                pass

        return await status_of(read())


def end_of_session(address: str, envelopes: list[bytes], role: str = "rpc") -> tuple[grpc.StatusCode, str]:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with connected(address) as channel:
            client = RawClient(channel, role)
            await client.prove()
            for envelope in envelopes:
                await client.call.write(envelope)
            return await client.end()

    return run_on_loop(run())


def answers_of(address: str, messages: list[rpc_pb2.Message]) -> list[ReplyMessage]:
    """The answers of a worker to calls of a peer with the token."""

    async def run() -> list[ReplyMessage]:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            await client.call.write(b"".join(map(frame, messages)))
            got: list[ReplyMessage] = []
            async with asyncio.timeout(20.0):
                while len(got) < len(messages):
                    found = messages_of(await client.call.read())
                    got += [message for message in found if isinstance(message, ReplyMessage)]
            client.call.cancel()
            return got

    return run_on_loop(run())
