"""The cases of benchmarks/collectives.py, and the measuring code that runs on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CASES", "SIZES", "Case", "measure", "name_of_size"]

SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
Runner = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation. `make(module, group, size in bytes, rank, world)` returns what one iteration calls."""

    name: str
    make: Callable[[Any, Any, int, int, int], Runner]
    sizes: tuple[int, ...] = SIZES


def _elements(size: int, world: int) -> int:
    return max(1, size // 4 // world)


def _all_reduce(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    tensor = torch.zeros(size // 4)
    return lambda: module.all_reduce(tensor, group=group)


def _broadcast(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    tensor = torch.zeros(size // 4)
    return lambda: module.broadcast(tensor, 0, group=group)


def _all_gather(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    count = _elements(size, world)
    source, target = torch.zeros(count), torch.zeros(count * world)
    return lambda: module.all_gather_into_tensor(target, source, group=group)


def _reduce_scatter(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    count = _elements(size, world)
    source, target = torch.zeros(count * world), torch.zeros(count)
    return lambda: module.reduce_scatter_tensor(target, source, group=group)


def _all_to_all(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    count = _elements(size, world)
    source, target = torch.zeros(count * world), torch.zeros(count * world)
    return lambda: module.all_to_all_single(target, source, group=group)


def _barrier(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    return lambda: module.barrier(group=group)


def _ping_pong(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    """Between the first two ranks; the time is that of the whole round trip."""
    tensor = torch.zeros(size // 4)

    def ping() -> None:
        module.send(tensor, 1, group=group)
        module.recv(tensor, 1, group=group)

    def pong() -> None:
        module.recv(tensor, 0, group=group)
        module.send(tensor, 0, group=group)

    return {0: ping, 1: pong}.get(rank, lambda: None)


def _exchange(module: Any, group: Any, size: int, rank: int, world: int) -> Runner:
    """Every rank with its neighbour: both send and receive at once."""
    sent, received = torch.zeros(size // 4), torch.zeros(size // 4)
    peer = rank ^ 1

    def exchange() -> None:
        works = [module.isend(sent, peer, group=group), module.irecv(received, peer, group=group)]
        for work in works:
            work.wait()

    return exchange if peer < world else lambda: None


CASES = (
    Case("all_reduce", _all_reduce),
    Case("broadcast", _broadcast),
    Case("all_gather", _all_gather),
    Case("reduce_scatter", _reduce_scatter),
    Case("all_to_all", _all_to_all),
    Case("barrier", _barrier, sizes=(0,)),
    Case("ping-pong", _ping_pong),
    Case("exchange", _exchange),
)


def measure(runner: Runner, meet: Runner, iterations: int) -> float:
    """The median time of an iteration on this rank, in seconds; all ranks begin together."""
    meet()
    samples = []
    for _ in range(iterations):
        began = time.perf_counter()
        runner()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def name_of_size(size: int) -> str:
    """E.g. "64 KiB"; empty for 0."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return ""
