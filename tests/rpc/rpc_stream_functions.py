"""Streams that tests consume from workers, and handlers that consume them; as `rpc_functions`, whose board they use."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import torch
from rpc_functions import board, rpc_async

import rpcdist.rpc as rpc
from rpcdist.deadline import current_deadline


def count_up(num: int, key: str = "") -> Iterator[int]:
    """Puts every item that is drawn, and the end, on the board."""
    try:
        for index in range(num):
            if key:
                board.put(f"{key} drawn", index)
            yield index
    finally:
        if key:
            board.put(f"{key} closed", sys.exc_info()[0] is GeneratorExit)


async def count_up_async(num: int, key: str = "") -> AsyncIterator[int]:
    try:
        for index in range(num):
            if key:
                board.put(f"{key} drawn", index)
            await asyncio.sleep(0)
            yield index
    finally:
        if key:
            board.put(f"{key} closed", True)


def break_after(num: int) -> Iterator[int]:
    yield from range(num)
    raise ValueError("broken", num)


async def break_after_async(num: int) -> AsyncIterator[int]:
    for index in range(num):
        yield index
    raise ValueError("broken", num)


def unpicklable_after(num: int, key: str) -> Iterator[object]:
    try:
        yield from range(num)
        yield threading.Lock()
    finally:
        board.put(f"{key} closed")


def stubborn(key: str) -> Iterator[object]:
    """Raises when it is closed."""
    try:
        yield 0
        yield threading.Lock()
    finally:
        board.put(f"{key} closed")
        raise KeyError("at the end")


def tensors_up(num: int, size: int) -> Iterator[torch.Tensor]:
    for index in range(num):
        yield torch.full((size,), float(index))


async def gated_stream(key: str) -> AsyncIterator[int]:
    try:
        yield 0
        board.put(f"{key} waiting")
        await board.wait_async(key)
        yield 1
    except BaseException as exc:
        board.put(f"{key} ended", type(exc).__name__)
        raise


def gated_sync_stream(key: str) -> Iterator[int]:
    yield 0
    board.wait(key)
    yield 1


def without_grad(num: int) -> Iterator[bool]:
    with torch.no_grad():
        for _ in range(num):
            yield torch.is_grad_enabled()


def grad_enabled() -> bool:
    return torch.is_grad_enabled()


async def make_stream_later(key: str, num: int) -> AsyncIterator[int]:
    """A coroutine whose result is a stream."""
    await board.wait_async(key)
    return count_up_async(num, key)


def make_stream_when_open(key: str, num: int) -> Iterator[int]:
    """Returns a generator, late: when the gate is open or the deadline of the call is over."""
    board.put(f"{key} entered")
    deadline = current_deadline.get()
    if deadline.remaining_s() > 1:
        board.wait(key)
    while 0 < deadline.remaining_s() <= 1:
        threading.Event().wait(deadline.remaining_s())  # it is about a handler that outlasts its deadline
    return count_up(num, key)


def sum_stream_of(worker: str, num: int) -> int:
    """Consumes a stream inside a handler."""
    return sum(rpc.rpc_stream(worker, count_up, (num,)))


async def sum_stream_of_async(worker: str, num: int) -> int:
    total = 0
    async for item in await rpc_async(worker, count_up_async, (num,)):
        total += item
    return total
