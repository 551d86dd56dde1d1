"""The pure table of a store: what each operation returns, and whom its changes wake."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist.collectives._stores.shared_table import StoreTable, Waiter
from rpcdist.collectives._stores.store_operations import next_number
from rpcdist.collectives.store import (
    Add,
    Append,
    Check,
    CompareSet,
    DeleteKey,
    Get,
    ListKeys,
    Missing,
    NumKeys,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    StoreOperation,
    Wait,
)
from rpcdist.errors import DistStoreError


def put(key: str, value: bytes = b"v") -> Set:
    return Set((key,), (value,))


def get(*keys: str) -> Get:
    return Get(keys)


def results(table: StoreTable, *operations: StoreOperation[object]) -> list[object]:
    """The result of each operation; nobody may be woken."""
    outcomes = [table.execute(operation) for operation in operations]
    assert all(woken == [] for _, woken in outcomes)
    return [result for result, _ in outcomes]


Woken = tuple[Waiter, object]


def with_results(woken: list[Waiter]) -> list[Woken]:
    return [(waiter, waiter.result) for waiter in woken]


def woken_by(table: StoreTable, operation: StoreOperation[object]) -> list[Woken]:
    return with_results(table.execute(operation)[1])


def parked(table: StoreTable, operation: StoreOperation[object]) -> Waiter:
    missing, _ = table.execute(operation)
    assert isinstance(missing, Missing)
    waiter = Waiter(operation, lambda: None)
    table.park(waiter, missing)
    return waiter


def test_values() -> None:
    table = StoreTable()
    operations = [put("a", b"1"), get("a"), get("b"), Append("a", b"2"), Append("new", b"x"), get("a", "new")]
    assert results(table, *operations) == [None, (b"1",), Missing(("b",)), None, None, (b"12", b"x")]
    assert results(table, get("b", "a", "c"), Wait(("b", "a", "c"))) == [Missing(("b", "c"))] * 2
    assert results(table, Check(("a", "new")), Check(("a", "b")), Check(())) == [True, False, True]
    assert results(table, ListKeys(), ListKeys("ne"), NumKeys()) == [("a", "new"), ("new",), 2]
    assert results(table, DeleteKey("a"), DeleteKey("a"), NumKeys()) == [True, False, 1]
    assert results(table, Set(("x", "y"), (b"1", b"2")), get("y", "x")) == [None, (b"2", b"1")]


def test_add_fails_without_a_trace() -> None:
    table = StoreTable()
    assert results(table, Add("n", 5), Add("n", -7), get("n"), put("t", b"text")) == [5, -2, (b"-2",), None]
    with pytest.raises(DistStoreError, match="not a number"):
        table.execute(Add("t", 1))
    assert results(table, get("t")) == [(b"text",)]


def test_operations_under_a_prefix_have_other_keys_and_nothing_else() -> None:
    assert [each.under("p/") for each in (put("k"), Add("k", 1), QueuePop("k"), ListKeys("k"), NumKeys())] == [
        put("p/k"),
        Add("p/k", 1),
        QueuePop("p/k"),
        ListKeys("p/k"),
        NumKeys(),
    ]
    assert get("a", "b").under("p/") == get("p/a", "p/b")


@pytest.mark.parametrize(
    ("before", "expected", "desired", "returned", "after"),
    [
        (None, b"", b"v", b"v", (b"v",)),
        (None, b"x", b"v", b"x", Missing(("k",))),
        (b"w", b"w", b"v", b"v", (b"v",)),
        (b"w", b"x", b"v", b"w", (b"w",)),
        (b"w", b"", b"v", b"w", (b"w",)),
        (b"", b"", b"v", b"v", (b"v",)),
    ],
)
def test_compare_set(before: bytes | None, expected: bytes, desired: bytes, returned: bytes, after: object) -> None:
    table = StoreTable()
    if before is not None:
        table.execute(put("k", before))
    assert results(table, CompareSet("k", expected, desired), get("k")) == [returned, after]


@pytest.mark.parametrize(
    ("text", "amount", "total"),
    [
        (None, 5, 5),
        (b"5", -7, -2),
        (b" 12", 1, 13),
        (b"12xy", 1, 13),
        (b"+3", 1, 4),
        (b"4611686018427387904", 2**62, -(2**63)),
        (b"-9223372036854775808", -1, 2**63 - 1),
    ],
)
def test_next_number(text: bytes | None, amount: int, total: int) -> None:
    assert next_number("k", text, amount) == total


@pytest.mark.parametrize("text", [b"", b"abc", b"\xff", b"-", b"x" * 100])
def test_next_number_needs_a_number(text: bytes) -> None:
    with pytest.raises(DistStoreError, match="cannot add to key 'k'"):
        next_number("k", text, 1)


def test_a_waiter_is_woken_when_its_last_key_comes_with_the_values_of_that_moment() -> None:
    table = StoreTable()
    table.execute(put("a", b"1"))
    waiter = parked(table, get("b", "a", "c"))
    assert results(table, put("b", b"2"), put("a", b"3")) == [None, None]
    assert woken_by(table, put("c", b"4")) == [(waiter, (b"2", b"3", b"4"))]
    assert len(table.waiters) == 0
    assert woken_by(table, put("c", b"5")) == []


def test_keys_may_come_in_any_order() -> None:
    table = StoreTable()
    waiter = parked(table, get("a", "b", "c"))
    assert results(table, put("c", b"3"), put("a", b"1")) == [None, None]
    assert woken_by(table, put("b", b"2")) == [(waiter, (b"1", b"2", b"3"))]


def test_keys_that_are_set_together_are_seen_together() -> None:
    table = StoreTable()
    waiter = parked(table, get("a"))
    both = parked(table, get("b", "a"))
    assert woken_by(table, Set(("a", "b"), (b"1", b"2"))) == [(waiter, (b"1",)), (both, (b"2", b"1"))]


def test_a_key_that_is_deleted_again_is_waited_for_again() -> None:
    table = StoreTable()
    waiter = parked(table, get("a", "b"))
    assert results(table, put("a", b"1"), DeleteKey("a"), put("b", b"2")) == [None, True, None]
    assert woken_by(table, put("a", b"3")) == [(waiter, (b"3", b"2"))]


def test_a_key_given_twice() -> None:
    table = StoreTable()
    waiter = parked(table, get("a", "a"))
    assert woken_by(table, put("a", b"1")) == [(waiter, (b"1", b"1"))]
    assert len(table.waiters) == 0


def test_queues_count_for_wait_but_not_for_get() -> None:
    table = StoreTable()
    value = parked(table, get("q"))
    wait = parked(table, Wait(("q",)))
    assert woken_by(table, QueuePush("q", b"1")) == [(wait, None)]
    assert results(table, Check(("q",)), get("q")) == [True, Missing(("q",))]
    assert results(table, NumKeys(), ListKeys(), DeleteKey("q"), QueueLen("q")) == [0, (), False, 1]
    assert woken_by(table, put("q", b"v")) == [(value, (b"v",))]
    assert results(table, QueuePop("q"), QueuePop("q"), get("q")) == [b"1", Missing(("q",)), (b"v",)]


def test_poppers_are_served_in_order_and_a_value_goes_to_one() -> None:
    table = StoreTable()
    first, second, third = (parked(table, QueuePop("q")) for _ in range(3))
    table.forget(second)
    assert woken_by(table, QueuePush("q", b"1")) == [(first, b"1")]
    assert woken_by(table, QueuePush("q", b"2")) == [(third, b"2")]
    assert results(table, QueuePush("q", b"3"), QueueLen("q")) == [None, 1]


def test_those_who_wait_for_the_queue_come_before_those_who_empty_it() -> None:
    table = StoreTable()
    popper = parked(table, QueuePop("q"))
    wait = parked(table, Wait(("q",)))
    assert woken_by(table, QueuePush("q", b"1")) == [(wait, None), (popper, b"1")]


def test_a_restored_value_comes_first() -> None:
    table = StoreTable()
    assert results(table, QueuePush("q", b"1"), QueuePush("q", b"2"), QueuePop("q")) == [None, None, b"1"]
    assert table.restore(QueuePop("q"), b"1") == []
    assert results(table, QueuePop("q"), QueuePop("q")) == [b"1", b"2"]
    popper = parked(table, QueuePop("q"))
    assert with_results(table.restore(QueuePop("q"), b"0")) == [(popper, b"0")]


def test_what_was_not_popped_is_not_restored() -> None:
    table = StoreTable()
    assert table.restore(get("q"), (b"1",)) == table.restore(QueuePop("q"), Missing(("q",))) == []
    assert results(table, QueueLen("q")) == [0]


def test_forget_leaves_nothing_behind() -> None:
    table = StoreTable()
    waiters = [parked(table, operation) for operation in (Wait(("a", "b")), get("a"), QueuePop("q"))]
    assert len(table.waiters) == 3
    for waiter in waiters:
        table.forget(waiter)
        table.forget(waiter)
    assert (len(table.waiters), table._watching) == (0, {})
    assert woken_by(table, put("a")) == woken_by(table, QueuePush("q", b"")) == []


KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("push"), KEYS),
    st.tuples(st.just("pop"), KEYS),
    st.tuples(st.just("park"), st.lists(KEYS, min_size=1, max_size=3), st.booleans()),
    st.tuples(st.just("park_pop"), KEYS),
    st.tuples(st.just("forget"), st.integers(0, 10)),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=40))
def test_against_a_model_that_looks_at_everything_after_each_step(steps: list[tuple[object, ...]]) -> None:
    """The invariants of the module, on random histories."""
    table = StoreTable()
    values: set[str] = set()
    queues: dict[str, deque[bytes]] = {key: deque() for key in "abc"}
    waiting: dict[Waiter, tuple[list[str], bool]] = {}
    popping: dict[Waiter, str] = {}
    known: list[Waiter] = []

    def there(key: str, values_only: bool) -> bool:
        return key in values or (not values_only and bool(queues[key]))

    for count, (step, *arguments) in enumerate(steps):
        woken: list[Woken] = []
        key = arguments[0] if isinstance(arguments[0], str) else "a"
        expected: set[Waiter] = set()
        if step == "set":
            values.add(key)
            woken = woken_by(table, put(key))
        elif step == "delete":
            assert results(table, DeleteKey(key)) == [key in values]
            values.discard(key)
        elif step == "push":
            queues[key].append(str(count).encode())
            expected = {n for n, (keys, only) in waiting.items() if all(there(k, only) for k in keys)}
            woken = woken_by(table, QueuePush(key, str(count).encode()))
            for number in [n for n, k in popping.items() if k == key][:1]:
                assert (number, queues[key].popleft()) in woken
                expected.add(number)
        elif step == "pop":
            assert results(table, QueuePop(key)) == [queues[key].popleft() if queues[key] else Missing((key,))]
        elif step == "park":
            keys, only = arguments
            assert isinstance(keys, list) and isinstance(only, bool)
            if not all(there(k, only) for k in keys):
                known.append(parked(table, Get(tuple(keys)) if only else Wait(tuple(keys))))
                waiting[known[-1]] = (keys, only)
        elif step == "park_pop" and not queues[key]:
            known.append(parked(table, QueuePop(key)))
            popping[known[-1]] = key
        elif step == "forget":
            place = arguments[0]
            assert isinstance(place, int)
            for forgotten in known[place : place + 1]:
                table.forget(forgotten)
                waiting.pop(forgotten, None)
                popping.pop(forgotten, None)
        expected |= {n for n, (keys, only) in waiting.items() if all(there(k, only) for k in keys)}
        assert {waiter for waiter, _ in woken} == expected
        for number in expected:
            waiting.pop(number, None)
            popping.pop(number, None)
        assert len(table.waiters) == len(waiting) + len(popping)
        assert set(table.contents.values) == values
        assert results(table, *map(QueueLen, "abc")) == [len(queues[k]) for k in "abc"]


def test_white_space_before_a_number_is_bounded() -> None:
    """For megabytes of it, each `add` held the interpreter's lock for a second."""
    assert next_number("k", b" " * 60 + b"41", 1) == 42
    with pytest.raises(DistStoreError, match="is not a number"):
        next_number("k", b" " * 1000 + b"41", 1)


