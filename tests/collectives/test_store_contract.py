"""The contract of every store. torch's own stores run the same tests through the adapter: the contract is torch's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from full_sets import FULL_ONLY
from threads_at_once import WatchedThreads

from rpcdist.collectives import (
    DistStoreError,
    FileStore,
    HashStore,
    PrefixStore,
    QueueEmptyError,
    Store,
    StoreTimeout,
    TCPStore,
    TorchStoreAdapter,
)
from rpcdist.collectives._stores import store_operations, store_service
from rpcdist.collectives._stores.store_operations import next_number
from rpcdist.collectives.store import Add, Get, Set, StoreOperation, Wait
from rpcdist.deadline import Deadline

LIMIT_S = 20.0
SHORT_S = 0.15

Opener = Callable[[Path, ExitStack], Store]


def tcp_client(stack: ExitStack) -> TCPStore:
    master = stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT_S))
    return stack.enter_context(TCPStore("127.0.0.1", master.port, timeout=LIMIT_S))


def torch_store(stack: ExitStack, store: torch.distributed.Store) -> TorchStoreAdapter:
    return stack.enter_context(TorchStoreAdapter(store))


def torch_tcp() -> torch.distributed.Store:
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class OwnMethods:
    """A store that a program might bring: torch's methods, on a table in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, bytes] = {}
        self.lock = threading.RLock()

    def set(self, key: str, value: Any) -> None:
        with self.lock:
            self.table[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.table[key]

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.table[key] = str(next_number(key, self.table.get(key), amount)).encode()
            return int(self.table[key])

    def append(self, key: str, value: bytes) -> None:
        with self.lock:
            self.table[key] = self.table.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self.lock:
            if key not in self.table and expected:
                return expected
            if self.table.get(key, b"") == expected:
                self.table[key] = desired
            return self.table[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.table for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.table.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.table)

    def list_keys(self) -> list[str]:
        return list(self.table)

    def clone(self) -> Any:
        return self


class OwnStore(OwnMethods, Store):  # type: ignore[misc]  # the arguments are simpler than those of the base
    """A subclass of this package's class."""


class TorchsOwnStore(OwnMethods, torch.distributed.Store):  # type: ignore[misc]
    """A subclass of torch's class."""


STORES: dict[str, Opener] = {
    "hash": lambda path, stack: HashStore(),
    "file": lambda path, stack: stack.enter_context(FileStore(path / "store")),
    "tcp-master": lambda path, stack: stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True)),
    "tcp-client": lambda path, stack: tcp_client(stack),
    "prefix-hash": lambda path, stack: PrefixStore("p", HashStore()),
    "prefix-file": lambda path, stack: PrefixStore("p", stack.enter_context(FileStore(path / "store"))),
    "prefix-prefix-tcp": lambda path, stack: PrefixStore("p", PrefixStore("q", tcp_client(stack))),
    "torch-hash": lambda path, stack: torch_store(stack, torch.distributed.HashStore()),
    "torch-tcp": lambda path, stack: torch_store(stack, torch_tcp()),
    "torch-file": lambda path, stack: torch_store(stack, torch.distributed.FileStore(str(path / "store"))),
    "torch-prefix-tcp": lambda path, stack: torch_store(stack, torch.distributed.PrefixStore("p", torch_tcp())),
    "prefix-own": lambda path, stack: PrefixStore("p", OwnStore()),
    "torch-own": lambda path, stack: torch_store(stack, TorchsOwnStore()),
    "prefix-torch": lambda path, stack: PrefixStore("p", TorchStoreAdapter(torch.distributed.HashStore())),
}


# One of each kind: in memory, a file, the process that serves and another one, a prefix, torch's stores around ours and
# ours around torch's, and subclasses that users write.
ALWAYS = set("hash file tcp-master tcp-client prefix-file torch-tcp prefix-torch prefix-own torch-own".split())


