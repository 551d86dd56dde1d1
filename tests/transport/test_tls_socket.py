"""The TLS socket: every byte once and in order whatever the socket takes, ends, and peers that speak no TLS."""

from __future__ import annotations

import os
import random
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rpcdist.ids import Identity
from rpcdist.transport._tls.tls_identity import TlsIdentity, issued_certificates
from rpcdist.transport._tls.tls_socket import TlsSocket

LIMIT_MS = 20_000
TOKEN = b"a token for these tests only"


def identity(token: bytes = TOKEN, name: str = "worker") -> TlsIdentity:
    return TlsIdentity(issued_certificates(token, "default", lambda: Identity(name, 0, 1)))


made: list[TlsSocket] = []


@pytest.fixture(autouse=True)
def closed_ends() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def end(raw: socket.socket, server_side: bool, token: bytes = TOKEN) -> TlsSocket:
    """The test goes on with the socket itself."""
    return wrap(raw.dup(), *_order(identity(token), server_side))


def wrap(raw: socket.socket, context: ssl.SSLContext, server_side: bool, fingerprint: str) -> TlsSocket:
    made.append(TlsSocket(raw, context, server_side, fingerprint))
    return made[-1]


def _order(tls: TlsIdentity, server_side: bool) -> tuple[ssl.SSLContext, bool, str]:
    context, fingerprint = tls.ssl_context(server_side)
    return context, server_side, fingerprint


def shake(client: TlsSocket, server: TlsSocket) -> None:
    """Both are on this thread, and each sends little."""
    for _ in range(10):
        if client.shake_hands() & server.shake_hands():
            return
    raise AssertionError("the handshake did not come to its end")


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.fixture
def pair(raw: tuple[socket.socket, socket.socket]) -> tuple[TlsSocket, TlsSocket]:
    client, server = end(raw[0], False), end(raw[1], True)
    shake(client, server)
    return client, server


def wait(connection: TlsSocket, event: int) -> None:
    poller = select.poll()
    poller.register(connection.fileno(), event)
    assert poller.poll(LIMIT_MS), "nothing moved"


def send_all(connection: TlsSocket, parts: list[memoryview]) -> None:
    """As a channel does: after a short count with the rest."""
    while parts:
        try:
            sent = connection.sendmsg(parts)
        except BlockingIOError:
            wait(connection, select.POLLOUT)
            continue
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def receive(connection: TlsSocket, size: int, rooms: random.Random) -> bytes:
    """Into places of all sizes; waits for the socket only where nothing is buffered."""
    data = bytearray(size)
    got = 0
    while got < size:
        place = memoryview(data)[got : got + rooms.choice((1, 5, 4096, 100_000))]
        try:
            num_bytes = connection.recv_into(place)
        except BlockingIOError:
            assert not connection.has_buffered
            wait(connection, select.POLLIN)
            continue
        assert num_bytes, "it ended"
        got += num_bytes
    return bytes(data)


def test_both_name_the_same_ends(pair: tuple[TlsSocket, TlsSocket]) -> None:
    assert pair[0].ends() == pair[1].ends()
    assert len(pair[0].ends()) < 170


def test_all_bytes_arrive_both_ways_at_once_through_small_sockets(
    raw: tuple[socket.socket, socket.socket], pair: tuple[TlsSocket, TlsSocket]
) -> None:
    for connection in raw:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    size, failures = 3_000_000, []
    data = [random.Random(seed).randbytes(size) for seed in (0, 1)]

    def write(side: int) -> None:
        sizes, at = random.Random(side), 0
        view = memoryview(data[side])
        while at < size:
            parts = []
            for _ in range(sizes.randint(1, 3)):
                length = sizes.choice((0, 1, 60, 5000, 16384, 16385, 70_000, 400_000))
                parts.append(view[at : at + length])
                at += length
            send_all(pair[side], [part for part in parts if part])

    def read(side: int) -> None:
        if receive(pair[side], size, random.Random(2 + side)) != data[1 - side]:
            failures.append(f"side {side} got something else")

    def run(work: Any, side: int) -> None:
        try:
            work(side)
        except BaseException as exc:
            failures.append(repr(exc))
            raise

    threads = [threading.Thread(target=run, args=(work, side)) for work in (write, read) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_what_is_buffered_is_told_until_it_is_taken(pair: tuple[TlsSocket, TlsSocket]) -> None:
    send_all(pair[0], [memoryview(b"a" * 20_000)])
    send_all(pair[0], [memoryview(b"b" * 10)])
    room = memoryview(bytearray(20_010))
    assert pair[1].recv_into(room[:10]) == 10 and pair[1].has_buffered
    got = 10
    while pair[1].has_buffered:
        got += pair[1].recv_into(room[got:])
    assert got == 20_010 and bytes(room[20_000:]) == b"b" * 10
    with pytest.raises(BlockingIOError):
        pair[1].recv_into(room)


def test_a_full_socket_takes_nothing_twice(
    raw: tuple[socket.socket, socket.socket], pair: tuple[TlsSocket, TlsSocket]
) -> None:
    data = random.Random(5).randbytes(2_000_000)
    rest = memoryview(data)
    with pytest.raises(BlockingIOError):
        while True:
            rest = rest[pair[0].sendmsg([rest]) :]
    assert 0 < len(rest) < len(data)
    for _ in range(3):  # no room: nothing is encrypted again
        with pytest.raises(BlockingIOError):
            pair[0].sendmsg([rest])
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(receive(pair[1], len(data), random.Random(6))))
    reader.start()
    send_all(pair[0], [rest])
    reader.join()
    assert got == [data]


