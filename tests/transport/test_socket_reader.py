"""The reader of a socket: threads that wait, the loop, signals that come meanwhile, and the end."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest

from rpcdist.errors import BlockingInLoop
from rpcdist.testing import eventually, wait_until_asleep
from rpcdist.transport._channels import polling_and_signals, socket_reader
from rpcdist.transport._channels.socket_reader import SocketReader, watch_failure, watched

LIMIT_S = 20.0


class Reader:
    """One end of a socket pair, and the right to read it; `other` is written to.

    Attributes:
        read: the bytes that were read, by anybody.
        during: called at the beginning of each read.
    """

    def __init__(self) -> None:
        self.end, self.other = socket.socketpair()
        self.end.setblocking(False)
        self.read = bytearray()
        self.during: Callable[[], object] = lambda: None
        self.reading = SocketReader(self.receive)
        self.epoll = select.epoll()
        assert self.reading.allow(self.end.fileno(), partial(watched, self.epoll))
        self.reading.open()

    def receive(self) -> bool:
        self.during()
        try:
            data = self.end.recv(1)
        except BlockingIOError:
            return True
        self.read += data
        return bool(data)

    def misses(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.read) < count

    @property
    def wakes_loop(self) -> bool:
        return bool(select.select([self.epoll], [], [], 0)[0])

    def close(self) -> None:
        self.reading.stop()
        self.reading.close(self.end.close)
        self.other.close()
        self.end.close()
        self.epoll.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_leader_reads_until_it_has_what_it_waits_for(reader: Reader) -> None:
    reader.other.send(b"ab")
    assert reader.reading.read_while_waiting(reader.misses(2), LIMIT_S)
    assert reader.read == b"ab"


def test_the_loop_is_not_woken_while_a_thread_leads_and_is_afterwards(reader: Reader) -> None:
    seen = []
    reader.during = lambda: seen.append(reader.wakes_loop)
    reader.other.send(b"abc")
    assert reader.wakes_loop
    assert reader.reading.read_while_waiting(reader.misses(2), LIMIT_S)
    assert seen == [False, False]
    assert reader.wakes_loop  # one byte is left
    assert reader.reading.take()
    reader.receive()
    reader.reading.give_back()
    assert not reader.wakes_loop


def test_a_socket_that_is_gone_can_be_neither_hidden_nor_shown() -> None:
    """The error is one that ends the connection, and not a crash or silence."""
    end, other = socket.socketpair()
    hide, show = watched(select.epoll(), end.fileno())
    with other:
        end.close()
        for change in (hide, show):
            assert change() < 0
            assert watch_failure().errno == errno.EBADF


def test_a_leader_whose_socket_is_gone_is_told_so_and_gives_the_lead_back(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader.reading, "_disarm", lambda: -1)
    with pytest.raises(OSError, match="cannot be changed"):
        reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)
    monkeypatch.undo()
    reader.other.send(b"a")
    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)


def test_what_is_sent_first_is_answered_to_the_leader_alone(reader: Reader) -> None:
    seen = []

    def first() -> None:
        reader.other.send(b"a")
        seen.append(reader.wakes_loop)

    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S, None, first)
    assert seen == [False]


@pytest.fixture
def along() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def test_a_leader_reads_the_sockets_that_it_takes_along(reader: Reader, along: Reader) -> None:
    seen = []
    along.during = lambda: seen.append((along.wakes_loop, along.reading.take()))

    def first() -> None:
        for _ in range(2):  # the second time, this thread reads it already
            reader.reading.read_along(along.reading)
        along.other.send(b"ab")

    assert reader.reading.read_while_waiting(along.misses(2), LIMIT_S, None, first)
    assert along.read == b"ab"
    assert seen == [(False, False), (False, False)]
    along.other.send(b"c")
    assert along.wakes_loop  # it was given back
    assert along.reading.read_while_waiting(along.misses(3), LIMIT_S)


def test_a_socket_is_taken_along_by_a_leader_alone_and_from_nobody(reader: Reader, along: Reader) -> None:
    reader.reading.read_along(along.reading)  # this thread does not lead
    assert along.reading.take()

    def first() -> None:
        reader.reading.read_along(along.reading)  # the loop reads it
        reader.other.send(b"a")
        along.other.send(b"b")

    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S, None, first)
    assert along.wakes_loop and not along.read
    along.reading.give_back()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_socket_that_ends_is_left_behind(reader: Reader, along: Reader, is_stopped: bool) -> None:
    has_begun = threading.Event()

    def first() -> None:
        reader.reading.read_along(along.reading)
        has_begun.set()

    leader = in_thread(lambda: reader.reading.read_while_waiting(reader.misses(1), LIMIT_S, None, first))
    assert has_begun.wait(LIMIT_S)
    if is_stopped:
        assert along.reading.stop()  # the loop wants to close it, and the leader goes on with its own
    else:
        along.other.shutdown(socket.SHUT_WR)
        eventually(along.reading.take, "the leader has left it")
        along.reading.give_back()
    reader.other.send(b"a")
    joined(leader)
    assert reader.read == b"a"


def test_only_one_reads_and_the_others_are_told_so(reader: Reader) -> None:
    results: list[object] = []

    def another() -> None:
        read = partial(reader.reading.read_while_waiting, lambda: True, LIMIT_S, None, lambda: results.append("sent"))
        joined(in_thread(lambda: results.append(read())))
        results.append(reader.reading.take())

    reader.during = another
    reader.other.send(b"a")
    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)
    assert results == ["sent", False, False]  # what had to be sent was sent


def test_the_limit_of_a_wait(reader: Reader) -> None:
    assert not reader.reading.read_while_waiting(lambda: True, 0.01)
    assert not reader.reading.read_while_waiting(lambda: True, 0.0)
    assert reader.reading.take()  # it was given back
    reader.reading.give_back()


def test_each_sleep_is_announced(reader: Reader) -> None:
    calls: list[str] = []
    reader.during = lambda: calls.append("read")
    reader.other.send(b"a")
    sleep = (lambda: calls.append("sleeps")), (lambda: calls.append("wakes"))
    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S, sleep)
    assert calls == ["sleeps", "wakes", "read"]


def test_a_leader_looks_again_when_somebody_rings(reader: Reader) -> None:
    waiting = [True]
    results: list[bool] = []
    leader = in_thread(lambda: results.append(reader.reading.read_while_waiting(lambda: bool(waiting), LIMIT_S)))
    wait_until_asleep(leader)
    waiting.clear()
    reader.reading.interrupt()
    joined(leader)
    assert results == [True]


def test_an_error_of_what_is_sent_first_leaves_the_socket_to_the_loop(reader: Reader) -> None:
    def first() -> None:
        raise ValueError("it cannot be sent")

    reader.other.send(b"a")
    with pytest.raises(ValueError, match="cannot be sent"):
        reader.reading.read_while_waiting(lambda: True, LIMIT_S, None, first)
    assert reader.wakes_loop
    assert reader.reading.take()
    reader.reading.give_back()


def test_a_finalizer_that_waits_while_its_thread_reads_gets_an_error(reader: Reader) -> None:
    errors: list[BaseException] = []

    def finalizer() -> None:
        try:
            reader.reading.read_while_waiting(lambda: True, LIMIT_S)
        except BlockingInLoop as exc:
            errors.append(exc)

    reader.during = finalizer
    reader.other.send(b"a")
    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)
    joined(in_thread(lambda: (reader.other.send(b"b"), reader.reading.read_while_waiting(reader.misses(2), LIMIT_S))))
    assert len(errors) == 2


# ---------------------------------------------------------------- the end


def test_who_leads_leaves_when_the_connection_ends(reader: Reader) -> None:
    results: list[bool] = []
    leader = in_thread(lambda: results.append(reader.reading.read_while_waiting(lambda: True, LIMIT_S)))
    wait_until_asleep(leader)
    assert reader.reading.stop()
    closed = []
    reader.reading.close(lambda: closed.append(threading.current_thread()))
    assert closed == [threading.current_thread()]
    joined(leader)
    assert results == [False]
    reader.reading.interrupt()  # nobody is there
    assert not reader.reading.read_while_waiting(lambda: True, LIMIT_S)
    reader.end.close()


def test_who_led_when_the_connection_ended_may_wait_again(reader: Reader) -> None:
    """A call may hold on to a connection that has just ended: its next wait is none in a finalizer."""
    over: list[bool] = []

    def wait_twice() -> None:
        over.extend(reader.reading.read_while_waiting(lambda: True, LIMIT_S) for _ in range(2))

    thread = in_thread(wait_twice)
    wait_until_asleep(thread)
    reader.reading.stop()
    joined(thread)
    assert over == [False, False]


def test_a_reading_thread_that_leaves_late_closes_the_socket(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_reader, "LEAVE_LIMIT_S", 0.01)
    reading, go_on = threading.Event(), threading.Event()

    def during() -> None:
        reading.set()
        assert go_on.wait(LIMIT_S)

    reader.during = during
    reader.other.send(b"a")
    leader = in_thread(lambda: reader.reading.read_while_waiting(lambda: True, LIMIT_S))
    assert reading.wait(LIMIT_S)
    assert not reader.reading.stop()
    closed: list[threading.Thread] = []
    reader.reading.close(lambda: closed.append(threading.current_thread()))
    assert closed == []
    go_on.set()
    joined(leader)
    assert closed == [leader]
    reader.end.close()


def test_the_end_of_the_peer_ends_the_wait(reader: Reader) -> None:
    reader.other.close()
    assert not reader.reading.read_while_waiting(lambda: True, LIMIT_S)
    assert reader.wakes_loop  # which will read of the end, too


# ---------------------------------------------------------------- signals


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """The notes of a handler of SIGUSR1."""
    notes: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: notes.append("handled"))
    yield notes
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_a_thread_reads_is_handled_right_after(reader: Reader, handled: list[str]) -> None:
    def during() -> None:
        signal.raise_signal(signal.SIGUSR1)
        handled.append("read")

    reader.during = during
    reader.other.send(b"a")
    assert reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)
    assert handled == ["read", "handled"]


def test_ctrl_c_while_a_thread_reads_loses_nothing(reader: Reader) -> None:
    reader.during = lambda: signal.raise_signal(signal.SIGINT)
    reader.other.send(b"a")
    with pytest.raises(KeyboardInterrupt):
        reader.reading.read_while_waiting(reader.misses(1), LIMIT_S)
    assert reader.read == b"a"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_sleep_ends_it(reader: Reader) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        reader.reading.read_while_waiting(lambda: True, LIMIT_S, send_first=lambda: signal.raise_signal(signal.SIGINT))
    assert time.monotonic() - began < LIMIT_S / 2
    assert reader.reading.take()
    reader.reading.give_back()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_the_sleep_at_once(reader: Reader, number: signal.Signals) -> None:
    """The handler runs when the right to read was given back, so it may make calls of its own."""
    here = threading.current_thread()
    could_read: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        could_read.append(reader.reading.read_while_waiting(reader.misses(1), LIMIT_S))

    def send() -> None:
        wait_until_asleep(here)
        reader.other.send(b"a") if number == signal.SIGTERM else None
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, handler)
    sender = in_thread(send)
    try:
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                reader.reading.read_while_waiting(lambda: True, LIMIT_S)
        else:
            reader.during = lambda: None
            reader.reading.read_while_waiting(lambda: not could_read, LIMIT_S)
            assert could_read == [True]
    finally:
        joined(sender)
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, before)
    assert reader.reading.take()
    reader.reading.give_back()


def test_a_handler_that_is_replaced_by_a_handler_stays_replaced(reader: Reader, handled: list[str]) -> None:
    def second(number: int, frame: FrameType | None) -> None:
        handled.append("second")

    def first(number: int, frame: FrameType | None) -> None:
        handled.append("first")
        signal.signal(signal.SIGUSR1, second)

    signal.signal(signal.SIGUSR1, first)
    reader.during = lambda: signal.raise_signal(signal.SIGUSR1)
    reader.other.send(b"ab")
    while not reader.reading.read_while_waiting(reader.misses(2), LIMIT_S):
        pass  # a signal ended the wait
    assert handled == ["first", "second"] or handled == ["first"]  # two signals of one kind may become one
    assert signal.getsignal(signal.SIGUSR1) is second


# ---------------------------------------------------------------- polling before sleeping


@pytest.fixture
def polling(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The next waits poll, for a minute."""
    monkeypatch.setattr(polling_and_signals, "LIMIT_NS", 60 * 10**9)
    monkeypatch.setattr(polling_and_signals, "LONG_TURN_NS", 60 * 10**9)
    brief = reader.reading._brief
    brief._counts[:] = bytes([3]) * len(brief._counts)
    brief.is_worth_it = True
    return reader