@pytest.fixture(params=[pytest.param(name, marks=() if name in ALWAYS else FULL_ONLY) for name in STORES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        opened = STORES[request.param](tmp_path, stack)
        opened.set_timeout(LIMIT_S)
        yield opened


@pytest.fixture
def ours(request: pytest.FixtureRequest, store: Store) -> bool:
    """Whether the implementation is of this package; torch's have faults of their own."""
    return "torch" not in request.node.callspec.params["store"]


@pytest.fixture
def queues(store: Store) -> Store:
    if not store.has_extended_api():
        pytest.skip("torch's FileStore has no queues")
    return store


@pytest.fixture
def threads() -> Iterator[WatchedThreads]:
    with WatchedThreads(8) as pool:
        yield pool


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("value", "data"),
    [("text", b"text"), (b"\x00\xff", b"\x00\xff"), (bytearray(b"x"), b"x"), ("", b""), ("ü", "ü".encode())],
)
def test_set_and_get(store: Store, value: str | bytes | bytearray, data: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == data
    assert type(store.get("key")) is bytes


@pytest.mark.parametrize("key", ["", "ü", "a/b", "a b\n", "k" * 1000])
def test_any_text_is_a_key(store: Store, key: str) -> None:
    store.set(key, "1")
    assert store.get(key) == b"1"
    assert key in store.list_keys()


def test_large_values_and_answers(store: Store, ours: bool) -> None:
    """Every request and every answer that may be large, beyond one message between processes."""
    value = bytes(range(256)) * (12 << 10)  # 3 MiB
    store.set("key", value)
    assert store.get("key") == value
    store.multi_set(["a", "b"], [value, value[1:]])
    assert store.multi_get(["key", "a", "b"]) == [value, value, value[1:]]
    assert store.compare_set("a", value, b"small") == b"small"
    assert store.compare_set("a", b"no", b"small") == b"small" and store.compare_set("b", b"no", b"x") == value[1:]
    if store.has_extended_api():  # torch's FileStore loses a part of it
        store.append("key", value)
        assert store.get("key") == value * 2
    keys = [f"{'k' * 300}{number}" for number in range(10_000)] if ours else ["k"]
    store.multi_set(keys, ["1"] * len(keys))
    store.wait(keys)
    assert store.check(keys) and set(keys) <= set(store.list_keys())
    with pytest.raises(StoreTimeout, match=r"keys: .*missing"):
        store.wait([f"{key}-" for key in keys], SHORT_S)


def test_large_values_in_queues(queues: Store) -> None:
    value = b"x" * (3 << 20)
    queues.queue_push("q", value)
    queues.queue_push("q", b"2")
    assert [queues.queue_pop("q"), queues.queue_pop("q")] == [value, b"2"]


@pytest.mark.parametrize(
    "call",
    [
        lambda store, value: store.set("k", value),
        lambda store, value: store.multi_set(["k", "l"], [value[::2], value[::2] + b"xx"]),
        lambda store, value: store.append("k", value),
        lambda store, value: store.compare_set("k", "", value),
        lambda store, value: store.queue_push("k", value),
        lambda store, value: [store.append("k", value[::2] + b"x") for _ in range(2)],
        lambda store, value: store.set(value.decode(), "1"),
    ],
)
def test_what_is_too_large_is_refused_with_size_and_limit(call: Callable[[Store, bytes], object]) -> None:
    store = HashStore()
    with pytest.raises(DistStoreError, match=r"\b1000\d\d\b.* \b100000\b"):
        call(store, b"1" * 100_001)
    assert store.num_keys() <= 1


@pytest.fixture(autouse=True)
def small_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "too_large" in request.node.name:
        for module in (store_operations, store_service):
            monkeypatch.setattr(module, "LARGEST_BYTES", 100_000)


def test_an_answer_that_is_too_large_is_refused_with_size_and_limit() -> None:
    with ExitStack() as stack:
        client = tcp_client(stack)
        for key in "ab":
            client.set(key, b"x" * 60_000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_service, "LARGEST_UNCUT_BYTES", 50_000)
            with pytest.raises(DistStoreError, match=r"get\(\) has 1200\d\d bytes, but .* at most 100000 bytes"):
                client.multi_get(["a", "b"])
            assert client.get("b") == b"x" * 60_000


def test_torchs_tcp_store_is_not_given_what_it_hangs_up_on() -> None:
    with ExitStack() as stack:
        store = PrefixStore("p", torch_store(stack, torch.distributed.PrefixStore("q", torch_tcp())))
        value = b"x" * ((8 << 20) + 1)
        with pytest.raises(DistStoreError, match=r"\b8388609 bytes, but .* at most 8388608 bytes"):
            store.set("k", value)
        with pytest.raises(DistStoreError, match=r"\b8388609 bytes, but .* at most 8388608 bytes"):
            store.multi_set(["a", "k"], [b"1", value])
        store.set("k", b"x" * (8 << 20))
        assert len(store.get("k")) == 8 << 20


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set("k", 3),
        lambda store: store.set(3, "v"),
        lambda store: store.set("k", memoryview(b"v")),
        lambda store: store.check("k"),
        lambda store: store.wait("k"),
        lambda store: store.multi_get("k"),
        lambda store: store.add("k", 2**64),
        lambda store: store.add("k", "1"),
        lambda store: store.wait(["k"], "1 s"),
    ],
)
def test_wrong_types(store: Store, call: Callable[[Store], object]) -> None:
    with pytest.raises(TypeError):
        call(store)


