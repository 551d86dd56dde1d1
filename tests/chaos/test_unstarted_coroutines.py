"""A coroutine function whose call is cancelled when its coroutine is made and has not begun."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

from inside_agents import current_agent

from rpcdist import rpc
from rpcdist.testing import LIMIT_S, InProcessCluster, eventually

rpc_async: Any = rpc.rpc_async
opened = threading.Event()
entered = threading.Event()


async def hold_the_loop() -> bool:
    """A handler that blocks, as none should: others cannot begin meanwhile."""
    entered.set()
    return opened.wait(LIMIT_S)


async def never_begins() -> None:
    raise AssertionError("it was cancelled before")


def test_nobody_is_warned_that_it_was_never_awaited() -> None:
    with InProcessCluster("a", "b") as cluster, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cluster.use("b"):
            loop = current_agent().user_loop
        with cluster.use("a"):
            holding = rpc_async("b", hold_the_loop)
            assert entered.wait(LIMIT_S)
            future = rpc_async("b", never_begins)
            eventually(lambda: len(loop) == 2, "its coroutine waits for the loop")
            future.cancel()
            opened.set()
            assert holding.wait() and future.cancelled()
            eventually(lambda: len(loop) == 0, "it is over")
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
