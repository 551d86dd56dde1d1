"""Functions that tests call on workers; driver and workers import this module by the same name.

The board is how a test and a handler meet: one puts values under a key, the other waits for them. There is one board a
process; `rpc_sync(worker, board_wait, (key,))` looks at the worker's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from inside_agents import current_agent

import rpcdist.rpc as rpc
from rpcdist.deadline import current_deadline

rpc_sync: Any = rpc.rpc_sync  # a call of a coroutine function returns what it returns, not a coroutine
rpc_async: Any = rpc.rpc_async

LIMIT_S = 30.0


class Board:
    """Values by key, and waiting for them on threads and on loops."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._values: defaultdict[str, list[Any]] = defaultdict(list)
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def put(self, key: str, value: object = None) -> None:
        with self._condition:
            self._values[key].append(value)
            self._condition.notify_all()
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    def wait(self, key: str, count: int = 1, limit_s: float = LIMIT_S) -> list[Any]:
        """The values under `key`, as soon as there are `count` of them."""
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._values[key]) >= count, limit_s):
                raise AssertionError(f"{len(self._values[key])} of {count} values under {key!r} after {limit_s} s")
            return list(self._values[key])

    async def wait_async(self, key: str, count: int = 1, limit_s: float = LIMIT_S) -> list[Any]:
        async with asyncio.timeout(limit_s):
            while True:
                event = asyncio.Event()
                with self._condition:
                    if len(self._values[key]) >= count:
                        return list(self._values[key])
                    self._waiters.append((asyncio.get_running_loop(), event))
                await event.wait()

    def look(self, key: str) -> list[Any]:
        with self._condition:
            return list(self._values[key])


board = Board()


def board_put(key: str, value: object = None) -> None:
    board.put(key, value)


def board_wait(key: str, count: int = 1) -> list[Any]:
    return board.wait(key, count)


def board_look(key: str) -> list[Any]:
    return board.look(key)


async def wait_at_gate(key: str) -> str:
    """Waits for `key`; says under `key + " ended"` how the waiting ended."""
    try:
        board.put(f"{key} entered", threading.current_thread().name)
        await board.wait_async(key)
    except BaseException as exc:
        board.put(f"{key} ended", type(exc).__name__)
        raise
    board.put(f"{key} ended", "opened")
    return key


def echo_after_gate(key: str, value: Any) -> Any:
    board.wait(key)
    return value


def block_at_gate(key: str) -> str:
    board.put(f"{key} entered", threading.current_thread().name)
    board.wait(key)
    return key


# ---------------------------------------------------------------- plain calls


def add(a: Any, b: Any) -> Any:
    return a + b


def echo(value: Any) -> Any:
    return value


def call(function: Callable[[], Any]) -> Any:
    return function()


def nothing() -> None:
    return None


def whoami() -> str:
    return rpc.get_worker_info().name


def pack(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    return args, kwargs


async def add_async(a: Any, b: Any) -> Any:
    await asyncio.sleep(0)
    return a + b


class Counter:
    """Methods of every kind."""

    made = 0

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]

    def increased(self, by: int = 1) -> int:
        self.value += by
        return self.value

    async def increased_async(self, by: int) -> int:
        await asyncio.sleep(0)
        return self.value + by

    def __call__(self, by: int) -> int:
        return self.value * by

    @classmethod
    def named(cls, suffix: str) -> str:
        return cls.__name__ + suffix

    @staticmethod
    def doubled(value: int) -> int:
        return 2 * value


class Tally(Counter):
    """Inherits the class method."""


# ---------------------------------------------------------------- deadlines


def deadline_left_s() -> float:
    return current_deadline.get().remaining_s()


async def deadline_left_s_async() -> float:
    return current_deadline.get().remaining_s()


def deadline_left_s_at(worker: str) -> float:
    """The remaining time of a nested call, made without a timeout of its own."""
    return float(rpc_sync(worker, deadline_left_s, timeout=0))


async def deadline_left_s_at_async(worker: str) -> float:
    return float(await rpc_async(worker, deadline_left_s_async, timeout=0))


async def wait_at_gate_of(worker: str, key: str) -> str:
    """Its cancellation must reach the worker that it waits for."""
    return str(await rpc_async(worker, wait_at_gate, (key,)))


# ---------------------------------------------------------------- failures


class OddError(Exception):
    """Its constructor does not take its args, so pickle cannot rebuild it."""

    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


class CarefulError(Exception):
    """An odd constructor and a way to pickle it all the same."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _careful_error, (self.code,)


def _careful_error(code: int) -> CarefulError:
    return CarefulError(code=code)


class LockedError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class HomeboundError(Exception):
    """Can be rebuilt in the process that raised it, and nowhere else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _homebound_error, (os.getpid(),)


def _homebound_error(pid: int) -> HomeboundError:
    if pid != os.getpid():
        raise ImportError("this class exists at home only")
    return HomeboundError("from home")