def test_a_value_that_grows_is_not_copied_for_each_append() -> None:
    table = StoreTable()
    table.execute(put("k", b"1"))
    table.execute(Append("k", b"2"))
    grown = table.contents.values["k"]
    table.execute(Append("k", b"3"))
    assert table.contents.values["k"] is grown
    assert results(table, get("k"), CompareSet("k", b"x", b"y"), Add("k", 1)) == [(b"123",), b"123", 124]
    assert all(type(value) is bytes for value in table.contents.values.values())


class CountingDict(dict[str, bytes | bytearray]):
    """Counts the questions for keys."""

    num_looks = 0

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)


def test_who_waits_for_many_keys_is_not_looked_at_again_for_each_of_them() -> None:
    """One small message had a store look up all keys of all waits."""
    table = StoreTable()
    table.contents.values = counting = CountingDict()
    keys = tuple(map(str, range(1000)))
    number = parked(table, Wait(keys))
    other = parked(table, get(*keys, "last"))
    counting.num_looks = 0
    for key in keys[:0:-1]:
        assert woken_by(table, put(key)) == []
    assert counting.num_looks < 10 * len(keys)
    table.execute(DeleteKey("500"))
    assert woken_by(table, put("0")) == []
    assert woken_by(table, put("500")) == [(number, None)]
    table.execute(QueuePush("last", b"not a value"))
    assert woken_by(table, put("last")) == [(other, (b"v",) * 1001)]
    assert len(table.waiters) == 0 and not table._watching
