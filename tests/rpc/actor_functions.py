"""Classes that live on other workers in the tests of actors, and what lets a test hold one of their calls."""

from __future__ import annotations

import asyncio
import ctypes
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from inside_agents import current_agent

from rpcdist import rpc
from rpcdist.rpc import Future, RRef

LIMIT_S = 30.0
HOLD_US = 300_000

gates: dict[str, threading.Event] = {}
entered: dict[str, threading.Event] = {}


def new_gate(name: str) -> threading.Event:
    entered[name] = threading.Event()
    gates[name] = threading.Event()
    return gates[name]


class Journal:
    """Notes its calls, and whether two ever ran at once."""

    def __init__(self, gate: str | None = None) -> None:
        self.notes: list[Any] = []
        self.num_overlaps = 0
        self.is_busy = False
        if gate is not None:
            self.hold(gate)

    def _begin(self) -> None:
        if self.is_busy:
            self.num_overlaps += 1
        self.is_busy = True

    def note(self, item: Any, *padding: Any) -> int:
        self._begin()
        self.notes.append(item)
        self.is_busy = False
        return len(self.notes)

    async def note_later(self, item: Any) -> int:
        self._begin()
        await asyncio.sleep(0)
        self.notes.append(item)
        await asyncio.sleep(0)
        self.is_busy = False
        return len(self.notes)

    def hold(self, gate: str) -> str:
        entered[gate].set()
        assert gates[gate].wait(LIMIT_S)
        return gate

    async def hold_later(self, gate: str) -> None:
        entered[gate].set()
        try:
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            self.notes.append(f"end of {gate}")

    def fail(self) -> None:
        raise KeyError("fail")

    @rpc.functions.async_execution
    def note_elsewhere(self, other: str, item: Any) -> Future[int]:
        self.notes.append(item)
        return rpc.rpc_async(other, len, ([1, 2, 3],))

    def items(self) -> Iterator[Any]:
        yield from self.notes

    def ask_itself(self, me: RRef[Journal]) -> int:
        return me.call(Journal.note, "never")

    def ask_itself_later(self, me: RRef[Journal]) -> None:
        me.rpc_async().note("later")


def note_through(journal: RRef[Journal], first: int, last: int) -> None:
    """Notes of a worker to which the reference was given."""
    rpc.wait_all([journal.rpc_async().note((rpc.get_worker_info().name, i)) for i in range(first, last)])


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class UnpicklableThere:
    """Is refused where it arrives."""

    def __reduce__(self) -> Any:
        return (refuse, ())


def refuse() -> None:
    raise ValueError("not here")


class Counter:
    """Adds with a pause in the middle, in which another call may come if nothing keeps it out."""

    def __init__(self, holder: str | None = None) -> None:
        self.n = self.inside = self.most = 0
        self.friends: list[Any] = []
        if holder is not None:  # of a reference that is made before the object is finished
            rpc.rpc_sync(holder, keep, (RRef(self),))

    def add(self) -> Counter:
        self.inside += 1
        self.most = max(self.most, self.inside)
        n = self.n
        time.sleep(0.0005)
        self.n = n + 1
        self.inside -= 1
        return self

    def add_one(self) -> int:
        return self.add().n

    async def add_later(self) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.0005)
        self.n += 1
        self.inside -= 1
        return self.n

    def itself(self) -> Counter:
        return self

    def reference(self) -> RRef[Counter]:
        return RRef(self)

    def method(self) -> Callable[[], int]:
        return self.add_one

    def in_a_list(self) -> list[Counter]:
        return [self]

    def note(self, friend: Any) -> int:
        self.friends.append(friend)
        return len(self.friends)

    def wait_for_itself(self, me: RRef[Counter]) -> None:
        me.rpc_sync().add_one()

    def outcome(self) -> tuple[int, int]:
        return self.n, self.most


kept: list[Any] = []


def keep(rref: RRef[Any]) -> None:
    kept.append(rref)


def take_kept() -> Any:
    return kept.pop()


def the_object_of(rref: RRef[Any]) -> Any:
    """At its owner: a function that has nothing to do with the actor, and returns its object."""
    return rref.local_value()


def add_through(counter: RRef[Counter], times: int) -> None:
    rpc.wait_all([counter.rpc_async().add_one() for _ in range(times)])


def note_in_order(counter: RRef[Counter], times: int) -> None:
    rpc.wait_all([counter.rpc_async().note(i) for i in range(times)])


ended: list[bool] = []
"""For each `Bound` that has ended: whether that was on the thread where it was made and used."""


class Database:
    """One that is closed when this is freed, which raises on another thread.

    The connection itself is part of a cycle, so the garbage collector frees it, on any thread. Since Python 3.13 one
    that is open then is a warning.
    """

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:")
        self.execute = self._connection.execute

    def __del__(self) -> None:
        self._connection.close()


class Bound:
    """Objects that belong to a thread."""

    def __init__(self) -> None:
        self.db = Database()
        self.db.execute("create table log(x)")
        self.lock = threading.RLock()
        self.local = threading.local()
        self.local.value = 0
        self.threads = {threading.get_ident()}
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(self.threads == {threading.get_ident()})

    def add(self, x: int) -> int:
        self.threads.add(threading.get_ident())
        self.db.execute("insert into log values(?)", (x,))
        self.local.value += 1
        count: int = self.db.execute("select count(*) from log").fetchone()[0]
        assert count == self.local.value
        return count

    def take(self) -> None:
        self.lock.acquire()

    def release(self) -> int:
        self.lock.release()
        return len(self.threads)

    async def later(self) -> str:
        return threading.current_thread().name

    def ask(self, other: RRef[Bound]) -> int:
        return int(other.rpc_sync().add(0))

    def name(self) -> str:
        return threading.current_thread().name


def rows(n: int) -> Iterator[int]:
    db = Database()
    lock, threads = threading.RLock(), set()
    try:
        for i in range(n):
            threads.add(threading.get_ident())
            lock.acquire()
            yield int(db.execute("select ?", (i,)).fetchone()[0])
            lock.release()
    finally:
        ends.append((len(threads), threading.get_ident() in threads))


def rows_of_an_open_database(n: int) -> Iterator[int]:
    db = Database()
    return (int(db.execute("select ?", (i,)).fetchone()[0]) for i in range(n))


ends: list[tuple[int, bool]] = []


def block(gate: str) -> None:
    assert gates[gate].wait(LIMIT_S)


def the_name_of(actor: RRef[Bound]) -> str:
    return str(actor.rpc_sync().name())


def num_reserved() -> int:
    return current_agent().pool.num_reserved


class Holder:
    """Its calls are quick, or hold the interpreter's lock for a while, as a computation in C may."""

    def quick(self) -> None:
        pass

    def hold(self) -> float:
        """Returns when it ended, by the clock that all processes of this host share."""
        ctypes.PyDLL(None).usleep(HOLD_US)  # unlike `CDLL`, it keeps the lock
        return time.monotonic()


def answers_before_the_next_turn(to: str) -> tuple[float, float]:
    """When a quick call was answered, and when the one behind it had ended."""
    holder = rpc.remote(to, Holder, serial=True)
    holder.rpc_sync().quick()
    quick, slow = holder.rpc_async().quick(), holder.rpc_async().hold()
    quick.wait()
    return time.monotonic(), slow.wait()
