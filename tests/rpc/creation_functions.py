"""The functions that `remote()` runs in `test_rref_writes`: their results travel in every possible way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rpcdist import rpc


@dataclass
class Point:
    """Travels as a pickle."""

    x: int
    y: int


def none() -> None:
    pass


def plain() -> dict[str, list[object]]:
    return {"a": [1, 2.5, "b"]}


def tensor() -> torch.Tensor:
    return torch.arange(4)


def large_tensor() -> torch.Tensor:
    """1 MiB: in shared memory, or in chunks."""
    return torch.ones(1 << 18)


async def of_a_coroutine() -> int:
    return 3


def pickled() -> Point:
    return Point(1, 2)


def with_a_reference() -> rpc.RRef[int]:
    return rpc.RRef(5)


def stream() -> Iterator[int]:
    yield from range(3)


def failing() -> None:
    raise ValueError("there is no value")


def not_sendable() -> threading.Event:
    return threading.Event()
