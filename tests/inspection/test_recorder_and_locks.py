"""The ring of calls that have ended, and the locks that threads are seen to wait for and to hold."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rpcdist._counters import OK
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import CallRecorder
from rpcdist.rpc._inspection.stacks import awaited_lock, holds_lock, thread_states
from rpcdist.testing import wait_until_asleep
from rpcdist.testing.limits import LIMIT_S


def test_the_newest_calls_are_kept_in_the_order_of_their_ends() -> None:
    recorder = CallRecorder(3)
    for id in range(5):
        recorder.made((id, 1, f"m:f{id}", float(id), 10.0 + id, OK, 0.0))
    recorder.served((9, 2, "m:g", 1.0, 13.5, "ValueError: no", 0.0))
    assert [(call.id, call.is_served, call.function) for call in recorder] == [
        (2, False, "m:f2"),
        (3, False, "m:f3"),
        (9, True, "m:g"),
        (4, False, "m:f4"),
    ]
    served = next(call for call in recorder if call.is_served)
    assert (served.peer, served.began, served.ended, served.outcome) == (2, 1.0, 13.5, "ValueError: no")


def test_a_full_recorder_needs_no_more_memory() -> None:
    recorder = CallRecorder(100)

    def record(count: int) -> None:
        for id in range(count):
            recorder.made((id & 7, 1, "m:f", 1.5, 2.5, OK, 0.0))

    record(200)
    tracemalloc.start()
    try:
        record(200)
        before = tracemalloc.take_snapshot()
        record(20_000)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    mine = [tracemalloc.Filter(True, file) for file in (__file__, call_records.__file__)]  # not those of other threads
    growth = after.filter_traces(mine).compare_to(before.filter_traces(mine), "filename")
    assert sum(one.size_diff for one in growth) < 1000


# ---------------------------------------------------------------- locks

module_lock = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.condition = threading.Condition()

    def hold_own(self, go_on: threading.Event, has_it: threading.Event) -> None:
        with self._lock:
            has_it.set()
            go_on.wait(LIMIT_S)

    def want_own(self) -> None:
        with self._lock:
            pass

    def hold_condition(self, go_on: threading.Event, has_it: threading.Event) -> None:
        with self.condition:
            has_it.set()
            go_on.wait(LIMIT_S)

    def want_condition(self) -> None:
        with self.condition:
            pass


def hold_module(go_on: threading.Event, has_it: threading.Event) -> None:
    try:
        for number in range(3):
            with module_lock:
                if number == 1:
                    has_it.set()
                    go_on.wait(LIMIT_S)
    finally:
        del number


def hold_without_with(go_on: threading.Event, has_it: threading.Event) -> None:
    module_lock.acquire()
    has_it.set()
    go_on.wait(LIMIT_S)
    module_lock.release()


def want_module() -> None:
    with module_lock:
        pass


def want_by_acquire() -> None:
    module_lock.acquire()
    module_lock.release()


holder = Holder()


@contextmanager
def contending(
    hold: Callable[[threading.Event, threading.Event], None], want: Callable[[], None]
) -> Iterator[tuple[int, int]]:
    """Two threads of which one holds a lock and the other waits for it; yields their idents."""
    go_on, has_it = threading.Event(), threading.Event()
    threads = [threading.Thread(target=hold, args=(go_on, has_it)), threading.Thread(target=want)]
    threads[0].start()
    assert has_it.wait(LIMIT_S)
    threads[1].start()
    try:
        for thread in threads:
            wait_until_asleep(thread)
        first, second = (thread.ident for thread in threads)
        assert first is not None and second is not None
        yield first, second
    finally:
        go_on.set()
        for thread in threads:
            thread.join(LIMIT_S)


@pytest.mark.parametrize(
    ("hold", "want", "name", "is_seen"),
    [
        (hold_module, want_module, "module_lock", True),
        (hold_module, want_by_acquire, "module_lock", True),
        (hold_without_with, want_module, "module_lock", False),
        (holder.hold_own, holder.want_own, "self._lock", True),
        (holder.hold_condition, holder.want_condition, "self._lock", True),
    ],
    ids=["with", "acquire", "held-without-with", "of-an-object", "condition"],
)
def test_the_holder_of_a_lock_is_found(
    hold: Callable[[threading.Event, threading.Event], None], want: Callable[[], None], name: str, is_seen: bool
) -> None:
    with contending(hold, want) as (holds, waits):
        states = {state.id: state for state in thread_states()[0]}
        assert states[waits].lock == name
        assert states[waits].lock_holder == (holds if is_seen else None)
        assert states[holds].lock == ""
        assert (
            states[waits].stack[-1].function.endswith(want.__name__) or "threading.py" in states[waits].stack[-1].file
        )


own_lock = threading.Lock()


def take_twice() -> None:
    with own_lock:
        take_again()
        own_lock.acquire()  # for the end of the block


def take_again() -> None:
    with own_lock:
        pass


def test_a_lock_that_its_thread_takes_twice_has_this_thread_as_its_holder() -> None:
    twice = threading.Thread(target=take_twice)
    twice.start()
    try:
        wait_until_asleep(twice)
        state = next(state for state in thread_states()[0] if state.id == twice.ident)
        assert (state.lock, state.lock_holder) == ("own_lock", twice.ident)
    finally:
        own_lock.release()  # of which any thread is capable
        twice.join(LIMIT_S)


def test_a_thread_that_runs_waits_for_no_lock() -> None:
    assert awaited_lock(sys._getframe()) is None
    assert not holds_lock(sys._getframe(), module_lock)
    with module_lock:
        assert holds_lock(sys._getframe(), module_lock)
    assert not holds_lock(sys._getframe(), module_lock)