def test_add(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.get("n") == b"5"
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "12")
    assert store.add("n", 0) == 12


def test_add_wraps_at_64_bits(store: Store) -> None:
    store.add("n", 2**62)
    assert store.add("n", 2**62) == -(2**63)


def test_add_to_what_is_not_a_number(store: Store, ours: bool) -> None:
    if not ours:
        pytest.skip("torch's TCPStore drops the connection")
    store.set("k", "text")
    with pytest.raises(DistStoreError, match="not a number"):
        store.add("k", 1)
    assert store.get("k") == b"text"


def test_append(store: Store) -> None:
    store.append("k", "ab")
    store.append("k", b"\x00")
    store.set("set", "1")
    store.append("set", "2")
    assert (store.get("k"), store.get("set")) == (b"ab\x00", b"12")


def test_check(store: Store) -> None:
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.check([])


def test_compare_set(store: Store) -> None:
    assert store.compare_set("k", "other", "v") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "v") == b"v"
    assert store.compare_set("k", b"v", b"w") == b"w"
    assert store.compare_set("k", "v", "x") == b"w"
    assert store.compare_set("k", "", "x") == b"w"
    assert store.get("k") == b"w"


def test_delete_key(store: Store, ours: bool) -> None:
    store.set("a", "1")
    assert store.delete_key("a")
    assert not store.check(["a"])
    if ours:  # torch's FileStore says True for a key that never was
        assert not store.delete_key("a")
    store.set("a", "2")
    assert store.get("a") == b"2"


def test_num_keys_and_list_keys(store: Store, ours: bool) -> None:
    before = store.num_keys()
    if ours:
        assert before == 0
    for key in ("a", "b", "c"):
        store.set(key, key)
    store.delete_key("b")
    assert store.num_keys() == before + 2
    assert {"a", "c"} <= set(store.list_keys())
    assert "b" not in store.list_keys()


def test_multi_set_and_multi_get(store: Store) -> None:
    store.multi_set(["a", "b"], ["1", b"\xff"])
    assert store.multi_get(["b", "a", "b"]) == [b"\xff", b"1", b"\xff"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    with pytest.raises(DistStoreError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])


# ---------------------------------------------------------------- waiting


def test_get_waits_for_the_key(store: Store, threads: WatchedThreads) -> None:
    with store_of(store) as other:
        call = threads.submit(other.get, "late")
        threads.all_asleep()  # the call should be inside get(); either order has to work
        store.set("late", "v")
        assert call.result(LIMIT_S) == b"v"


def test_wait_and_multi_get_wait_for_all_keys(store: Store, threads: WatchedThreads) -> None:
    with store_of(store) as first, store_of(store) as second:
        wait = threads.submit(first.wait, ["a", "b"])
        get = threads.submit(second.multi_get, ["b", "a"])
        store.set("a", "1")
        threads.all_asleep()
        assert not wait.done() and not get.done()
        store.set("b", "2")
        wait.result(LIMIT_S)
        assert get.result(LIMIT_S) == [b"2", b"1"]


