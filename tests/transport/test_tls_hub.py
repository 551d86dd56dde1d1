"""Raw sockets of the collectives over TLS, which the threads that use them speak."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from socket_hubs import LIMIT_S, expect, hubs, open_hub, read_exactly, read_some, write_all

from rpcdist.errors import AuthenticationFailed
from rpcdist.testing import eventually
from rpcdist.transport._tls.tls_socket import StreamSocket, TlsSocket
from rpcdist.transport.sockets import SocketHub

Pair = tuple[StreamSocket, StreamSocket]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    with hubs(2) as (a, b):
        one, other = connect(a, b)
        with one, other:
            yield one, other


def connect(a: SocketHub, b: SocketHub, purpose: str = "a purpose") -> Pair:
    return a.connect(b.address, purpose, LIMIT_S, unix=False), expect(b, purpose)


def test_bytes_go_both_ways_at_once(pair: Pair) -> None:
    assert [type(end) for end in pair] == [TlsSocket] * 2
    data = [random.Random(seed).randbytes(8_000_000) for seed in (0, 1)]
    got: list[bytes] = [b"", b""]

    def read(side: int) -> None:
        got[side] = read_exactly(pair[side], len(data[side]))

    threads = [threading.Thread(target=write_all, args=(pair[side], data[side])) for side in (0, 1)]
    threads += [threading.Thread(target=read, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == data[::-1]


def test_a_reader_that_waits_stops_the_writer(pair: Pair) -> None:
    data, sent = bytes(1 << 20), 0
    while select.select([], [pair[0]], [], 0.2)[1]:  # until nothing has moved for so long
        with suppress(BlockingIOError):
            sent += pair[0].send(data)
        assert sent < 64 << 20, "nothing bounds what is under way"
    assert len(read_exactly(pair[1], sent)) == sent


def test_what_was_written_before_the_end_arrives(pair: Pair) -> None:
    data = b"x" * 40_000  # some records, which the buffers of every system hold
    write_all(pair[0], data)
    pair[0].close()
    assert read_exactly(pair[1], len(data)) == data
    assert ended(pair[1])


def test_one_way_can_end_before_the_other(pair: Pair) -> None:
    write_all(pair[0], b"a question")
    pair[0].shutdown(socket.SHUT_WR)
    assert read_exactly(pair[1], 10) == b"a question"


def ended(connection: StreamSocket) -> bool:
    return read_some(connection, 1) == b""


def test_a_process_that_stops_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    with open_hub() as b:
        with open_hub() as a:
            one, other = connect(a, b)
            write_all(one, b"goodbye")
            one.close()
        with other:
            assert read_exactly(other, 7) == b"goodbye" and ended(other)


def test_another_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    with open_hub(token="another token of another job") as a, open_hub() as b:
        with pytest.raises(AuthenticationFailed, match=r"did not prove the job token.*RPCDIST_TOKEN"):
            a.connect(b.address, "a purpose", LIMIT_S, unix=False)


def test_a_side_that_needs_tls_is_not_talked_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    with open_hub() as strict:
        monkeypatch.setenv("RPCDIST_TLS", "auto")
        with open_hub() as usual:
            with pytest.raises(AuthenticationFailed, match="connected without TLS"):
                usual.connect(strict.address, "a purpose", LIMIT_S, unix=False)
            one, other = connect(strict, usual)
            with one, other:
                write_all(one, b"encrypted")
                assert read_exactly(other, 9) == b"encrypted"


def test_nothing_is_left_of_connections_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    before = established()
    with hubs(2) as (a, b):
        one, other = connect(a, b)
        assert established() - before
        one.close()
        assert ended(other)
        other.close()
        eventually(lambda: not established() - before)


def established() -> set[tuple[Any, Any]]:
    """The TCP connections of this process; workers of other tests may have some."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr, one.raddr) for one in found if one.status == psutil.CONN_ESTABLISHED}