def no_sleep() -> None:
    raise AssertionError("it slept")


def test_who_polls_reads_what_comes(polling: Reader) -> None:
    polling.other.send(b"a")
    first = polling.reading.read_while_waiting(polling.misses(1), LIMIT_S, (no_sleep, no_sleep))
    second = polling.reading.read_while_waiting(
        polling.misses(2), LIMIT_S, (no_sleep, no_sleep), lambda: polling.other.send(b"b")
    )
    assert first and second and polling.read == b"ab"


def test_who_polls_hears_the_bell(polling: Reader) -> None:
    is_waiting = True

    def end() -> None:
        nonlocal is_waiting
        is_waiting = False
        polling.reading.interrupt()

    started = threading.Event()
    leader = in_thread(lambda: polling.reading.read_while_waiting(lambda: is_waiting, LIMIT_S, None, started.set))
    assert started.wait(LIMIT_S)
    end()
    joined(leader)


@pytest.mark.parametrize("what", ["a signal", "the limit"])
def test_polling_ends_before_a_signal_is_handled_and_near_the_limit_of_the_wait(reader: Reader, what: str) -> None:
    """It lasts half a millisecond: neither needs to end it."""
    reader.reading._brief.is_worth_it = True
    began = time.monotonic()
    if what == "a signal":
        with pytest.raises(KeyboardInterrupt):
            reader.reading.read_while_waiting(lambda: True, LIMIT_S, None, lambda: signal.raise_signal(signal.SIGINT))
    else:
        assert not reader.reading.read_while_waiting(lambda: True, 0.05)
    assert time.monotonic() - began < LIMIT_S / 2
    assert not reader.reading._brief.is_worth_it


