"""Sends and receives when something goes wrong: cut sockets, wrong sizes, garbage, time limits, the group's end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from point_pairs import (
    BIG,
    LIMIT_S,
    Mesh,
    engine_of,
    in_threads,
    irecv,
    isend,
    mesh,
    number,
    recv,
    send,
    state_of,
    tcp_pair,
)

from rpcdist.collectives._transports.p2p.messenger import Messenger
from rpcdist.collectives._transports.p2p.requests import HEADER_BYTES, MESSAGE, pack_header
from rpcdist.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConnectFailed,
    ForkedProcess,
    GroupAborted,
    ProtocolViolation,
    RankLost,
)
from rpcdist.testing import eventually

SHORT_S = 0.05


def prompt(function: Callable[[], object], kind: type[CollectiveError], pattern: str) -> CollectiveError:
    """Runs what must raise, much sooner than its own limit."""
    began = time.monotonic()
    with pytest.raises(kind, match=pattern) as caught:
        function()
    assert time.monotonic() - began < LIMIT_S / 4
    return caught.value


def cut(made: Mesh, sender: int, receiver: int) -> None:
    """The sender's end of a connection ends, as when it dies."""
    made.sockets[sender, receiver].shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- lost ranks


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_socket_cut_in_the_middle_of_a_message(tcp: bool, asynchronous: bool) -> None:
    with mesh(2, tcp=tcp) as made:
        a, b = made.members
        sending = isend(a, torch.rand(BIG), 1)
        assert not sending.is_completed(), "the message does not fit into the buffers"
        waiting = irecv(b, torch.zeros(2 * BIG), 0, 9) if asynchronous else None
        cut(made, 0, 1)
        if waiting is None:
            error = prompt(lambda: recv(b, torch.zeros(BIG), 0), RankLost, "rank 0: it closed .* in the middle of a me")
        else:
            error = prompt(waiting.wait, RankLost, r"recv #1 from rank 0 with tag 9 of group 'test' failed: rank 0: it")
        assert isinstance(error, RankLost) and error.ranks == (0,)
        prompt(sending.wait, RankLost, "send #1 to rank 1 .* rank 1: ")
        prompt(lambda: send(a, number(0), 1), RankLost, "rank 1")
        prompt(lambda: recv(b, number(0), 0), RankLost, "rank 0")


def test_what_came_before_the_end_can_be_received() -> None:
    with mesh(2) as made:
        a, b = made.members
        for index in range(3):
            send(a, number(index), 1, index)
        cut(made, 0, 1)
        prompt(lambda: recv(b, number(0), 0, 7), RankLost, "it closed the connection [(]Connection closed by peer[)]$")
        for index in (2, 0, 1):
            got = number(-1)
            recv(b, got, 0, index)
            assert got == index


def test_a_sleeping_receiver_hears_of_the_end() -> None:
    with mesh(2, num_ranks_here=1000) as made:
        a, b = made.members
        send(a, number(0), 1)
        recv(b, number(0), 0)

        def end() -> None:
            eventually(lambda: engine_of(b).sleeping)
            cut(made, 0, 1)

        in_threads(lambda: prompt(lambda: recv(b, number(0), 0), RankLost, "rank 0"), end)


def test_any_source_fails_when_nobody_is_left() -> None:
    with mesh(3) as made:
        a, b, c = made.members
        for member in (b, c):
            send(member, number(0), 0)
            recv(a, number(0), None)
        waiting = irecv(a, number(0), None)
        cut(made, 1, 0)
        send(c, number(0), 0)
        assert waiting.wait() and waiting.source_rank() == 2
        waiting = irecv(a, number(0), None)
        cut(made, 2, 0)
        error = prompt(waiting.wait, RankLost, "all other ranks are gone: rank 1: .*; rank 2: ")
        assert isinstance(error, RankLost) and error.ranks == (1, 2)
        prompt(lambda: recv(a, number(0), None), RankLost, "all other ranks are gone")


