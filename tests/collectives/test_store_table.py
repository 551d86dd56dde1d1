"""The pure table of a store: what each change returns and whom it wakes."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist.collectives._stores.table import StoreTable, Woken, next_number
from rpcdist.errors import DistStoreError


def test_values() -> None:
    table = StoreTable()
    assert table.set("a", b"1") == []
    assert table.get("a") == b"1"
    assert table.get("b") is None
    assert table.append("a", b"2") == []
    assert table.append("new", b"x") == []
    assert (table.get("a"), table.get("new")) == (b"12", b"x")
    assert table.missing(["b", "a", "c"]) == ["b", "c"]
    assert sorted(table.keys()) == ["a", "new"]
    assert table.keys("ne") == ["new"]
    assert (table.delete("a"), table.delete("a"), table.num_keys) == (True, False, 1)


@pytest.mark.parametrize(
    ("before", "expected", "desired", "returned", "after"),
    [
        (None, b"", b"v", b"v", b"v"),
        (None, b"x", b"v", b"x", None),
        (b"w", b"w", b"v", b"v", b"v"),
        (b"w", b"x", b"v", b"w", b"w"),
        (b"w", b"", b"v", b"w", b"w"),
        (b"", b"", b"v", b"v", b"v"),
    ],
)
def test_compare_set(
    before: bytes | None, expected: bytes, desired: bytes, returned: bytes, after: bytes | None
) -> None:
    table = StoreTable()
    if before is not None:
        table.set("k", before)
    assert table.compare_set("k", expected, desired) == (returned, [])
    assert table.get("k") == after


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
    table.set("a", b"1")
    waiter = table.park(["b", "a", "c"], values_only=True)
    assert table.set("b", b"2") == []
    assert table.set("a", b"3") == []
    assert table.set("c", b"4") == [Woken(waiter, (b"2", b"3", b"4"))]
    assert table.num_waiters == 0
    assert table.set("c", b"5") == []


def test_a_key_that_is_deleted_again_is_waited_for_again() -> None:
    table = StoreTable()
    waiter = table.park(["a", "b"], values_only=True)
    table.set("a", b"1")
    table.delete("a")
    assert table.set("b", b"2") == []
    assert table.set("a", b"3") == [Woken(waiter, (b"3", b"2"))]


def test_a_key_given_twice() -> None:
    table = StoreTable()
    waiter = table.park(["a", "a"], values_only=True)
    assert table.set("a", b"1") == [Woken(waiter, (b"1", b"1"))]
    assert table.num_waiters == 0


def test_queues_count_for_wait_but_not_for_get() -> None:
    table = StoreTable()
    get = table.park(["q"], values_only=True)
    wait = table.park(["q"], values_only=False)
    assert table.queue_push("q", b"1") == [Woken(wait, (b"",))]
    assert table.missing(["q"]) == []
    assert table.missing(["q"], values_only=True) == ["q"]
    assert (table.num_keys, table.keys(), table.delete("q"), table.queue_len("q")) == (0, [], False, 1)
    assert table.set("q", b"v") == [Woken(get, (b"v",))]
    assert (table.queue_pop("q"), table.queue_pop("q"), table.get("q")) == (b"1", None, b"v")


def test_poppers_are_served_in_order_and_a_value_goes_to_one() -> None:
    table = StoreTable()
    first, second, third = (table.park_pop("q") for _ in range(3))
    table.forget(second)
    assert table.queue_push("q", b"1") == [Woken(first, (b"1",))]
    assert table.queue_push("q", b"2") == [Woken(third, (b"2",))]
    assert table.queue_push("q", b"3") == []
    assert table.queue_len("q") == 1


def test_a_restored_value_comes_first() -> None:
    table = StoreTable()
    table.queue_push("q", b"1")
    table.queue_push("q", b"2")
    value = table.queue_pop("q")
    assert value == b"1"
    table.queue_restore("q", value)
    assert (table.queue_first("q"), table.queue_pop("q"), table.queue_pop("q")) == (b"1", b"1", b"2")
    popper = table.park_pop("q")
    assert table.queue_restore("q", b"0") == [Woken(popper, (b"0",))]


def test_forget_leaves_nothing_behind() -> None:
    table = StoreTable()
    waiters = [table.park(["a", "b"], values_only=False), table.park(["a"], values_only=True), table.park_pop("q")]
    assert table.num_waiters == 3
    for waiter in waiters:
        table.forget(waiter)
        table.forget(waiter)
    assert table.num_waiters == 0
    assert (table._watchers, table._poppers) == ({}, {})
    assert table.set("a", b"") == table.queue_push("q", b"") == []


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
    """Invariants I1 to I5 of the module, on random histories."""
    table = StoreTable()
    values: set[str] = set()
    queues: dict[str, deque[bytes]] = {key: deque() for key in "abc"}
    waiting: dict[int, tuple[list[str], bool]] = {}
    popping: dict[int, str] = {}

    def there(key: str, values_only: bool) -> bool:
        return key in values or (not values_only and bool(queues[key]))

    for count, (step, *arguments) in enumerate(steps):
        woken: list[Woken] = []
        key = arguments[0] if isinstance(arguments[0], str) else "a"
        expected: set[int] = set()
        if step == "set":
            values.add(key)
            woken = table.set(key, b"v")
        elif step == "delete":
            assert table.delete(key) == (key in values)
            values.discard(key)
        elif step == "push":
            queues[key].append(str(count).encode())
            expected = {n for n, (keys, only) in waiting.items() if all(there(k, only) for k in keys)}
            woken = table.queue_push(key, str(count).encode())
            for number in [n for n, k in popping.items() if k == key][:1]:
                assert Woken(number, (queues[key].popleft(),)) in woken
                expected.add(number)
        elif step == "pop":
            assert table.queue_pop(key) == (queues[key].popleft() if queues[key] else None)
        elif step == "park":
            keys, only = arguments
            assert isinstance(keys, list) and isinstance(only, bool)
            if not all(there(k, only) for k in keys):
                waiting[table.park(keys, only)] = (keys, only)
        elif step == "park_pop" and not queues[key]:
            popping[table.park_pop(key)] = key
        elif step == "forget":
            forgotten = arguments[0]
            assert isinstance(forgotten, int)
            table.forget(forgotten)
            waiting.pop(forgotten, None)
            popping.pop(forgotten, None)
        expected |= {n for n, (keys, only) in waiting.items() if all(there(k, only) for k in keys)}
        assert {each.waiter for each in woken} == expected
        for number in expected:
            waiting.pop(number, None)
            popping.pop(number, None)
        assert table.num_waiters == len(waiting) + len(popping)
        assert set(table.keys()) == values
        assert all(table.queue_len(k) == len(queues[k]) for k in "abc")
