"""A peer that has gone is an error of the operation, also where the program lets SIGPIPE end it, as commands do."""

from __future__ import annotations

import ast
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import rpcdist
from rpcdist.ids import Identity
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, TlsSocket
from rpcdist.transport.io_loop import IoLoop

LIMIT_MS = 20_000
LIMIT_S = 20
TOKEN = b"a token for these tests only"
# The ends of the names of sockets. The other `send`s are of sessions, peers and coroutines.
SOCKETS = ("socket", "sock", "connection", "write_end")


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The SIGPIPEs that would have ended a program that lets them."""
    came: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGPIPE, before)


@contextmanager
def tls_ends() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    tls = TlsIdentity(issued_certificates(TOKEN, "default", lambda: Identity("worker", 0, 1)))
    with ExitStack() as stack:
        made = []
        for each, is_server in zip(socket.socketpair(), (False, True), strict=True):
            context, fingerprint = tls.ssl_context(is_server)
            made.append(stack.enter_context(TlsSocket(each, context, is_server, fingerprint)))
        client, server = made
        while not client.shake_hands() & server.shake_hands():
            assert select.select(made, [], [], LIMIT_S)[0], "the handshake did not come to its end"
        yield client, server


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[StreamSocket, StreamSocket]]:
    with ExitStack() as stack:
        if request.param == "tls":
            yield stack.enter_context(tls_ends())
        else:
            client, server = socket.socketpair()
            yield stack.enter_context(client), stack.enter_context(server)


def test_sending_to_a_closed_end(ends: tuple[StreamSocket, StreamSocket], signals: list[int]) -> None:
    here, there = ends
    here.setblocking(False)
    there.close()
    with pytest.raises(OSError):  # the first one may still be taken
        for _ in range(3):
            here.send(b"x", NO_SIGPIPE)
            here.sendmsg([b"x"], (), NO_SIGPIPE)
    here.close()
    assert not signals
    assert signal.SIGPIPE not in signal.sigpending()
    assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_reading_what_makes_tls_answer(signals: list[int]) -> None:
    """A record that is none has OpenSSL send an alert while it reads, to an end that may be gone."""
    with tls_ends() as (here, there):
        os.write(there.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        with socket.socket(fileno=os.dup(there.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)
        with pytest.raises(OSError, match=r"(?i)decryption|bad record"):
            while True:  # first come the tickets of the handshake
                with suppress(BlockingIOError):
                    here.recv(100)
    assert not signals
    assert signal.SIGPIPE not in signal.sigpending()
    assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_io_loop_writes_without_the_signal(signals: list[int]) -> None:
    """asyncio and uvloop, on which stores and the health port speak, pass no flags."""
    loop = IoLoop()
    loop.start_thread()
    try:

        async def blocked() -> set[int]:
            return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

        assert signal.SIGPIPE in loop.run(blocked(), LIMIT_S)
    finally:
        loop.close()


def test_every_send_of_a_socket_goes_without_the_signal() -> None:
    root = Path(rpcdist.__file__).parent
    places = [
        path for folder in (root, *(root / name for name in ("collectives", "autograd"))) for path in files(folder)
    ]
    sends = [(path, call) for path in places for call in sends_of_sockets(path)]
    missing = [f"{path}:{call.lineno}" for path, call in sends if "NO_SIGPIPE" not in ast.unparse(call)]
    assert len(sends) > 10
    assert not missing


def files(folder: Path) -> list[Path]:
    """The links to the packages beside `rpcdist` are followed, whatever Python's `rglob` does."""
    return sorted(folder.resolve().rglob("*.py"))


def sends_of_sockets(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text())
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("send", "sendmsg", "sendall")
        and ast.unparse(node.func.value).rpartition(".")[2].lower().endswith(SOCKETS)
    ]
