"""Classes that live on other workers in the tests of actors, and what lets a test hold one of their calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from rpcdist import rpc
from rpcdist.rpc import Future, RRef

LIMIT_S = 30.0

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