class Homebound:
    """As a value."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _homebound, (os.getpid(),)


def _homebound(pid: int) -> Homebound:
    if pid != os.getpid():
        raise ImportError("this value exists at home only")
    return Homebound()


def make_homebound() -> Homebound:
    return Homebound()


RAISERS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("bad", 3),
    "key": lambda: KeyError("missing"),
    "stop": lambda: StopIteration(5),
    "os": lambda: FileNotFoundError(2, "No such file", "/nowhere"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "group": lambda: ExceptionGroup("both", [ValueError(1), TypeError(2)]),
    "odd": lambda: OddError(7, text="odd"),
    "careful": lambda: CarefulError(code=9),
    "locked": LockedError,
    "homebound": lambda: HomeboundError("from home"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
}


def fail(kind: str) -> None:
    raise RAISERS[kind]()


async def fail_async(kind: str) -> None:
    await asyncio.sleep(0)
    raise RAISERS[kind]()


def fail_with_cause() -> None:
    try:
        fail("key")
    except KeyError as exc:
        raise ValueError("outer") from exc


def fail_at(worker: str, kind: str) -> None:
    rpc_sync(worker, fail, (kind,))


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def leave() -> None:
    sys.exit("a handler may not end its worker")


def make_lock() -> Any:
    return threading.Lock()


def vanishing() -> str:
    return "here"


def remove_vanishing() -> None:
    globals().pop("vanishing", None)


# ---------------------------------------------------------------- nested


def bounce(depth: int, here: str, there: str) -> int:
    """Calls back and forth, each level waiting for the next."""
    if depth == 0:
        return 0
    return 1 + int(rpc_sync(there, bounce, (depth - 1, there, here)))


async def bounce_async(depth: int, here: str, there: str) -> int:
    if depth == 0:
        return 0
    return 1 + int(await rpc_async(there, bounce_async, (depth - 1, there, here)))


def bounce_in_cpp(depth: int, here: str, there: str) -> int:
    """As `bounce`, waiting where the pool cannot see it."""
    if depth == 0:
        return 0
    futures: Any = [rpc_async(there, bounce_in_cpp, (depth - 1, there, here))]
    return 1 + int(torch.futures.wait_all(futures)[0])


def sync_call_of_async(worker: str) -> int:
    return int(rpc_sync(worker, add_async, (1, 2)))


async def blocking_in_async(worker: str) -> None:
    rpc_sync(worker, nothing)


@rpc.functions.async_execution
def chained_add(to: str, a: Any, b: Any, c: Any) -> Any:
    return rpc_async(to, add, (a, b)).then(lambda future: future.wait() + c)


@rpc.functions.async_execution
def chained_twice(to: str, then_to: str, a: Any, b: Any) -> Any:
    return rpc_async(to, chained_add, (then_to, a, b, 100))


@rpc.functions.async_execution
def completed_by_thread(key: str) -> Any:
    """A plain torch future that another thread completes when the gate opens."""
    future: torch.futures.Future[str] = torch.futures.Future()

    def complete() -> None:
        board.wait(key)
        future.set_result(key)

    threading.Thread(target=complete, name="test reply_sink", daemon=True).start()
    return future


@rpc.functions.async_execution
def chained_failure() -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("from the future"))
    return future


@rpc.functions.async_execution
def not_a_future() -> Any:
    return 5


class Chained:
    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, a: int, b: int) -> Any:
        return rpc_async(to, add, (a, b))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: str, a: int, b: int) -> Any:
        return rpc_async(to, add, (a, b))

    @rpc.functions.async_execution
    def bound(self, to: str, a: int, b: int) -> Any:
        return rpc_async(to, add, (a, b))


# ---------------------------------------------------------------- values


@dataclasses.dataclass
class Box:
    """An object that is pickled, with tensors inside."""

    data: torch.Tensor
    more: dict[str, list[torch.Tensor]]


def describe(tensor: torch.Tensor) -> tuple[list[int], list[int], str, bool, int]:
    return (
        list(tensor.shape),
        list(tensor.stride()),
        str(tensor.dtype),
        tensor.requires_grad,
        tensor.untyped_storage().nbytes(),
    )


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def add_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`b` is expected to see it."""
    a.add_(1)
    return b


def two_views() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.arange(100_000.0)
    return base[:50_000], base[25_000:]


def checksum(data: Any) -> tuple[str, int, int]:
    return type(data).__name__, len(data), zlib.crc32(data)


def stats(tensor: torch.Tensor) -> tuple[int, float, float]:
    return tensor.numel(), float(tensor[0]), float(tensor[-1])


# ---------------------------------------------------------------- the worker itself


def num_threads() -> int:
    return threading.active_count()


def outstanding() -> list[str]:
    """The calls that this worker still serves or waits for, this very call aside."""
    agent = current_agent()
    calls = [*agent.dispatcher.calls.describe(), *map(repr, agent.caller.calls)]
    streams = [f"{len(agent.streams)} streams"] if len(agent.streams) else []
    return [text for text in calls if "rpc_functions:outstanding" not in text] + streams