# ---------------------------------------------------------------- all together


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_between_threads_that_lead_and_the_loop(seed: int) -> None:
    """A numbered stream, three threads that lead now and then, and a loop: every byte once, in order, none late."""
    chance = random.Random(seed)
    reader = Reader()
    total = 3000
    sent = bytes(number % 251 for number in range(total))
    done = threading.Event()

    def loop() -> None:
        while not done.is_set():
            select.select([reader.epoll], [], [], LIMIT_S)
            if reader.reading.take():
                for _ in range(4):
                    reader.receive()
                reader.reading.give_back()

    def leader() -> None:
        own = random.Random(chance.random())
        while len(reader.read) < total:
            reader.reading.read_while_waiting(reader.misses(min(total, len(reader.read) + own.randrange(1, 9))), 0.05)

    threads = [in_thread(leader) for _ in range(3)]
    looping = in_thread(loop)
    at = 0
    while at < total:
        run = chance.choice([1, 1, 2, 50])
        reader.other.sendall(sent[at : at + run])
        at += run
        if chance.random() < 0.1:
            reader.reading.interrupt()
    for thread in threads:
        joined(thread)
    done.set()
    reader.other.send(b"x")  # wakes the loop
    joined(looping)
    assert bytes(reader.read[:total]) == sent
    reader.close()
