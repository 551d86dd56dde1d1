"""Connections to gRPC that have made no call: too many are ended, and none that calls meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc.aio
import pytest

from rpcdist.transport._channels.grpc_channel import connect_grpc
from rpcdist.transport._server.admission import MAX_UNPROVEN, Origin
from rpcdist.transport._server.silent_connections import SilentConnections

MOST = MAX_UNPROVEN // 2  # of one host
TOO_MANY = 3
AT_ONCE_S = 0.5


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    """The remote ends of connections to a port of this process, in the order in which they were accepted."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=MOST))
        clients = []
        for _ in range(MOST + TOO_MANY):
            clients.append(held.enter_context(socket.create_connection(listener.getsockname())))
            held.enter_context(listener.accept()[0])
        yield clients


def begin(silent: SilentConnections, clients: list[socket.socket]) -> None:
    silent.ports.add(clients[0].getpeername()[1])
    for _ in clients:
        silent.begun()


def is_ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


async def test_a_connection_that_is_about_to_call_is_no_reason_for_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine, a worker that began TLS just before the check was reported as one with another token."""
    checks: list[Callable[[], None]] = []

    def call_later(delay_s: float, check: Callable[[int], None], num_begun: int) -> asyncio.Handle:
        checks.append(partial(check, num_begun))
        return asyncio.get_running_loop().call_soon(list)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    silent = SilentConnections(lambda: 0)
    silent.count()
    silent.calls(Origin("10.0.0.1", "1"))
    silent.count()
    checks.pop()()  # the second connection is new
    assert len(checks) == 1 and not caplog.records
    silent.calls(Origin("10.0.0.1", "2"))
    checks.pop()()
    assert not checks and not caplog.records
    silent.count()
    checks.pop()()
    assert "failed in TLS" in caplog.text and not checks


async def test_a_failed_attempt_to_connect_is_not_followed_by_one_of_grpc_itself() -> None:
    """A worker that came before rank 0 listened left a second connection in TLS, and rank 0 reported another token."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with connect_grpc("127.0.0.1:{1}".format(*listener.getsockname()), None) as channel:
            call: Any = channel.unary_unary("/nothing")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"")
            listener.listen()
            listener.setblocking(False)
            with pytest.raises(TimeoutError):  # the pause of gRPC was a tenth of a second
                async with asyncio.timeout(AT_ONCE_S):
                    await asyncio.get_running_loop().sock_accept(listener)


def test_as_many_as_are_too_many_are_ended(clients: list[socket.socket]) -> None:
    begin(SilentConnections(lambda: 0), clients)
    assert sum(map(is_ended, clients)) == TOO_MANY


def test_a_connection_that_calls_while_others_are_examined_is_left_alone(
    clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of 192 workers that joined at once were handled during the examination, and their joins failed."""
    silent = SilentConnections(lambda: 0)
    find = silent._found

    def find_and_call() -> dict[Origin, int]:
        found = find()
        for end in found:
            silent.calls(end)
        return found

    monkeypatch.setattr(silent, "_found", find_and_call)
    begin(silent, clients)
    assert not any(map(is_ended, clients))