def test_peer_lost_fails_who_waits_for_it() -> None:
    with mesh(3) as made:
        a, b, _ = made.members
        send(b, number(4), 0, 1)
        never_connected, connected, any_source = (
            irecv(a, number(0), 2),
            irecv(a, number(0), 1),
            irecv(a, number(0), None),
        )
        stuck = isend(a, torch.rand(BIG), 1)
        a.peer_lost(1, "its host vanished")
        prompt(connected.wait, RankLost, "rank 1: its host vanished")
        prompt(stuck.wait, RankLost, "rank 1: its host vanished")
        assert not any_source.is_completed() and not never_connected.is_completed()
        got = number(0)
        recv(a, got, 1, 1)
        assert got == 4, "it came before the loss"
        a.peer_lost(2, "so did this")
        prompt(never_connected.wait, RankLost, "rank 2: so did this")
        prompt(any_source.wait, RankLost, "rank 1: its host vanished; rank 2: so did this")
        prompt(lambda: send(a, number(0), 2), RankLost, "so did this")
        prompt(lambda: recv(a, number(0), 2), RankLost, "so did this")


def test_a_peer_that_leaves_in_order_says_so() -> None:
    with mesh(2) as made:
        a, b = made.members
        send(a, number(1), 1)
        a.close()
        recv(b, number(0), 0)
        prompt(lambda: recv(b, number(0), 0), RankLost, "rank 0: it left the group")


