"""Small messages that go the short way, and everything that makes them leave it."""

from __future__ import annotations

import errno
import random
from functools import partial
from typing import Any

import pytest
import torch
from point_pairs import in_threads, irecv, isend, mesh, number, recv, send, slow_socket, state_of

from rpcdist.collectives._transports.p2p import messenger
from rpcdist.errors import CollectiveMismatch, RankLost


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("taken", [1, 39, 40, 43])
def test_the_rest_of_a_message_follows(taken: int, asynchronous: bool) -> None:
    with mesh(2) as made:
        a, b = made.members
        sock = slow_socket(made, taken, 2)
        for value in (5, 6):
            isend(a, number(value), 1).wait() if asynchronous else send(a, number(value), 1)
        assert not sock.limits
        for value in (5, 6):
            got = number(-1)
            recv(b, got, 0)
            assert got == value


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_message_whose_send_fails_with_an_earlier_refusal_is_sent_whole(asynchronous: bool) -> None:
    """The socket takes a part of it: were the rest missing, the next message would be taken for it."""
    with mesh(2) as made:
        a, b = made.members
        sock = slow_socket(made)
        send(a, number(0), 1)
        with pytest.raises(CollectiveMismatch):
            recv(b, torch.zeros(3), 0)
        state_of(a).outgoing[1].refusals_read_at = 0.0  # it is time to look for them
        sock.limits = [20]
        with pytest.raises(CollectiveMismatch, match="rank 1 receives 12 bytes"):
            isend(a, number(5), 1).wait() if asynchronous else send(a, number(5), 1)
        assert not sock.limits
        got, following = number(-1), number(-1)
        in_threads(partial(send, a, number(6), 1), lambda: (recv(b, got, 0), recv(b, following, 0)))
        assert (got.item(), following.item()) == (5, 6)


@pytest.mark.parametrize("size", [1 << 10, messenger.SMALL_BYTES // 4, messenger.SMALL_BYTES // 4 + 1])
@pytest.mark.parametrize("cuts", [(), (7,), (50, 3), (5_000,)])
def test_a_message_in_parts_arrives_whole(size: int, cuts: tuple[int, ...]) -> None:
    """The thread that waits continues to read while the received bytes may be the beginning of its message; the usual
    way takes the rest.
    """
    with mesh(2) as made:
        a, b = made.members
        for number_of_round in range(3):
            sock = slow_socket(made, *cuts)
            sent, got = torch.arange(size, dtype=torch.float32) + number_of_round, torch.zeros(size)
            in_threads(partial(send, a, sent, 1), partial(recv, b, got, 0))
            assert torch.equal(got, sent)
            assert not sock.limits or size > messenger.SMALL_BYTES // 4


def test_a_full_socket_takes_it_later() -> None:
    with mesh(2) as made:
        a, b = made.members
        slow_socket(made, BlockingIOError(), BlockingIOError())
        got = number(-1)
        in_threads(lambda: send(a, number(7), 1), lambda: recv(b, got, 0))
        assert got == 7


def test_a_broken_socket_fails_the_send() -> None:
    with mesh(2) as made:
        a, _ = made.members
        slow_socket(made, OSError(errno.EPIPE, "Broken pipe"))
        with pytest.raises(RankLost, match=r"send #2 to rank 1 .* Broken pipe"):
            send(a, number(7), 1)
        with pytest.raises(RankLost, match=r"send #3 .* Broken pipe"):
            send(a, number(7), 1)


@pytest.mark.parametrize("step", ["pack_header", "memory_of"])
def test_a_send_that_is_interrupted_before_its_first_byte_leaves_the_connection_free(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with mesh(2) as made:
        a, b = made.members
        sock = slow_socket(made, 10**6)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(messenger, step, interrupt)
            send(a, number(7), 1)
        assert sock.limits  # nothing was sent
        got = number(-1)
        in_threads(lambda: send(a, number(8), 1), lambda: recv(b, got, 0))
        assert got == 8


def test_an_interrupted_send_ends_the_connection() -> None:
    with mesh(2) as made:
        a, b = made.members
        slow_socket(made, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            send(a, number(7), 1)
        with pytest.raises(RankLost, match="a send was interrupted"):
            send(a, number(8), 1)
        with pytest.raises(RankLost, match="rank 0"):
            recv(b, number(0), 0)


def test_what_comes_instead_is_kept() -> None:
    with mesh(2) as made:
        a, b = made.members
        slow_socket(made)
        send(a, number(1), 1, tag=1)
        send(a, torch.arange(3), 1, tag=2)
        send(a, number(3), 1, tag=3)
        got = number(-1)
        recv(b, got, 0, tag=3)
        assert got == 3
        views = r"rank 0 sent 24 bytes of int64 with tag 2 .*, rank 1 receives 4 bytes of float32"
        with pytest.raises(CollectiveMismatch, match=views):
            recv(b, torch.zeros(1), 0, tag=2)
        recv(b, got, 0, tag=1)
        assert got == 1
        with pytest.raises(CollectiveMismatch):
            for _ in range(10_000):  # the sender asks for refusals at most every POLL_S
                send(a, number(4), 1)


def test_a_receive_that_was_posted_before_is_served_first() -> None:
    with mesh(2) as made:
        a, b = made.members
        slow_socket(made)
        first, second = number(-1), number(-1)
        work = irecv(b, first, 0)
        in_threads(lambda: [send(a, number(value), 1) for value in (1, 2)], lambda: recv(b, second, 0))
        assert work.wait() and (first.item(), second.item()) == (1, 2)


@pytest.mark.parametrize("tcp", [False, True])
def test_threads_share_the_short_way(tcp: bool) -> None:
    num_messages, drawn = 200, random.Random(0)
    pauses = [drawn.random() < 0.3 for _ in range(num_messages)]
    with mesh(2, tcp=tcp) as made:
        a, b = made.members

        def talk(me: Any, other: int, tag: int) -> list[float]:
            got = []
            for index in range(num_messages):
                value = number(-1)
                if other:
                    (isend if pauses[index] else send)(me, number(index), other, tag)
                recv(me, value, other, tag)
                got.append(value.item())
                if not other:
                    send(me, value + 1, other, tag)
            return got

        talks = [lambda tag=tag: talk(a, 1, tag) for tag in range(3)]
        talks += [lambda tag=tag: talk(b, 0, tag) for tag in range(3)]
        results = in_threads(*talks)
        assert results == [list(range(1, num_messages + 1))] * 3 + [list(range(num_messages))] * 3