def test_a_peer_that_closes_and_one_that_vanishes(raw: tuple[socket.socket, socket.socket]) -> None:
    room = memoryview(bytearray(100))
    for vanish in (False, True):
        a, b = socket.socketpair()
        client, server = wrap(a, *_order(identity(), False)), wrap(b, *_order(identity(), True))
        shake(client, server)
        send_all(client, [memoryview(b"last words")])
        client._tls.close() if vanish else client.close()
        assert server.recv_into(room) == 10
        assert server.recv_into(room) == 0 == server.recv_into(room)
        server.close()
        server.close()
    with pytest.raises(OSError):
        client.sendmsg([b"too late"])


def test_what_was_changed_on_the_way_is_an_error(
    raw: tuple[socket.socket, socket.socket], pair: tuple[TlsSocket, TlsSocket]
) -> None:
    room = memoryview(bytearray(100))
    raw[0].send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record, but nobody encrypted it
    with pytest.raises(ssl.SSLError):
        pair[1].recv_into(room)


@pytest.mark.parametrize("has_unread", [False, True], ids=["nothing unread", "bytes unread"])
def test_a_broken_connection_is_an_error_and_no_end(has_unread: bool) -> None:
    """Python's ssl reports it as an end, so a rank behind a cut cable was said to have ended its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as one, listener.accept()[0] as other:
            client, server = end(one, False), end(other, True)
            shake(client, server)
            if has_unread:
                server.send(b"the last words")
                wait(client, select.POLLIN)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the last close is a reset
            os.dup2(listener.fileno(), server.fileno())  # closes the connection, without the close message of TLS
    room = memoryview(bytearray(100))
    wait(client, select.POLLHUP)
    for _ in range(2):  # it is reported again
        with pytest.raises(ConnectionResetError, match="the connection was reset, or timed out"):
            while client.recv_into(room):
                pass


@pytest.mark.parametrize("size_bytes", [4, 64])
@pytest.mark.parametrize(
    "injected", [b"\x50\x03\x03\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28"]
)
def test_what_somebody_put_behind_a_record_is_an_error_and_no_end(
    raw: tuple[socket.socket, socket.socket], pair: tuple[TlsSocket, TlsSocket], injected: bytes, size_bytes: int
) -> None:
    """Otherwise anybody who can write into the connection could make a peer look as if it had ended."""
    assert pair[0].sendmsg([b"true"]) == 4
    raw[0].send(injected)
    room = memoryview(bytearray(size_bytes))
    with pytest.raises(ssl.SSLError) as failed:
        for _ in range(2):
            assert pair[1].recv_into(room) == 4
    assert not isinstance(failed.value, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def test_a_record_cut_short_by_an_interruption_ends_the_connection(
    pair: tuple[TlsSocket, TlsSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def fileno(self) -> int:
            return 0

        def write(self, data: memoryview) -> int:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair[0], "_tls", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            pair[0].sendmsg([b"a frame"])
    with pytest.raises(OSError, match="broke when a write to it was interrupted"):
        pair[0].sendmsg([b"a frame"])


@pytest.mark.parametrize("wrong", ["client", "server"])
def test_another_token_fails_in_the_handshake(raw: tuple[socket.socket, socket.socket], wrong: str) -> None:
    other = b"another token of another job"
    client = end(raw[0], False, other if wrong == "client" else TOKEN)
    server = end(raw[1], True, other if wrong == "server" else TOKEN)
    with pytest.raises(ssl.SSLError):
        shake(client, server)


def test_who_speaks_no_tls_or_an_old_one_fails(raw: tuple[socket.socket, socket.socket]) -> None:
    raw[0].send(b"\x20\x00\x00\x00plain text that is long enough")
    with pytest.raises(ssl.SSLError):
        end(raw[1], True).shake_hands()
    a, b = socket.socketpair()
    with a, b:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname = False
        old.verify_mode = ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        client = wrap(a.dup(), old, False, "")
        assert not client.shake_hands()
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol|version"):
            end(b, True).shake_hands()


def test_a_server_takes_nobody_without_a_certificate(raw: tuple[socket.socket, socket.socket]) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=identity().certificate().authority.decode())
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake(wrap(raw[0].dup(), bare, False, ""), end(raw[1], True))


def test_a_greeting_without_end_is_broken_off() -> None:
    """A stranger announces a ClientHello of 128 KiB, and goes on sending."""
    record = b"\x16\x03\x01\x40\x00"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        server = wrap(listener.accept()[0], *_order(identity(), True))
        stranger.sendall(record + b"\x01\x01\xff\xff" + bytes((16 << 10) - 4))
        wait(server, select.POLLIN)
        assert not server.shake_hands()
        with pytest.raises(OSError, match="more than 32768 bytes before its TLS handshake"):
            for _ in range(4):
                stranger.sendall(record + bytes(16 << 10))
                wait(server, select.POLLIN)
                assert not server.shake_hands()
