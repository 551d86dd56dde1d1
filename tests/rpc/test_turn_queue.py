"""Whose turn it is: every order of arrival gives each caller's order, and nothing waits for what never comes."""

from __future__ import annotations

import itertools
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rpcdist.errors import Overloaded, RpcdistError
from rpcdist.rpc._actors import turn_queue
from rpcdist.rpc._actors.serial_calls import CallOrder
from rpcdist.rpc._actors.turn_queue import CallNumber, TurnQueue
from rpcdist.rpc._calling.rref_calls import RRefCalls
from rpcdist.rpc._rref.messages import RRefId
from rpcdist.rpc.future import Future


def callers_of(queue: TurnQueue[str, object]) -> dict[str, Any]:
    """The state that it keeps of each caller."""
    return queue._callers


def drain(queue: TurnQueue[str, object]) -> list[object]:
    return list(iter(queue.take, None))


def arrive(queue: TurnQueue[str, object], who: str, *numbers: int, floor: int = 0, stream: int = 0) -> None:
    for number in numbers:
        queue.arrive(who, CallNumber(stream, number, min(floor, number)), f"{who}{number}")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_every_order_of_arrival_gives_the_order_of_the_caller(order: tuple[int, ...]) -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", *order)
    assert drain(queue) == ["a0", "a1", "a2", "a3"]
    assert len(queue) == 0


def test_a_call_waits_for_an_earlier_one() -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 0, 2)
    assert drain(queue) == ["a0"]
    arrive(queue, "a", 1)
    assert drain(queue) == ["a1", "a2"]


def test_callers_take_turns() -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "flood", *range(100))
    arrive(queue, "a", 0, 1)
    first = [queue.take() for _ in range(5)]
    assert first == ["flood0", "a0", "flood1", "a1", "flood2"]


def test_what_is_over_is_not_waited_for() -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 0, 2, 4)
    queue.over("a", 0, [1])
    assert drain(queue) == ["a0", "a2"]
    queue.over("b", 0, [3])  # of another caller
    assert drain(queue) == []
    arrive(queue, "a", 6, floor=6)  # its caller has seen the end of 0 to 5
    assert drain(queue) == ["a4", "a6"]


def test_a_call_that_is_over_and_comes_after_all_has_a_turn() -> None:
    """It ends as any call whose caller has given up; nobody waits for it."""
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 1)
    queue.over("a", 0, [0])
    arrive(queue, "a", 0)
    assert drain(queue) == ["a1", "a0"]


def test_a_new_stream_begins_after_what_is_left_of_the_old() -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 0, 3)
    arrive(queue, "a", 0, stream=1)
    assert drain(queue) == ["a0", "a3", "a0"]
    arrive(queue, "a", 1)  # late, of the old stream
    queue.over("a", 0, [1])
    arrive(queue, "a", 1, stream=1)
    assert drain(queue) == ["a1", "a1"]


def test_the_end_of_a_caller_frees_what_it_left() -> None:
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 1, 5)
    queue.gone("a")
    queue.gone("a")
    assert drain(queue) == ["a1", "a5"]


def test_a_caller_cannot_fill_the_memory_of_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_queue, "MAX_WAITING", 3)
    queue: TurnQueue[str, object] = TurnQueue()
    arrive(queue, "a", 0, 2, 3)
    with pytest.raises(Overloaded, match="wait for results"):
        arrive(queue, "a", 1)
    arrive(queue, "b", 0)
    assert drain(queue) == ["a0", "b0", "a2", "a3"]  # the one that was refused is not waited for
    queue.over("a", 0, range(10**6))
    assert len(callers_of(queue)["a"].over) <= 3


@pytest.mark.parametrize(
    "parts", [None, (1, 2), (0, 1, 2), (-1, 0, 0), (0, 1, -1), (0, 1.0, 0), [0, 0, 0], (0, True, 0)]
)
def test_an_order_that_is_none_is_refused(parts: object) -> None:
    with pytest.raises(RpcdistError, match=r"\(stream, number, floor\)"):
        CallNumber.checked(parts)


