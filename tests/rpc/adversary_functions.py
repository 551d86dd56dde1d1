"""The functions that the hostile workers of `test_adversary_rpc` run. All processes import this module by the same
name.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from inside_agents import Agent
from rpc_victim_bad_input import Touching
from rpc_victim_functions import add
from torch import Tensor

from rpcdist import autograd, rpc
from rpcdist.errors import RpcdistError

CALL_LIMIT_S = 20.0


class StrExits(Exception):
    def __str__(self) -> str:
        sys.exit(4)


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} for you")


class ConstructorExits(Exception):
    def __init__(self, *args: object) -> None:
        if len(args) < 2:
            sys.exit(9)
        super().__init__("two")


class ExitsWhenUnpickled:
    def __reduce__(self) -> Any:
        return sys.exit, (5,)


def raise_hostile(kind: str) -> None:
    match kind:
        case "half a surrogate pair":  # as in the names of files that are not UTF-8
            raise FileNotFoundError("report-\udce9.txt")
        case "str exits":
            raise StrExits
        case "no attributes":
            raise NoAttributes
        case "constructor exits":
            raise ConstructorExits(1, 2)
    raise AssertionError(kind)


def call_hostile(to: str, kind: str) -> tuple[str, str]:
    """The type and the worker of what a call raises; the exception itself may not be looked at."""
    try:
        rpc.rpc_sync(to, raise_hostile, (kind,), timeout=CALL_LIMIT_S)
    except BaseException as exc:
        return type(exc).__name__, str(type(exc.__cause__).__name__) if kind != "no attributes" else ""
    return "nothing", ""


def make_exit() -> ExitsWhenUnpickled:
    return ExitsWhenUnpickled()


class _HostileBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.kind == "sys.exit":
            sys.exit(3)
        raise_hostile(ctx.kind)
        return gradient, None


def forward(x: Tensor, kind: str) -> Tensor:
    loss: Tensor = _HostileBackward.apply(x, kind).sum()  # type: ignore[no-untyped-call]
    return loss


def backward_through(to: str, kind: str) -> tuple[str, float]:
    """The text of the error of a backward pass, and how long it took."""
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, forward, (torch.ones(2, requires_grad=True), kind))
        began = time.monotonic()
        try:
            autograd.backward(context, [loss], timeout=CALL_LIMIT_S)
        except autograd.BackwardError as exc:
            return str(exc), time.monotonic() - began
    raise AssertionError("nothing was raised")


def stream_touching(path: str) -> Iterator[int]:
    yield 1
    raise Touching(path)


def read_two(to: str, path: str) -> list[str]:
    """The items of a stream, and its end."""
    stream: Any = rpc.rpc_stream(to, stream_touching, (path,))
    found = [str(next(stream))]
    try:
        next(stream)
    except Exception as exc:
        found.append(type(exc).__name__)
    return found


def shut_down_on_a_loop() -> str:
    """The error of `shutdown` on a loop; afterwards everything works as before."""

    async def main() -> str:
        try:
            rpc.shutdown(graceful=False)
        except RpcdistError as exc:
            return str(exc)
        return "nothing"

    said = asyncio.run(main())
    assert rpc.rpc_sync(rpc.get_worker_info().name, add, (1, 2)) == 3
    return said


def live_on_a_loop(url: str) -> list[str]:
    """Joins, calls and leaves within one `asyncio.run`: what `init_rpc` says on the loop, and what works instead."""
    options = rpc.RpcOptions(init_method=url)

    async def main() -> list[str]:
        found = []
        try:
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        except RpcdistError as exc:
            found.append(str(exc))
        await asyncio.to_thread(rpc.init_rpc, "alone", rank=0, world_size=1, rpc_backend_options=options)
        found.append(str(await rpc.rpc_async("alone", add, (1, 2))))
        await asyncio.to_thread(rpc.shutdown)
        return found

    return asyncio.run(main())


def shut_down_from_many_threads() -> float:
    """Seconds that it takes; a failure of a thread is raised."""
    ready = threading.Barrier(6)
    others: list[BaseException] = []

    def end() -> None:
        ready.wait(CALL_LIMIT_S)
        try:
            rpc.shutdown(graceful=False)
        except RuntimeError as exc:
            if "has not been initialized" not in str(exc):
                others.append(exc)

    threads = [threading.Thread(target=end) for _ in range(6)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CALL_LIMIT_S)
    assert not others, others
    return time.monotonic() - began


def fail_streams_and_leave(to: str) -> int:
    """The number of agents that are still in memory after streams failed because of a shutdown."""
    stream: Any = rpc.rpc_stream(to, stream_touching, ("",))
    next(stream)
    left: Any = rpc.rpc_stream(to, wait_in_stream)
    next(left)
    rpc.shutdown(graceful=False)
    try:
        next(left)
    except RpcdistError:
        pass
    del stream, left
    gc.collect()
    return sum(type(found) is Agent for found in gc.get_objects())


async def wait_in_stream() -> AsyncIterator[int]:
    yield 1
    await asyncio.sleep(CALL_LIMIT_S)