def test_a_peer_that_cannot_be_reached() -> None:
    attempts = []

    def connect(peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket:
        attempts.append(peer)
        raise ConnectFailed("somewhere", "nobody is there")

    member = Messenger("test", 0, range(2), connect)
    for _ in range(2):
        error = prompt(lambda: send(member, number(0), 1), RankLost, "rank 1: it cannot be reached: .*nobody is there")
        assert isinstance(error, RankLost) and error.ranks == (1,)
    assert attempts == [1, 1], "each send tries again"
    member.close()


def test_sends_wait_for_a_connection_that_another_thread_opens() -> None:
    mine, theirs = socket.socketpair()
    entered, allowed = threading.Event(), threading.Event()

    def connect(peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket:
        entered.set()
        assert allowed.wait(LIMIT_S)
        return mine

    def second() -> None:
        assert entered.wait(LIMIT_S)
        work = isend(a, number(2), 1)
        allowed.set()
        assert work.wait()

    a = Messenger("test", 0, range(2), connect)
    b = Messenger("test", 1, range(2), connect)
    b.attach(0, theirs)
    in_threads(lambda: send(a, number(1), 1), second)
    for expected in (1, 2):
        got = number(0)
        recv(b, got, 0)
        assert got == expected
    a.close()
    b.close()


def test_fail_ends_a_send_that_still_connects() -> None:
    failed = threading.Event()

    def connect(peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket:
        member.fail(GroupAborted("everything", "for the test"))
        failed.set()
        check()
        raise AssertionError("check did not raise")

    member = Messenger("test", 0, range(2), connect)
    prompt(lambda: send(member, number(0), 1), GroupAborted, "for the test")
    assert failed.is_set()
    member.close()


# ---------------------------------------------------------------- mismatches


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("size", [3, 10_000])
def test_a_wrong_size_is_told_to_both(posted: bool, size: int) -> None:
    with mesh(2) as made:
        a, b = made.members
        views = f"rank 0 sent {4 * size} bytes of float32.*rank 1 receives 16 bytes of int64"
        receiving = irecv(b, torch.zeros(2, dtype=torch.int64), 0, 5) if posted else None
        send(a, torch.zeros(size), 1, 5)
        if receiving is not None:
            prompt(receiving.wait, CollectiveMismatch, views)
        else:
            prompt(lambda: recv(b, torch.zeros(2, dtype=torch.int64), 0, 5), CollectiveMismatch, views)
        prompt(lambda: recv(a, number(0), 1), CollectiveMismatch, f"recv #1 .*{views}")
        send(a, number(1), 1)
        got = number(0)
        recv(b, got, 0)
        assert got == 1, "the connection goes on"


def test_a_refused_send_that_is_pending_fails() -> None:
    with mesh(2) as made:
        a, b = made.members
        sending = isend(a, torch.rand(BIG), 1)
        assert not sending.is_completed()
        prompt(lambda: recv(b, number(0), 0), CollectiveMismatch, "rank 1 receives 4 bytes")
        prompt(sending.wait, CollectiveMismatch, "rank 1 receives 4 bytes")
        following = isend(a, number(1), 1)
        got = number(0)
        recv(b, got, 0)
        assert following.wait() and got == 1


def test_the_next_send_raises_what_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    with mesh(2) as made:
        a, b = made.members
        send(a, torch.zeros(3), 1)
        prompt(lambda: recv(b, number(0), 0), CollectiveMismatch, "rank 0 sent 12 bytes")
        time.sleep(2e-3)  # a sender looks for refusals once a millisecond
        with pytest.raises(CollectiveMismatch, match="rank 1 receives 4 bytes") as caught:
            send(a, number(6), 1)
        assert "The message of this call was sent." in caught.value.__notes__[0]
        told = "rank 1 refused message 0 of this pair (12 bytes of float32, tag 0): it expected 4 bytes of float32"
        assert told in caplog.messages
        send(a, number(7), 1)
        for value in (6, 7):  # left out, the message of the send that failed would shift all later ones
            got = number(0)
            recv(b, got, 0)
            assert got == value


def test_a_receive_that_raises_what_was_refused_says_that_it_took_no_message() -> None:
    with mesh(2) as made:
        a, b = made.members
        send(a, torch.zeros(3), 1)
        prompt(lambda: recv(b, number(0), 0), CollectiveMismatch, "rank 0 sent 12 bytes")
        state_of(a).outgoing[1].refusals_read_at = 0.0  # it is time to look for them
        state_of(a).read_refusals(state_of(a).outgoing[1], time.monotonic())
        with pytest.raises(CollectiveMismatch, match="rank 1 receives 4 bytes") as caught:
            recv(a, number(0), 1)
        assert "This receive got no message" in caught.value.__notes__[0]


@pytest.mark.parametrize("size", [1, BIG])
def test_a_send_that_fails_with_an_earlier_refusal_ends_when_its_message_has_left(size: int) -> None:
    """Its caller may write to the tensor from then on."""
    with mesh(2) as made:
        a, b = made.members
        send(a, number(0), 1)
        prompt(lambda: recv(b, torch.zeros(3), 0), CollectiveMismatch, "rank 0 sent 4 bytes")
        state_of(a).outgoing[1].refusals_read_at = 0.0
        sent, got = torch.rand(size), torch.zeros(size)
        sending = isend(a, sent, 1)
        recv(b, got, 0)
        with pytest.raises(CollectiveMismatch, match="rank 1 receives 12 bytes"):
            sending.wait()
        assert torch.equal(sent, got)


def test_another_dtype_of_the_same_size() -> None:
    with mesh(1) as made:
        (a,) = made.members
        send(a, torch.zeros(2, dtype=torch.int32), 0)
        prompt(lambda: recv(a, torch.zeros(2), 0), CollectiveMismatch, "sent 8 bytes of int32.*receives 8 bytes of flo")


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        pack_header(MESSAGE, 0, 0, 5, 0),
    ],
)
def test_a_connection_with_garbage_is_closed_and_named(data: bytes) -> None:
    with mesh(2) as made:
        mine, theirs = tcp_pair()
        b = made.members[1]
        b.attach(0, theirs)
        mine.sendall(data)
        prompt(lambda: recv(b, number(0), 0, 1), RankLost, "rank 0: .*the connection was closed")
        mine.settimeout(LIMIT_S)
        with mine:
            assert ends(mine)


def test_garbage_from_a_receiver_is_named() -> None:
    with mesh(2) as made:
        a = made.members[0]
        sending = isend(a, torch.rand(BIG), 1)
        made.far[0, 1].send(b"x" * 2 * HEADER_BYTES)
        prompt(sending.wait, RankLost, "rank 1: it does not follow the protocol")


def test_a_second_connection_is_refused_once_the_first_is_in_use() -> None:
    with mesh(2) as made:
        a, b = made.members
        unused, replaced = socket.socketpair()
        b.attach(0, replaced)
        send(a, number(1), 1)  # takes the place of the unused one
        recv(b, number(0), 0)
        assert ends(unused)
        unused.close()
        mine, theirs = socket.socketpair()
        with pytest.raises(ProtocolViolation, match="rank 0 connected twice"):
            b.attach(0, theirs)
        assert ends(mine)
        mine.close()


# ---------------------------------------------------------------- time limits


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("source", [0, None])
def test_a_receive_times_out(asynchronous: bool, source: int | None) -> None:
    with mesh(2) as made:
        a, b = made.members
        who = "any rank" if source is None else "rank 0"
        with pytest.raises(CollectiveTimeout, match=f"no message with tag 3 from {who} within 0.05 s"):
            (irecv if asynchronous else recv)(b, number(0), source, 3, SHORT_S).wait()
        send(a, number(6), 1, 3)
        got = number(0)
        recv(b, got, source, 3)
        assert got == 6, "the receive that timed out took nothing"


def test_a_receive_times_out_in_the_middle() -> None:
    with mesh(2) as made:
        mine, theirs = tcp_pair()
        b = made.members[1]
        b.attach(0, theirs)
        data = pack_header(MESSAGE, 0, 4, 0, 200_000) + b"\1" * 200_000 + pack_header(MESSAGE, 0, 5, 1, 1)
        mine.sendall(data[:100_000])
        got = torch.zeros(200_000, dtype=torch.uint8)
        with pytest.raises(CollectiveTimeout, match="its message did not arrive completely from rank 0"):
            recv(b, got, 0, 4, SHORT_S)
        got.zero_()
        mine.sendall(data[100_000:] + b"\7")
        last = torch.zeros(1, dtype=torch.uint8)
        recv(b, last, 0, 5)
        assert last == 7 and not got.any(), "the rest went nowhere"
        mine.close()


def test_a_send_times_out_before_its_turn() -> None:
    with mesh(2) as made:
        a, b = made.members
        first = isend(a, torch.rand(BIG), 1, 1)
        with pytest.raises(
            CollectiveTimeout, match=r"rank 1 did not receive 4 bytes of float32 with tag 2 within 0\.05 s"
        ):
            send(a, number(0), 1, 2, SHORT_S)
        last = isend(a, number(3), 1, 3)
        got = number(0)
        recv(b, got, 0, 3)
        recv(b, torch.zeros(BIG), 0, 1)
        assert got == 3 and first.wait() and last.wait()
        with pytest.raises(CollectiveTimeout):
            recv(b, number(0), 0, 2, SHORT_S)


def test_a_send_times_out_in_the_middle() -> None:
    with mesh(2) as made:
        a, b = made.members
        with pytest.raises(CollectiveTimeout, match="rank 1 did not receive 24000000 bytes"):
            send(a, torch.rand(BIG), 1, 0, SHORT_S)
        prompt(lambda: send(a, number(0), 1), RankLost, "send #1 .* timed out in the middle of the message")
        prompt(lambda: recv(b, torch.zeros(BIG), 0), RankLost, "rank 0: .* in the middle of a message")


def test_the_leader_keeps_the_limits_of_the_others() -> None:
    with mesh(2) as made:
        a, b = made.members

        def short() -> None:
            eventually(lambda: engine_of(b).sleeping)
            with pytest.raises(CollectiveTimeout):
                recv(b, number(0), 0, 1, SHORT_S)
            send(a, number(0), 1, 2)

        in_threads(lambda: recv(b, number(0), 0, 2), short)


def test_a_wait_of_its_own_limit_leaves_the_receive() -> None:
    with mesh(2) as made:
        a, b = made.members
        work = irecv(b, number(0), 0)
        with pytest.raises(CollectiveTimeout, match="the operation continues"):
            work.wait(SHORT_S)
        send(a, number(0), 1)
        assert work.wait()


# ---------------------------------------------------------------- the end of the group


def test_fail_ends_everything_at_once() -> None:
    with mesh(3) as made:
        a = made.members[0]
        error = GroupAborted("everything", "for the test")
        works = [irecv(a, number(0), 1), irecv(a, number(0), None), isend(a, torch.rand(BIG), 1)]
        blocked = threading.Event()

        def blocking() -> None:
            blocked.set()
            prompt(lambda: recv(a, number(0), 2), GroupAborted, "for the test")

        def end() -> None:
            assert blocked.wait(LIMIT_S)
            a.fail(error)

        in_threads(blocking, blocking, end)
        for work in works:
            prompt(work.wait, GroupAborted, "for the test")
        a.fail(GroupAborted("everything", "too late"))
        for function in (lambda: send(a, number(0), 1), lambda: recv(a, number(0), None)):
            prompt(function, GroupAborted, "for the test")


def test_close_ends_what_is_pending_and_may_be_repeated() -> None:
    with mesh(2) as made:
        a = made.members[0]
        works = [irecv(a, number(0), 1), isend(a, torch.rand(BIG), 1)]
        a.close()
        a.close()
        for work in works:
            prompt(work.wait, GroupAborted, "destroyed")
        prompt(lambda: send(a, number(0), 1), GroupAborted, "destroyed")
        mine, theirs = socket.socketpair()
        a.attach(1, theirs)
        assert ends(mine)
        mine.close()


def test_a_forked_child_cannot_wait_for_its_parents_work() -> None:
    with mesh(2) as made:
        _, b = made.members
        work = irecv(b, number(0), 0)
        with engine_of(b).entrance, engine_of(b).lock:  # as another thread may have held them at the fork
            child = os.fork()
            if child == 0:
                signal.alarm(round(LIMIT_S))
                try:
                    work.wait(SHORT_S)
                except ForkedProcess:
                    os._exit(7)
                finally:
                    os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7


def test_drain_waits_for_sends_only() -> None:
    with mesh(2) as made:
        a, b = made.members
        never = irecv(a, number(0), 1, 9)
        assert a.drain(0.0) == []
        work = isend(a, torch.rand(BIG), 1)
        assert a.drain(SHORT_S) == [work]
        got = torch.zeros(BIG)
        assert in_threads(lambda: a.drain(LIMIT_S), lambda: recv(b, got, 0).is_success()) == [[], True]
        assert work.is_success() and not never.is_completed()


def test_what_was_sent_arrives_after_the_sender_has_left() -> None:
    with mesh(2) as made:
        a, b = made.members
        for index in range(10):
            isend(a, torch.full((1000,), float(index)), 1)
        send(b, number(0), 0)  # which nobody reads
        a.close()
        for index in range(10):
            got = torch.zeros(1000)
            recv(b, got, 0)
            assert bool((got == index).all())


def test_close_while_a_thread_is_blocked() -> None:
    with mesh(2) as made:
        a = made.members[0]

        def close() -> None:
            eventually(lambda: engine_of(a).sleeping)
            a.close()

        in_threads(lambda: prompt(lambda: recv(a, number(0), 1), GroupAborted, "destroyed"), close)


def ends(sock: socket.socket) -> bool:
    """Whether the other end is closed."""
    sock.settimeout(LIMIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("source", [0, None])
def test_a_message_for_which_a_rank_has_no_memory_is_no_loss_of_its_sender(source: int | None) -> None:
    """The header said 2**47 bytes, and the rank that sent it was declared lost."""
    with mesh(2) as made:
        a, b = made.members
        send(a, torch.ones(1), 1)
        recv(b, torch.zeros(1), 0)
        waiting = irecv(b, torch.zeros(1), source)
        made.sockets[0, 1].sendall(pack_header(MESSAGE, 0, 5, 1, 1 << 47))
        error = prompt(waiting.wait, CollectiveError, r"rank 0: this rank cannot keep its message \(\d+ bytes")
        assert not isinstance(error, RankLost) and "do not fit into memory, of which" in str(error)
        again = prompt(lambda: recv(b, torch.zeros(1), source), CollectiveError, "this rank cannot keep its message")
        assert not isinstance(again, RankLost)
