"""Calls to many workers at once: encoded once, results in order, and errors that name a worker."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcdist import autograd, rpc
from rpcdist.errors import BlockingInLoop, ConfigError, DeadlineExceeded, UnknownWorker, WorkerLost
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.testing import LIMIT_S, InProcessCluster, WorkerPool, eventually, eventually_async
from rpcdist.transport._channels.socket_channel import SocketChannel

NAMES = ("a", "b", "c", "d")
ran: list[str] = []
entered = threading.Semaphore(0)
release = threading.Event()


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    ran.clear()
    release.clear()
    with InProcessCluster(*NAMES, elastic=True) as cluster:
        yield cluster
        release.set()


def name_and(value: object = None, *, note: str = "") -> tuple[str, object, str]:
    return rpc.get_worker_info().name, value, note


def total(tensor: Tensor) -> float:
    return float(tensor.sum())


def change(tensor: Tensor) -> Tensor:
    return tensor.add_(1)


def fail_on(name: str) -> str:
    here = rpc.get_worker_info().name
    if here == name:
        raise ValueError(f"{here} cannot")
    ran.append(here)
    return here


def wait_on(name: str) -> str:
    here = rpc.get_worker_info().name
    if here == name:
        entered.release()
        release.wait(LIMIT_S)
    return here


async def later(value: int) -> int:
    await asyncio.sleep(0)
    return value + 1


async def wait_for_ever() -> None:
    ran.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        ran.append(rpc.get_worker_info().name)


@rpc.idempotent
def again() -> str:
    return rpc.get_worker_info().name


def test_results_are_in_the_order_of_the_workers(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        found = rpc.call_each(["d", 1, rpc.get_worker_info("a")], name_and, 7, note="n")
        assert found == [("d", 7, "n"), ("b", 7, "n"), ("a", 7, "n")]
        assert rpc.call_each(["b", "b"], later, 1) == [2, 2]
        assert rpc.call_each([], later, 1) == []
        assert rpc.call_each(NAMES, again) == list(NAMES)
        assert rpc.call_each(["c"], pow, 2, 5) == [32]


def test_arguments_are_encoded_once(cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.ones(300_000)
    num = 0
    original = Marshal.write

    def counted(self: Marshal, obj: object, to: int, *others: Any) -> object:
        nonlocal num
        num += type(obj) is tuple and bool(obj) and type(obj[0]) is tuple and any(each is large for each in obj[0])
        return original(self, obj, to, *others)

    monkeypatch.setattr(Marshal, "write", counted)
    with cluster.use("a"):
        assert rpc.call_each(("b", "c", "d"), total, large) == [300_000.0] * 3
        assert num == 1
        found = rpc.call_each(("b", "c", "d"), change, large)  # nobody sees what another one does to it
        assert num == 2
        assert all(each.eq(2).all() for each in found)
        assert large.eq(1).all()
        assert rpc.call_each(("b", "c", "d"), name_and, {"k": [1, "x", None]})[2][1] == {"k": [1, "x", None]}


def calls_whose_replies_this_thread_reads() -> bool:
    """Calls three workers until this thread has read all replies; another may read one, as after a heartbeat."""
    reads: list[tuple[int, int]] = []
    receive = SocketChannel._receive

    def noted(channel: SocketChannel, *args: Any) -> Any:
        reads.append((threading.get_ident(), id(channel)))
        return receive(channel, *args)

    def are_all_read_here() -> bool:
        reads.clear()
        assert rpc.call_each(["b", "c", "d"], name_and, 1) == [("b", 1, ""), ("c", 1, ""), ("d", 1, "")]
        return len({channel for thread, channel in reads if thread == threading.get_ident()}) == 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketChannel, "_receive", noted)
        return eventually(are_all_read_here, "the caller reads all replies")


def test_the_caller_reads_the_replies_of_all(worker_pool: WorkerPool) -> None:
    """Where another thread reads each, two threads contend for the interpreter's lock while the calls are sent."""
    assert worker_pool.world(*NAMES)["a"].run(calls_whose_replies_this_thread_reads)


