"""On an event loop, what blocks raises an error whose advice can be followed: each is, here."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import actor_functions as there
import pytest
import torch
from actor_functions import Counter, Journal, new_gate
from blocking_refused import refuses

from rpcdist import rpc
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.testing import InProcessCluster, eventually_async

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b") as cluster:
        yield cluster


# ---------------------------------------------------------------- the forms


class Thing:
    def __init__(self) -> None:
        self.gate = threading.Event()

    @off_loop("await thing.work_async(...)")
    def work(self, x: int, *, twice: bool = False) -> tuple[int, str, bool, int]:
        """The blocking form."""
        return 2 * x if twice else x, variable.get(), torch.is_grad_enabled(), threading.get_ident()

    work_async = async_form(work)

    @off_loop("await thing.wait_async()")
    def wait(self) -> bool:
        return self.gate.wait(there.LIMIT_S)

    wait_async = async_form(wait)

    @off_loop("await thing.fail_async()")
    def fail(self) -> None:
        raise ValueError("no")

    fail_async = async_form(fail)


class Better(Thing):
    def work(self, x: int, *, twice: bool = False) -> tuple[int, str, bool, int]:
        return super().work(x + 100, twice=twice)


async def test_a_form_runs_on_a_thread_with_the_state_of_its_task() -> None:
    variable.set("of the task")
    thing = Thing()
    refuses("await thing.work_async(...)", thing.work, 1)
    *found, thread = await thing.work_async(1, twice=True)
    assert found == [2, "of the task", True] and thread != threading.get_ident()
    with torch.no_grad():
        assert (await thing.work_async(1))[:3] == (1, "of the task", False)
    assert torch.is_grad_enabled()
    assert (await Better().work_async(1))[0] == 101
    with pytest.raises(ValueError, match="no"):
        await thing.fail_async()
    assert Thing.work_async.__name__ == "work_async" and Thing.work.__doc__ == "The blocking form."


async def test_the_loop_goes_on_and_a_cancelled_task_ends_at_once() -> None:
    thing = Thing()
    waiting = asyncio.create_task(thing.wait_async())
    ticks = 0
    while ticks < 3:
        await asyncio.sleep(0)
        ticks += 1
    assert not waiting.done()
    started = time.monotonic()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert time.monotonic() - started < there.LIMIT_S / 2  # it has not waited for the thread
    thing.gate.set()
    assert await Thing.wait_async(thing)


# ---------------------------------------------------------------- calls and references


async def test_calls(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        refuses("await rpc.rpc_async(...)", rpc.rpc_sync, "b", pow, (2, 3))
        refuses("await rpc.rpc_async(...)", rpc.call, "b", pow, 2, 3)
        assert await rpc.rpc_async("b", pow, (2, 3)) == 8
        counter = rpc.remote("b", Counter)
        for rref in (counter, rpc.remote("b", Counter, serial=True)):
            refuses("await rref.rpc_async().add_one(...)", rref.rpc_sync().add_one)
            refuses("await rref.rpc_async().add_one(...)", rref.call, Counter.add_one)
            assert await rref.rpc_async().add_one() == 1
        refuses("await rref", counter.to_here)
        assert (await counter).n == 1
        refuses("await rref.backward_async(...)", counter.backward)


async def test_values_that_are_not_there_yet_at_their_owner(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("mine")
        mine = rpc.remote("a", Journal, ("mine",))
        refuses("await rref", mine.to_here)
        refuses("await rref", mine.local_value)
        gate.set()
        assert (await mine).notes == [] and mine.local_value().notes == []


async def test_futures(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        gate = new_gate("futures")
        futures = [rpc.rpc_async("b", there.block, ("futures",)) for _ in range(40)]
        refuses("await future", futures[0].wait)
        for some in (futures, futures[:3]):
            refuses("await asyncio.gather(*futures)", rpc.wait_all, some)
        refuses("await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)", rpc.wait_any, futures)
        refuses("async for future in rpc.as_completed(futures)", next, rpc.as_completed(futures))
        gate.set()
        await futures[0]
        assert await asyncio.gather(*futures) == [None] * 40
        waiting: Any = asyncio.wait  # its type knows asyncio's own futures only
        done, _ = await waiting(futures, return_when=asyncio.FIRST_COMPLETED)
        assert done
        assert len([future async for future in rpc.as_completed(futures)]) == 40


async def test_streams(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        started = await rpc.rpc_async("b", there.rows, (2,))
        refuses("async for item in stream", next, started)
        assert [item async for item in started] == [0, 1]


async def test_names(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        refuses("await rpc.remote_async(..., name=...)", rpc.remote, "b", Counter, serial=True, name="counter")
        counter = await rpc.remote_async("b", Counter, serial=True, name="counter")
        assert await counter.rpc_async().add_one() == 1
        refuses("await rpc.get_actor_async(...)", rpc.get_actor, "counter")
        assert await (await rpc.get_actor_async("counter")).rpc_async().add_one() == 2
        assert await (await rpc.remote_async("b", Counter)).rpc_async().add_one() == 1


async def test_actors_that_are_made_again(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        actor = rpc.remote("b", Counter, serial=True, max_restarts=1)
        refuses("await actor.rpc_async().add_one(...)", actor.rpc_sync().add_one)
        refuses("await actor.rpc_async().add_one(...)", actor.call, Counter.add_one)
        assert await actor.rpc_async().add_one() == 1  # the calls that were refused have not been made
        assert await actor.call_async(Counter.add_one) == 2


async def test_membership(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        refuses("await rpc.wait_for_worker_async(...)", rpc.wait_for_worker, "b")
        assert (await rpc.wait_for_worker_async("b")).name == "b"
        refuses("await rpc.serve_async(...)", rpc.serve)
        assert await rpc.serve_async(0.01) is None
        refuses("await rpc.stop_serving_async(...)", rpc.stop_serving, "b")
        await rpc.stop_serving_async("b")
    with cluster.use("b"):
        assert "a" in (await rpc.serve_async(there.LIMIT_S) or "")


async def test_a_cancelled_wait_for_other_workers_ends(cluster: InProcessCluster) -> None:
    """Its thread does not take what a later wait waits for, such as a request to stop."""
    with cluster.use("a"):
        waits: list[partial[Coroutine[Any, Any, Any]]] = [
            partial(rpc.wait_for_worker_async, "nobody", timeout=0),
            partial(rpc.wait_for_workers_async, "no role", 1, timeout=0),
            partial(rpc.serve_async),
        ]
        for wait in waits:
            waiting = asyncio.create_task(wait())
            name = f"rpcdist-{wait.func.__name__.removesuffix('_async')}"
            await eventually_async(partial(has_thread, name), "its thread runs")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await eventually_async(lambda: not has_thread(name), f"{wait} has ended")  # noqa: B023  # awaited here
        serving = asyncio.create_task(rpc.serve_async())
    with cluster.use("b"):
        await rpc.stop_serving_async("a")
    assert "b" in (await serving or "")


def has_thread(name: str) -> bool:
    return name in {thread.name for thread in threading.enumerate()}