class Owner:
    """The messages of a caller, and the moments at which the owner has received them."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []
        self.futures: list[Future[None]] = []

    def tell(self, stream: int, numbers: tuple[int, ...]) -> Future[None]:
        self.told.append(numbers)
        self.futures.append(Future())
        return self.futures[-1]


def test_a_caller_says_what_is_over_only_where_somebody_may_wait_for_it() -> None:
    order, owner = CallOrder(0), Owner()
    assert [order.begin() for _ in range(5)] == [(0, number, 0) for number in range(5)]
    order.end(1, True, owner.tell)
    assert not owner.told
    order.end(2, False, owner.tell)
    order.end(3, False, owner.tell)
    assert owner.told == [(2,)]  # one message at a time
    owner.futures[0].set_result(None)
    assert owner.told == [(2,), (3,)]
    order.end(0, True, owner.tell)
    assert order.begin() == (0, 5, 4)
    order.end(5, True, owner.tell)
    owner.futures[1].set_result(None)
    order.end(4, False, owner.tell)  # the last one: the floor of the next call says it
    assert owner.told == [(2,), (3,)]
    assert order.begin() == (0, 6, 6)


def test_all_references_of_a_process_share_an_order_while_one_lives() -> None:
    part: Any = SimpleNamespace(me=None, my_name="a", check_sharable=None, fetch_error=None, flush=None)
    order_of = RRefCalls(part, part, part, part, part, part, "smart", part, part).order_of  # no call is made
    rref = RRefId(1, 2, 3)
    order = order_of(rref)
    assert order_of(rref) is order
    order.begin()
    del order
    assert order_of(rref).begin() == (1, 0, 0)


def tell(
    who: str, way: list[tuple[str, CallNumber | tuple[int, ...]]], stream: int, numbers: tuple[int, ...]
) -> Future[None]:
    way.append((who, numbers))
    done: Future[None] = Future()
    done.set_result(None)
    return done


def test_random_callers_losses_and_delays() -> None:
    """Calls are lost, are late, and come in any order; in the end every call that came has run, in order."""
    for seed in range(200):
        chance = random.Random(seed)
        queue: TurnQueue[str, object] = TurnQueue()
        orders = {who: CallOrder(0) for who in "abc"}
        on_the_way: list[tuple[str, CallNumber | tuple[int, ...]]] = []
        ran: list[Any] = []
        expected: dict[str, list[int]] = {who: [] for who in "abc"}

        for _ in range(60):
            who = chance.choice("abc")
            number = orders[who].begin()
            if chance.random() < 0.2:
                orders[who].end(number.number, False, partial(tell, who, on_the_way))
            else:
                on_the_way.append((who, number))
                expected[who].append(number.number)
        chance.shuffle(on_the_way)
        for who, message in on_the_way:
            if isinstance(message, CallNumber):
                queue.arrive(who, message, (who, message.number))
            else:
                queue.over(who, 0, message)
            if chance.random() < 0.5:
                ran += drain(queue)
        ran += drain(queue)
        for who in "abc":
            assert [number for caller, number in ran if caller == who] == expected[who], seed


def test_passing_by_is_arriving_and_being_taken() -> None:
    """Two queues get the same calls, in near order; one lets pass by what may. Both give the same order to the end."""
    num_passed = 0
    for seed in range(200):
        chance = random.Random(seed)
        plain: TurnQueue[str, object] = TurnQueue()
        quick: TurnQueue[str, object] = TurnQueue()
        sent = {(who, stream): chance.randint(0, 8) for who in "ab" for stream in range(2)}
        calls = [(stream, number, who) for (who, stream), count in sent.items() for number in range(count)]
        calls.sort(key=lambda call: (call[0], call[1] + 2 * chance.random()))
        for stream, number, who in calls:
            call = CallNumber(stream, number, chance.randint(0, number))
            if chance.random() < 0.1:
                for queue in (plain, quick):
                    queue.over(who, stream, (number,))
                continue
            plain.arrive(who, call, call)
            if quick.pass_by(who, call):
                num_passed += 1
                assert plain.take() == call
            else:
                quick.arrive(who, call, call)
            if chance.random() < 0.5:
                assert drain(plain) == drain(quick)
        assert drain(plain) == drain(quick)
        assert {who: list(one.early) for who, one in callers_of(plain).items()} == {
            who: list(one.early) for who, one in callers_of(quick).items()
        }
    assert num_passed > 200


def test_a_call_is_not_looked_for_among_all_that_came_early() -> None:
    """Each call that told of the end of others had the owner look at up to 65,536 that waited."""
    chance = random.Random(3)
    queue: TurnQueue[str, object] = TurnQueue()
    floor = 0
    for _ in range(2000):
        floor += chance.choice((0, 0, 0, 1, 5))
        number = floor + chance.randrange(40)
        if chance.random() < 0.3:
            queue.over("a", 0, (number,))
        else:
            queue.arrive("a", CallNumber(0, number, floor), number)
        [caller] = callers_of(queue).values()
        assert sorted(caller.numbers) == sorted(caller.early)
        assert all(each >= caller.next for each in (*caller.early, *caller.over))
    queue.gone("a")
    assert not caller.numbers and len(drain(queue)) > 1000