def test_arguments_that_are_for_one_worker_are_encoded_for_each(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        rref = rpc.RRef(torch.ones(3))
        assert rpc.call_each(("b", "c"), rref_total, rref) == [3.0, 3.0]
        assert [found[1] for found in rpc.call_each(("b", "c"), name_and, {1, 2})] == [{1, 2}, {1, 2}]  # pickled
        with autograd.context() as context:
            weight = torch.ones(3, requires_grad=True)
            results = rpc.call_each(("b", "c"), torch.mul, weight, 2.0)
            autograd.backward(context, [results[0].sum() + results[1].sum()])
            assert autograd.get_gradients(context)[weight].tolist() == [4.0, 4.0, 4.0]


def rref_total(rref: rpc.RRef[Tensor]) -> float:
    return float(rref.to_here().sum())


def test_the_first_error_is_raised_and_the_others_go_on(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        with pytest.raises(ValueError, match="c cannot") as caught:
            rpc.call_each(("b", "c", "d"), fail_on, "c")
        assert "'c'" in str(caught.value.__cause__)
        eventually(lambda: sorted(ran) == ["b", "d"], "the others have run")
        found = rpc.call_each(("b", "c", "d"), fail_on, "c", return_exceptions=True)
        assert found[0] == "b" and found[2] == "d"
        assert isinstance(found[1], ValueError)


def test_a_straggler_and_a_dead_worker_are_named(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        limit_s = 0.05
        while not entered.acquire(blocking=False):  # on a busy machine a deadline may be over before the call begins
            limit_s *= 4
            with pytest.raises(DeadlineExceeded, match="'c'"):
                rpc.call_each(NAMES, wait_on, "c", timeout=limit_s)
        release.set()
        release.clear()
        calling = cluster.begin("a", rpc.call_each, NAMES, wait_on, "c", return_exceptions=True)
        assert entered.acquire(timeout=LIMIT_S)
        cluster.kill("c")
        found = calling.result(LIMIT_S)
        assert [found[0], found[1], found[3]] == ["a", "b", "d"]
        assert isinstance(found[2], WorkerLost) and found[2].worker == "c"
        release.set()
        with pytest.raises(UnknownWorker, match="nobody"):
            rpc.call_each(["b", "nobody"], fail_on, "")
        assert ran == []  # nobody was called


async def test_in_coroutines(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        assert await rpc.call_each_async(NAMES, later, 1) == [2, 2, 2, 2]
        with pytest.raises(ValueError, match="c cannot"):
            await rpc.call_each_async(NAMES, fail_on, "c")
        found = await rpc.call_each_async(NAMES, fail_on, "c", return_exceptions=True)
        assert [type(each) for each in found] == [str, str, ValueError, str]
        with pytest.raises(BlockingInLoop, match="call_each_async"):
            rpc.call_each(NAMES, later, 1)
        ran.clear()
        task = asyncio.ensure_future(rpc.call_each_async(("b", "c"), wait_for_ever))
        await eventually_async(lambda: ran.count("begun") == 2, "both have begun")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await eventually_async(lambda: {"b", "c"} <= set(ran), "both were cancelled")


def test_nobody_has_the_role(cluster: InProcessCluster) -> None:
    with cluster.use("a"):
        eventually(lambda: len(rpc.workers()) == len(NAMES), "all workers are known here")
        with pytest.raises(ConfigError, match=r"no worker has the role 'b'; .* a \(no role\), b"):
            rpc.call_each("b", again)


# ---------------------------------------------------------------- memory that all receivers share

kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor, value: float) -> float:
    """Keeps what came, and writes to a part of it; the sum before."""
    total = tensor.double().sum().item()
    tensor[: len(tensor) // 2] = value
    kept.append(tensor)
    del kept[:-2]
    return total


def sums() -> list[tuple[float, float]]:
    return [(t[: len(t) // 2].double().mean().item(), t[len(t) // 2 :].double().mean().item()) for t in kept]


def call_many(names: list[str], num_rounds: int) -> list[list[float]]:
    found = []
    for number in range(num_rounds):
        tensor = torch.full((1 << 20,), float(number))
        found.append(rpc.call_each(names, keep, tensor, -1.0))
        tensor.fill_(77.0)  # nobody sees it
    return found


def shared_maps() -> tuple[int, int]:
    """Open descriptors, and maps of shared memory."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return len(os.listdir("/proc/self/fd")), len(maps)


@pytest.mark.multiproc
def test_receivers_of_one_host_share_the_memory_and_not_what_they_write(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", "d")
    names = ["b", "c", "d"]
    assert world["a"].run(call_many, names, 5) == [[float(number << 20)] * 3 for number in range(5)]
    for name in names:
        assert world[name].run(sums) == [(-1.0, 3.0), (-1.0, 4.0)]  # kept, while the memory of others was used again
    before = [world[name].run(shared_maps) for name in ("a", *names)]
    assert world["a"].run(call_many, names, 40)[39] == [float(39 << 20)] * 3
    after = [world[name].run(shared_maps) for name in ("a", *names)]
    assert all(new[0] <= old[0] + 3 and new[1] <= old[1] + 3 for old, new in zip(before, after, strict=True))
    world["d"].kill()  # with what it kept: its memory is not used again, and the others go on
    assert world["a"].run(call_many, ["b", "c"], 5)[4] == [float(4 << 20)] * 2
    assert world["b"].run(sums) == world["c"].run(sums) == [(-1.0, 3.0), (-1.0, 4.0)]


SECRET = 1234.5


def has_secret() -> bool:
    """Whether shared memory that this process has mapped holds it."""
    wanted = struct.pack("<4f", *[SECRET] * 4)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    with open("/proc/self/mem", "rb", 0) as memory:
        for first, last in (line[0].split("-") for line in lines if line[1].startswith("r")):
            memory.seek(int(first, 16))
            with suppress(OSError):  # the map has ended meanwhile
                if wanted in memory.read(int(last, 16) - int(first, 16)):
                    return True
    return False


def hear(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether the secret is in what this worker has mapped, and in what "b" has."""
    return has_secret(), bool(tensor[0] == SECRET) and rpc.rpc_sync("b", has_secret)


def tell_in_groups() -> list[tuple[bool, bool]]:
    """Returns what the group of the secret has seen; memory of that size is that of other groups before and after."""
    found = []
    for _ in range(3):
        rpc.call_each(["b", "c"], hear, torch.full((1 << 20,), 1.0))
        found += rpc.call_each(["c", "d"], hear, torch.full((600_000,), SECRET))
        rpc.call_each(["b", "c", "d"], hear, torch.full((600_000,), 2.0))
    return found


@pytest.mark.multiproc
def test_memory_for_some_workers_is_never_that_of_others(worker_pool: WorkerPool) -> None:
    """A worker keeps such memory mapped, and read there what others were sent later."""
    world = worker_pool.world("a", "b", "c", "d")
    assert world["a"].run(tell_in_groups) == [(True, False)] * 6
