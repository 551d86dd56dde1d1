"""The bound on the bytes of calls in flight: the admitted calls, the waiting ones, and their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcdist.deadline import NEVER, Deadline
from rpcdist.rpc._calling.in_flight import InFlightBytes

LIMIT_S = 20.0


def ignore() -> None:
    raise AssertionError("this call has room at once")


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_calls_go_out_until_the_bytes_are_used_up() -> None:
    bound, later = InFlightBytes(100), list[int]()
    assert bound.defer(1, 1, 60, ignore) and bound.defer(1, 2, 40, ignore)
    assert bound.defer(2, 3, 100, ignore)  # another worker
    assert not bound.defer(1, 4, 1, lambda: later.append(4))
    assert later == [] and 4 not in bound.admitted
    bound.end(1, 2)
    assert later == [4] and 4 in bound.admitted and 2 not in bound.admitted


def test_one_that_is_larger_than_the_limit_goes_alone() -> None:
    bound, later = InFlightBytes(100), list[int]()
    assert bound.defer(1, 1, 10, ignore)
    assert not bound.defer(1, 2, 1000, lambda: later.append(2))
    assert not bound.defer(1, 3, 10, lambda: later.append(3))  # it does not overtake
    bound.end(1, 1)
    assert later == [2]
    bound.end(1, 2)
    assert later == [2, 3]


def test_a_call_that_ends_before_its_turn_gives_way() -> None:
    bound, later = InFlightBytes(100), list[int]()
    assert bound.defer(1, 1, 100, ignore)
    assert not bound.defer(1, 2, 100, lambda: later.append(2))
    assert not bound.defer(1, 3, 100, lambda: later.append(3))
    bound.end(1, 2)
    assert later == []
    bound.end(1, 1)
    bound.end(1, 1)
    assert later == [3] and list(bound.usage().values()) == [(100, 0)]


def test_a_thread_waits_until_there_is_room() -> None:
    bound = InFlightBytes(100)
    assert bound.wait(1, 1, 100, NEVER)
    thread, results = in_thread(lambda: bound.wait(1, 2, 50, Deadline.after(LIMIT_S)))
    while not any(num_waiting for _, num_waiting in bound.usage().values()):
        assert thread.is_alive()
    bound.end(1, 1)
    thread.join(LIMIT_S)
    assert results == [True] and 2 in bound.admitted


def test_a_thread_waits_no_longer_than_its_deadline() -> None:
    bound = InFlightBytes(100)
    assert bound.wait(1, 1, 100, NEVER)
    assert not bound.wait(1, 2, 50, Deadline.after(0.001))
    assert not bound.wait(1, 3, 50, Deadline.after(-1.0))
    assert list(bound.usage().values()) == [(100, 0)]
    bound.end(1, 1)
    assert bound.wait(1, 4, 100, NEVER)


def test_handlers_exceed_the_limit_and_others_wait_for_them() -> None:
    bound, later = InFlightBytes(100), list[int]()
    bound.take_anyway(1, 1, 90)
    bound.take_anyway(1, 2, 90)
    assert not bound.defer(1, 3, 20, lambda: later.append(3))
    bound.end(1, 1)
    assert later == []
    bound.end(1, 2)
    assert later == [3]


def test_many_threads_never_exceed_the_limit() -> None:
    bound, lock = InFlightBytes(10), threading.Lock()
    used, most, numbers = 0, 0, iter(range(10_000))

    def call() -> None:
        nonlocal used, most
        for _ in range(200):
            with lock:
                number = next(numbers)
            size = number % 7 + 1
            assert bound.wait(1, number, size, Deadline.after(LIMIT_S))
            with lock:
                used += size
                most = max(most, used)
            with lock:
                used -= size
            bound.end(1, number)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert most <= 10 and used == 0 and not bound.usage()


class Bound(RuleBasedStateMachine):
    """Against a model: a list of calls in the order in which they came."""

    LIMIT = 10

    def __init__(self) -> None:
        super().__init__()
        self.bound = InFlightBytes(self.LIMIT)
        self.calls: dict[int, int] = {}  # by number, in order: the size
        self.admitted: set[int] = set()
        self.next = 0

    @rule(size=st.integers(1, 15))
    def call(self, size: int) -> None:
        number = self.next
        self.next += 1
        self.calls[number] = size
        if self.bound.defer(1, number, size, lambda: self.admitted.add(number)):
            self.admitted.add(number)

    @rule(chance=st.randoms(use_true_random=False))
    def end(self, chance: Any) -> None:
        if self.calls:
            number = chance.choice(list(self.calls))
            del self.calls[number]
            self.admitted.discard(number)
            self.bound.end(1, number)

    @invariant()
    def the_first_ones_are_admitted_and_no_more_fits(self) -> None:
        numbers = list(self.calls)
        assert sorted(self.admitted) == numbers[: len(self.admitted)]
        used = sum(self.calls[number] for number in self.admitted)
        assert used <= self.LIMIT or len(self.admitted) == 1
        if len(self.admitted) < len(numbers):
            assert used and used + self.calls[numbers[len(self.admitted)]] > self.LIMIT


Bound.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestBound = Bound.TestCase