@pytest.mark.parametrize("timeout", [timedelta(seconds=SHORT_S), SHORT_S], ids=["timedelta", "seconds"])
def test_wait_times_out_and_names_what_is_missing(store: Store, timeout: timedelta | float) -> None:
    store.set("there", "1")
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"timeout after 150ms, keys: .*missing1, .*missing2 ") as caught:
        store.wait(["there", "missing1", "missing2"], timeout)
    assert SHORT_S * 0.9 <= time.monotonic() - started < LIMIT_S / 2
    assert store.address in str(caught.value)
    assert isinstance(caught.value, DistStoreError) and isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0)])
def test_a_wait_without_time_only_looks(store: Store, timeout: timedelta | float) -> None:
    store.set("there", "1")
    store.wait(["there"], timeout)
    with pytest.raises(StoreTimeout):
        store.wait(["missing"], timeout)


def test_the_timeout_of_the_store(store: Store) -> None:
    store.set_timeout(timedelta(seconds=SHORT_S))
    assert store.timeout == timedelta(seconds=SHORT_S)
    store.set("there", "1")
    for call in (lambda: store.get("missing"), lambda: store.multi_get(["there", "missing"])):
        with pytest.raises(StoreTimeout, match="missing"):
            call()
    with pytest.raises(StoreTimeout, match="missing"):
        store.wait(["missing"])
    assert store.get("there") == b"1"  # the store is as good as before


def test_a_wait_after_one_that_timed_out(store: Store, threads: WatchedThreads) -> None:
    with pytest.raises(StoreTimeout):
        store.wait(["k"], SHORT_S)
    with store_of(store) as other:
        call = threads.submit(other.get, "k")
        store.set("k", "v")
        assert call.result(LIMIT_S) == b"v"


def test_wait_for_nothing(store: Store) -> None:
    store.wait([])


# ---------------------------------------------------------------- queues


def test_queue(queues: Store) -> None:
    queues.queue_push("q", "1")
    queues.queue_push("q", b"\xff")
    assert (queues.queue_len("q"), queues.queue_len("none")) == (2, 0)
    assert queues.queue_pop("q") == b"1"
    assert queues.queue_pop("q", block=False) == b"\xff"
    with pytest.raises(QueueEmptyError, match="queue is empty"):
        queues.queue_pop("q", False)


def test_queues_beside_values(queues: Store) -> None:
    before = queues.num_keys()
    queues.queue_push("k", "1")
    assert queues.check(["k"])
    queues.wait(["k"], 0)
    assert queues.num_keys() == before
    assert "k" not in queues.list_keys()
    assert not queues.delete_key("k")
    queues.set("k", "value")
    assert (queues.get("k"), queues.queue_pop("k"), queues.get("k")) == (b"value", b"1", b"value")


def test_queue_pop_waits(queues: Store, threads: WatchedThreads) -> None:
    with store_of(queues) as other:
        call = threads.submit(other.queue_pop, "q")
        threads.all_asleep()
        queues.queue_push("q", "1")
        assert call.result(LIMIT_S) == b"1"
    queues.set_timeout(SHORT_S)
    with pytest.raises(StoreTimeout, match="q"):
        queues.queue_pop("q")


def test_each_queued_value_goes_to_one_caller(queues: Store, threads: WatchedThreads) -> None:
    def pop_five(store: Store) -> list[bytes]:
        return [store.queue_pop("q") for _ in range(5)]

    with ExitStack() as stack:
        calls = [threads.submit(pop_five, stack.enter_context(store_of(queues))) for _ in range(4)]
        for number in range(20):
            queues.queue_push("q", str(number))
        popped = [value for call in calls for value in call.result(LIMIT_S)]
    assert sorted(popped, key=int) == [str(number).encode() for number in range(20)]
    assert queues.queue_len("q") == 0


# ---------------------------------------------------------------- several users


