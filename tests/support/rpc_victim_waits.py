"""Every way to wait for calls, with a deadline, for tests in which the worker that is called stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rpc_victim_functions import pid

from rpcdist import rpc
from rpcdist.errors import RpcdistError

__all__ = ["WAYS", "wait_with_deadline"]


def _calls(to: str, limit_s: float) -> list[Any]:
    return [rpc.rpc_async(to, pid, timeout=limit_s) for _ in range(3)]


def _await(to: str, limit_s: float) -> object:
    async def waiting() -> object:
        return await rpc.rpc_async(to, pid, timeout=limit_s)

    return asyncio.run(waiting())


def _await_stream(to: str, limit_s: float) -> object:
    async def reading() -> object:
        return [item async for item in rpc.rpc_stream(to, range, (3,), timeout=limit_s)]

    return asyncio.run(reading())


WAYS: dict[str, Callable[[str, float], object]] = {
    "rpc_sync": lambda to, limit_s: rpc.rpc_sync(to, pid, timeout=limit_s),
    "wait_all": lambda to, limit_s: rpc.wait_all(_calls(to, limit_s)),
    "wait_any": lambda to, limit_s: rpc.wait_any(_calls(to, limit_s)).done[0].wait(),
    "as_completed": lambda to, limit_s: [future.wait() for future in rpc.as_completed(_calls(to, limit_s))],
    "await": _await,
    "stream": lambda to, limit_s: list(rpc.rpc_stream(to, range, (3,), timeout=limit_s)),
    "stream on a loop": _await_stream,
}


def wait_with_deadline(how: str, to: str, limit_s: float) -> tuple[str, str, float]:
    """The error's name and text, and how long after the deadline it came, in seconds."""
    began_s = time.monotonic()
    try:
        result = WAYS[how](to, limit_s)
    except RpcdistError as exc:
        return type(exc).__name__, str(exc), time.monotonic() - began_s - limit_s
    return "no error", repr(result), 0.0
