"""Copies of large buffers: they are whole, take turns, and use a second thread where a core is free."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import pytest

from rpcdist.testing import eventually
from rpcdist.testing.limits import LIMIT_S
from rpcdist.transport import memory_copies
from rpcdist.transport.memory_copies import (
    TAKE_TURNS_FROM_BYTES,
    TWO_THREADS_FROM_BYTES,
    MemoryCopier,
    copy_memory,
    num_running,
)

SMALL, LARGE, HUGE = TAKE_TURNS_FROM_BYTES - 1, TAKE_TURNS_FROM_BYTES, TWO_THREADS_FROM_BYTES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="memory is shared on Linux only")


class Copies:
    """Stands in for `memmove`: notes the pieces, and lets the test hold them up."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.threads: set[int] = set()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, target: int, source: int, num_bytes: int) -> None:
        self.threads.add(threading.get_ident())
        self.pieces.append((target, source, num_bytes))
        assert self.may_end.wait(LIMIT_S)

    def begun(self, number: int) -> Callable[[], bool]:
        return lambda: len(self.pieces) == number


@pytest.fixture
def copies() -> Copies:
    return Copies()


def in_threads(number: int, function: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [1, SMALL, LARGE, HUGE, HUGE + 5])
@pytest.mark.parametrize("running", [None, 1, 2])
def test_every_byte_is_copied(size: int, running: int | None) -> None:
    source = ctypes.create_string_buffer((os.urandom(1021) * (size // 1021 + 1))[:size], size)
    target = ctypes.create_string_buffer(size + 1)
    MemoryCopier(2, lambda: running).copy(ctypes.addressof(target), ctypes.addressof(source), size)
    assert target.raw == source.raw + b"\0"


def test_copies_of_this_process() -> None:
    source = ctypes.create_string_buffer(os.urandom(64), 64)
    target = ctypes.create_string_buffer(64)
    copy_memory(ctypes.addressof(target), ctypes.addressof(source), 64)
    assert target.raw == source.raw


@pytest.mark.parametrize(
    ("size", "cores", "running", "pieces"),
    [
        (HUGE, 2, 1, [(1000, 2000, HUGE // 2), (1000 + HUGE // 2, 2000 + HUGE // 2, HUGE // 2)]),
        (HUGE, 2, 2, [(1000, 2000, HUGE)]),  # both cores are busy
        (HUGE, 1, 1, [(1000, 2000, HUGE)]),
        (HUGE, 2, None, [(1000, 2000, HUGE)]),  # the system does not say
        (HUGE - 1, 2, 1, [(1000, 2000, HUGE - 1)]),  # a thread costs more than it brings
    ],
)
def test_two_threads_share_the_largest_copies_where_a_core_is_free(
    copies: Copies, size: int, cores: int, running: int | None, pieces: list[tuple[int, int, int]]
) -> None:
    MemoryCopier(cores, lambda: running, copies).copy(1000, 2000, size)
    assert sorted(copies.pieces) == pieces
    assert len(copies.threads) == len(pieces)


def test_where_no_thread_can_be_started_one_copies_all(copies: Copies) -> None:
    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    MemoryCopier(2, lambda: 1, copies, start).copy(0, 0, HUGE)
    assert copies.pieces == [(0, 0, HUGE)]


def test_ctrl_c_waits_for_the_other_half(copies: Copies) -> None:
    """Else the memory of a call that was interrupted would be freed, or lent again, under the thread that copies."""
    main = threading.get_ident()
    interrupted, other_ended = threading.Event(), []

    def copy(target: int, source: int, num_bytes: int) -> None:
        copies(target, source, num_bytes)
        if threading.get_ident() == main:
            interrupted.set()
            raise KeyboardInterrupt
        assert interrupted.wait(LIMIT_S)
        other_ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        MemoryCopier(2, lambda: 1, copy).copy(0, 0, HUGE)
    assert other_ended == [True]


class Interrupts:
    """A lock on which a thread waits that Ctrl-C reaches again and again."""

    def __init__(self, number: int) -> None:
        self.left = number

    def acquire(self) -> bool:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        return True


def test_ctrl_c_while_waiting_for_the_other_half() -> None:
    lock = Interrupts(3)
    with pytest.raises(KeyboardInterrupt):
        memory_copies._wait_for(lock)  # type: ignore[arg-type]
    assert lock.left == 0


@pytest.mark.parametrize(("cores", "at_once"), [(1, 1), (2, 1), (8, 4)])
def test_large_copies_take_turns(copies: Copies, cores: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "COPY_TURN_LIMIT_S", LIMIT_S)
    copier = MemoryCopier(cores, lambda: None, copies)
    copies.may_end.clear()
    threads = in_threads(at_once + 2, lambda: copier.copy(0, 0, LARGE))
    eventually(copies.begun(at_once))
    threads += in_threads(1, lambda: copier.copy(7, 7, SMALL))  # it waits for nobody
    eventually(copies.begun(at_once + 1))
    assert copies.pieces[-1] == (7, 7, SMALL)
    copies.may_end.set()
    join(threads)
    assert len(copies.pieces) == at_once + 3


def test_nobody_waits_long_for_a_turn(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "COPY_TURN_LIMIT_S", 0.001)
    copier = MemoryCopier(2, lambda: None, copies)
    copies.may_end.clear()
    threads = in_threads(3, lambda: copier.copy(0, 0, LARGE))
    eventually(copies.begun(3))
    copies.may_end.set()
    join(threads)
    monkeypatch.setattr(memory_copies, "COPY_TURN_LIMIT_S", LIMIT_S)
    copies.may_end.clear()
    threads = in_threads(2, lambda: copier.copy(0, 0, LARGE))  # there is still one turn, and only one
    eventually(copies.begun(4))
    copies.may_end.set()
    join(threads)
    assert len(copies.pieces) == 5


def test_a_forked_child_has_all_turns(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "COPY_TURN_LIMIT_S", LIMIT_S)
    copier = MemoryCopier(2, lambda: None, copies)
    copies.may_end.clear()
    threads = in_threads(1, lambda: copier.copy(0, 0, LARGE))
    eventually(copies.begun(1))
    copier.after_fork_in_child()  # the thread whose turn it is would not exist there
    threads += in_threads(1, lambda: copier.copy(0, 0, LARGE))
    eventually(copies.begun(2))
    copies.may_end.set()
    join(threads)


def test_the_number_of_running_threads() -> None:
    running = num_running()
    assert running is None or running >= 1