def test_concurrent_adds(store: Store, threads: WatchedThreads) -> None:
    def add(_: int) -> list[int]:
        with store_of(store) as each:
            return [each.add("n", 1) for _ in range(25)]

    sums = [number for numbers in threads.map(add, range(4)) for number in numbers]
    assert sorted(sums) == list(range(1, 101))


def test_concurrent_compare_set_has_one_winner(store: Store, threads: WatchedThreads) -> None:
    def claim(number: int) -> bool:
        with store_of(store) as each:
            return each.compare_set("leader", "", str(number)) == str(number).encode()

    assert sum(threads.map(claim, range(8))) == 1


def test_one_object_from_several_threads(store: Store, threads: WatchedThreads) -> None:
    sums = list(threads.map(lambda _: store.add("n", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


def test_barrier(store: Store, threads: WatchedThreads) -> None:
    came: list[int] = []

    def meet(number: int) -> None:
        with store_of(store) as each:
            for round_number in range(3):
                came.append(round_number)
                each.barrier("meeting", 3)
                assert came.count(round_number) == 3

    for _ in threads.map(meet, range(3)):
        pass


def test_barrier_times_out(store: Store) -> None:
    store.barrier("alone", 1)
    with pytest.raises(StoreTimeout, match="two"):
        store.barrier("two", 2, timedelta(seconds=SHORT_S))
    with pytest.raises(ValueError, match="world_size of at least 1"):
        store.barrier("none", 0)


def test_clone_sees_the_same_table_and_has_its_own_timeout(store: Store) -> None:
    store.set("k", "1")
    with store_of(store) as twin:
        assert type(twin) is type(store)
        assert twin.get("k") == b"1"
        twin.set("k", "2")
        if not isinstance(store, PrefixStore):
            twin.set_timeout(1)
            assert store.timeout == timedelta(seconds=LIMIT_S)
    assert store.get("k") == b"2"


def test_close_is_idempotent(store: Store) -> None:
    store.set("k", "1")
    with store_of(store) as twin:
        twin.close()
    assert store.get("k") == b"1"
    assert type(store).__name__ in repr(store)


@pytest.mark.parametrize("arguments", [(HashStore(), "p"), ("p", None), (5, HashStore())])
def test_a_prefix_is_a_text_before_a_store(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="needs a string and a store, not"):
        PrefixStore(*arguments)


def test_the_store_below_all_prefixes() -> None:
    below = HashStore()
    assert PrefixStore("p", PrefixStore("q", below))._underlying_non_prefix_store is below


def test_the_default_timeout_is_torchs() -> None:
    theirs = TorchStoreAdapter(torch.distributed.HashStore())
    assert HashStore().timeout == theirs.timeout == timedelta(seconds=300)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan")])
def test_no_wait_without_a_limit(timeout: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        HashStore(timeout)


class store_of:
    """A clone for another user of the table, closed at the end."""

    def __init__(self, store: Store) -> None:
        self._clone = store.clone()

    def __enter__(self) -> Store:
        return self._clone

    def __exit__(self, *_: object) -> None:
        clone = self._clone
        while isinstance(clone, PrefixStore):
            clone = clone.underlying_store
        clone.close()


class RecordingStore(Store):
    """A store of a user: everything goes through `execute`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.timeout)
        self.store = store
        self.operations: list[StoreOperation[object]] = []

    @property
    def address(self) -> str:
        return self.store.address

    def clone(self) -> RecordingStore:
        return RecordingStore(self.store.clone())

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        self.operations.append(operation)
        return self.store.execute(operation, deadline)


def test_a_store_of_a_user_implements_execute() -> None:
    store = RecordingStore(HashStore())
    store.set("a", "1")
    assert store.multi_get(["a"]) == [b"1"] and store.add("n", 2) == 2
    with pytest.raises(StoreTimeout, match="wait timeout after 10ms, keys: b "):
        store.wait(["a", "b"], 0.01)
    assert store.operations == [Set(("a",), (b"1",)), Get(("a",)), Add("n", 2), Wait(("a", "b"))]


def test_threads_of_the_pool_are_gone() -> None:
    assert all(not thread.name.startswith("ThreadPool") for thread in threading.enumerate())
