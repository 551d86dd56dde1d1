"""Classes of actors that are made again, and what their creator does in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
from actor_functions import LIMIT_S, entered, gates

from rpcdist import rpc
from rpcdist.errors import WorkerLost


class Ledger:
    """Adds up what it is told."""

    def __init__(self, start: int = 0) -> None:
        self.total = start
        self.weights = torch.zeros(3)

    def add(self, amount: int, gate: str | None = None) -> int:
        if gate is not None:
            entered[gate].set()
            assert gates[gate].wait(LIMIT_S)
        self.total += amount
        self.weights += amount
        return self.total

    async def add_later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)

    def fail(self) -> None:
        raise KeyError("on purpose")

    def read(self) -> tuple[int, list[float]]:
        return self.total, self.weights.tolist()

    def items(self) -> Iterator[int]:
        yield self.total

    def checkpoint(self) -> dict[str, Any]:
        return {"total": self.total, "weights": self.weights}  # not a copy: what is sent must be one

    def restore(self, state: dict[str, Any]) -> None:
        self.total, self.weights = state["total"], state["weights"]


class Forgetful:
    """Has no state to give."""

    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total


class Unsaved(Forgetful):
    """Its checkpoint fails."""

    def checkpoint(self) -> int:
        raise OSError("the disk is full")

    def restore(self, state: int) -> None:
        raise AssertionError("there is no state")


class Unsendable(Forgetful):
    """Its state has a part that no other process can have."""

    def checkpoint(self) -> dict[str, Any]:
        return {"cfg": [1, {"find": lambda: self.total}]}

    async def add_later(self, amount: int) -> int:
        return self.add(amount)

    def restore(self, state: int) -> None:
        raise AssertionError("there is no state")


broken: set[str] = set()
"""The step that raises an error: "restore", "class"."""


class Fragile(Ledger):
    """Cannot be made again while something is broken on its worker."""

    def __init__(self, start: int = 0) -> None:
        if "class" in broken:
            raise OSError("the port is in use")
        super().__init__(start)

    def restore(self, state: dict[str, Any]) -> None:
        if "restore" in broken:
            raise OSError("no such file")
        super().restore(state)


class OnlyCheckpoint:
    """Is refused: it could not be restored."""

    def checkpoint(self) -> int:
        return 1


class CheckpointLater(OnlyCheckpoint):
    """Is refused: nobody awaits its checkpoint."""

    async def checkpoint(self) -> int:  # type: ignore[override]
        return 1

    def restore(self, state: int) -> None:
        raise AssertionError("it is refused before")


_ledgers: list[rpc.RestartingActor[Ledger]] = []


def begin_ledger(worker: str, amount: int) -> int:
    """In the creator's process: makes an actor, and calls it once."""
    _ledgers[:] = [rpc.remote(worker, Ledger, serial=True, max_restarts=1)]
    return _ledgers[0].call(Ledger.add, amount)


def go_on(num_calls: int) -> tuple[list[int], int]:
    """In the creator's process: adds ones, and says how often the actor was made again.

    A call that is lost with the worker is made again: the state does not have it.
    """
    [ledger] = _ledgers
    sums: list[int] = []
    while len(sums) < num_calls:
        try:
            sums.append(ledger.call(Ledger.add, 1))
        except WorkerLost:
            continue
    return sums, ledger.num_restarts
