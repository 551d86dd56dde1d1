"""Functions that hang in a known way until `release` is called in their process. Workers import them by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from inside_agents import current_agent

from rpcdist import autograd, checkpoint, collectives, rpc
from rpcdist.errors import CheckpointError
from rpcdist.rpc._inspection import flight_log
from rpcdist.testing.limits import LIMIT_S, UNIT_S

RING_LIMIT_S = 30 * UNIT_S

table_lock = threading.Lock()
ring_lock = threading.RLock()
released = threading.Event()
kept: list[Any] = []


def release() -> None:
    """Lets everything go on that hangs in this process."""
    released.set()


def refuse_threads(flag: bool) -> None:
    """Whether the flight recorder of this process is refused threads of its own, as where a limit is reached."""
    flight_log.threading = SimpleNamespace(Thread=_no_thread) if flag else threading  # type: ignore[assignment, attr-defined]


def _no_thread(*_: Any, **__: Any) -> threading.Thread:
    raise RuntimeError("can't start new thread")


def renew() -> None:
    """The next function hangs again."""
    released.clear()
    kept.clear()


def address() -> str:
    return str(current_agent().network.address)


def wait_released() -> None:
    assert released.wait(LIMIT_S)


# ---------------------------------------------------------------- calls and locks


def call_along(workers: list[str], last: str, *args: str) -> None:
    """Calls the function `last` on the last of the workers, through all the others."""
    first, *others = workers
    if others:
        rpc.rpc_sync(first, call_along, (others, last, *args), timeout=0)
    else:
        rpc.rpc_sync(first, globals()[last], args, timeout=0)


def hold_table() -> None:
    with table_lock:
        wait_released()


def lock_table() -> None:
    with table_lock:
        pass


def begin_ring() -> None:
    """On w0: holds a lock, and calls w1, which calls w0 for the same lock. The deadline of w1's call ends it."""
    with ring_lock:
        rpc.rpc_sync("w1", call_back, timeout=0)


def call_back() -> None:
    rpc.rpc_sync("w0", take_ring, timeout=RING_LIMIT_S)


def take_ring() -> None:
    with ring_lock:
        pass


def call_in_callback(first: str, second: str) -> None:
    """A callback that waits for a call, once the first worker is released."""
    future = rpc.rpc_async(first, wait_released, timeout=0).then(
        lambda _: rpc.rpc_sync(second, wait_released, timeout=0)
    )
    kept.append(future)


def begin(to: str, function: str, count: int = 1) -> None:
    """Makes calls and does not wait."""
    kept.extend(rpc.rpc_async(to, globals()[function], timeout=0) for _ in range(count))


def finish() -> None:
    """Waits for what `begin` has begun."""
    while kept:
        kept.pop().wait()


def sleep_long() -> None:
    while not released.is_set():
        time.sleep(0.2)


# ---------------------------------------------------------------- the interpreter's lock


def spin() -> int:
    count = 0
    while not released.is_set():
        count += 1
    return count


def hold_interpreter(fifo: str) -> None:
    """Keeps the interpreter's lock in C until somebody writes to a FIFO, or for 48 s.

    The signal by which others look at this process ends one wait.
    """
    reader = os.open(fifo, os.O_RDWR)
    polled = ctypes.create_string_buffer(struct.pack("ihh", reader, select.POLLIN, 0))
    for _ in range(4):
        if ctypes.PyDLL(None).poll(polled, 1, 12_000) == 1:
            break
    os.close(reader)


# ---------------------------------------------------------------- coroutines


async def await_nothing() -> None:
    """Awaits a future that nobody completes."""
    future = asyncio.get_running_loop().create_future()
    kept.append(future)
    await future


async def lock_table_in_loop() -> None:
    with table_lock:
        pass


async def answer() -> int:
    return 1


def cancel_kept() -> None:
    """Completes the future of `await_nothing`."""
    future = kept.pop()
    future.get_loop().call_soon_threadsafe(future.set_result, None)


# ---------------------------------------------------------------- collectives


def join_group(rank: int, size: int, path: str) -> None:
    collectives.init_process_group("tcp", f"file://{path}", timedelta(seconds=LIMIT_S), size, rank)


def reduce_once() -> float:
    tensor = torch.ones(2)
    collectives.all_reduce(tensor)
    return float(tensor[0])


def leave_group() -> None:
    collectives.destroy_process_group()


def enter_barrier(names: list[str]) -> None:
    rpc.api._barrier(names)


# ---------------------------------------------------------------- streams, actors, references, backward passes


def count_up() -> Iterator[int]:
    yield from range(10**9)


def read_one(worker: str) -> None:
    stream = rpc.rpc_stream(worker, count_up)
    next(iter(stream))
    kept.append(stream)


def close_kept() -> None:
    kept.pop().close()


class StuckActor:
    def hang(self) -> None:
        wait_released()

    def quick(self) -> int:
        return 1


def call_actor(worker: str) -> None:
    actor = rpc.remote(worker, StuckActor, serial=True)
    first = actor.rpc_async(timeout=0).hang()
    second = actor.rpc_async(timeout=0).quick()
    first.wait()
    second.wait()


def slow_value() -> int:
    wait_released()
    return 3


def fetch_slow_value(worker: str) -> int:
    value: int = rpc.remote(worker, slow_value, timeout=0).to_here(timeout=0)
    return value


def with_slow_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(slow_hook)
    return y


def slow_hook(gradient: torch.Tensor) -> None:
    wait_released()


def backward_with_slow_hook(worker: str) -> None:
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        loss = rpc.rpc_sync(worker, with_slow_hook, (x,)).sum()
        autograd.backward(context, [loss])


def shut_down() -> None:
    rpc.shutdown()


def take_from_empty_queue() -> None:
    """Waits at a queue into which nobody puts anything."""
    tasks: queue.Queue[int] = queue.Queue()
    kept.append(tasks)
    tasks.get()


def put_into_queue() -> None:
    kept.pop().put(1)


def receive_from(rank: int) -> None:
    collectives.recv(torch.zeros(2), rank)


def send_to(rank: int) -> None:
    collectives.send(torch.ones(2), rank)


# ---------------------------------------------------------------- failures


def save_to_full_disk(folder: str) -> None:
    """Saves a checkpoint to a disk that has no room for it; the program fails with that."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    try:
        try:
            checkpoint.save(Path(folder) / "saved", {"weights": torch.zeros(1 << 20)})
        except CheckpointError:
            rpc.shutdown(graceful=False)
            raise
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def use_memory() -> None:
    """Uses more memory than its cgroup has."""
    kept.extend(bytearray(os.urandom(1 << 20)) for _ in range(1 << 10))


def num_served() -> int:
    """The calls of others that this worker handles now."""
    return len(current_agent().dispatcher.calls)
