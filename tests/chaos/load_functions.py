"""The functions that the workers of the overload and soak tests run."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from rpcdist import rpc
from rpcdist.testing import LIMIT_S

__all__ = ["NoOps", "ResourceUse", "call_many", "flood", "max_held_bytes", "refer_many", "resource_use", "stream_many"]

rpc_async: Any = rpc.rpc_async
rpc_sync: Any = rpc.rpc_sync
rpc_stream: Any = rpc.rpc_stream


# ---------------------------------------------------------------- overload


class _Slow:
    """The slow handler. `most_bytes` is the largest sum of arguments that were here at once."""

    lock = threading.Lock()
    held_bytes = 0
    most_bytes = 0


def work_slowly(payload: torch.Tensor, seconds: float) -> int:
    size_bytes = payload.numel() * payload.element_size()
    with _Slow.lock:
        _Slow.held_bytes += size_bytes
        _Slow.most_bytes = max(_Slow.most_bytes, _Slow.held_bytes)
    time.sleep(seconds)  # this is the work
    with _Slow.lock:
        _Slow.held_bytes -= size_bytes
    return size_bytes


def max_held_bytes() -> int:
    return _Slow.most_bytes


def nothing() -> None:
    """The no-op."""


@dataclass(frozen=True, slots=True)
class NoOps:
    """How long the no-ops beside a flood took.

    Attributes:
        num: how many there were.
        longest_s: the slowest.
        longest_without_lateness_s: the slowest, less the time for which this machine had no processor for the thread.
        flood_s: the flood as a whole.
        grown_bytes: how much more memory the caller had than before, at most.
        kept_bytes: how much more it has after the flood, without what the allocator keeps of freed memory.
    """

    num: int
    longest_s: float
    longest_without_lateness_s: float
    flood_s: float
    grown_bytes: int
    kept_bytes: int


def flood(to: str, num_calls: int, size_bytes: int, work_s: float) -> NoOps:
    """Makes the calls as fast as it may on one thread, and no-ops on another until all have ended."""
    ended, begun = threading.Event(), threading.Event()
    took_s: list[tuple[float, float]] = []
    memory = psutil.Process()
    before_bytes, most_bytes = memory.memory_info().rss, 0

    def call_nothing() -> None:
        nonlocal most_bytes
        begun.wait(LIMIT_S)
        while not ended.is_set():
            began_s, worked_s = time.monotonic(), time.process_time()
            rpc_sync(to, nothing)
            took = time.monotonic() - began_s
            took_s.append((took, min(took, time.process_time() - worked_s)))
            most_bytes = max(most_bytes, memory.memory_info().rss)
            ended.wait(0.01)

    beside = threading.Thread(target=call_nothing)
    beside.start()
    began_s = time.monotonic()
    try:
        futures = []
        for _ in range(num_calls):
            futures.append(rpc_async(to, work_slowly, (torch.zeros(size_bytes // 4), work_s), timeout=0))
            begun.set()
        answers = rpc.wait_all(futures)
    finally:
        ended.set()
        begun.set()
        beside.join()
    if set(answers) != {size_bytes}:
        raise AssertionError(f"answers of {set(answers)} bytes")
    longest, longest_of_work = (max(column) for column in zip(*took_s, strict=True))
    flood_s = time.monotonic() - began_s
    ctypes.CDLL(None).malloc_trim(0)
    kept_bytes = memory.memory_info().rss - before_bytes
    return NoOps(len(took_s), longest, longest_of_work, flood_s, most_bytes - before_bytes, kept_bytes)


# ---------------------------------------------------------------- soak


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The resources that a worker holds at one moment."""

    memory_bytes: int
    num_descriptors: int
    num_threads: int


def resource_use() -> ResourceUse:
    gc.collect()
    return ResourceUse(psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd")), threading.active_count())


def add_one(number: int) -> int:
    return number + 1


def count_up(stop: int) -> Iterator[int]:
    yield from range(stop)


class Number:
    def __init__(self, value: int) -> None:
        self.value = value


def call_many(to: str, num: int, at_once: int = 500) -> float:
    """Calls a second. Every answer is looked at."""
    began_s = time.monotonic()
    for first in range(0, num, at_once):
        numbers = range(first, min(num, first + at_once))
        futures = [rpc_async(to, add_one, (number,)) for number in numbers]
        if [future.wait() for future in futures] != [number + 1 for number in numbers]:
            raise AssertionError(f"wrong answers after {first} calls")
    return num / (time.monotonic() - began_s)


def refer_many(to: str, num: int, at_once: int = 200) -> float:
    """References a second: made, used, and dropped."""
    began_s = time.monotonic()
    for first in range(0, num, at_once):
        numbers = range(first, min(num, first + at_once))
        references = [rpc.remote(to, Number, (number,)) for number in numbers]
        if [reference.to_here().value for reference in references] != list(numbers):
            raise AssertionError(f"wrong values after {first} references")
    return num / (time.monotonic() - began_s)


def stream_many(to: str, num: int) -> float:
    """Streams a second: every second one is read to its end, the others are left in the middle."""
    began_s = time.monotonic()
    for number in range(num):
        with rpc_stream(to, count_up, (20,)) as stream:
            items = [next(stream) for _ in range(3)] if number % 2 else list(stream)
        if items != list(range(3 if number % 2 else 20)):
            raise AssertionError(f"wrong items {items}")
    return num / (time.monotonic() - began_s)
