"""The cases of the RPC benchmark: each runs on the caller of a pair, with the callee as its only peer.

Both libraries run the same Python code: `rpc` is the module `rpcdist.rpc` or `torch.distributed.rpc`.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from _cases import CALLEE, KIB, MIB, Case, Metrics, Row, percentiles, scaled, time_calls
from torch import Tensor

__all__ = ["CASES", "churn"]

NUM_IN_FLIGHT = 1000
NUM_AWAITED = 100
NUM_CALLING = 8  # threads that call without a pause
NUM_LOADING = 4  # echoes that are in flight while the latency of a no-op is measured
CALLING_S = 1.0
LOAD_S = 2.0
JOIN_S = 60.0


# ---- what the callee runs; `tools/profile_call.py` has the same, but its module would load our package beside torch's


def noop() -> None:
    pass


def echo(tensor: Tensor) -> Tensor:
    return tensor


class Counter:
    """An object that lives on the callee; `benchmarks/_ray_actor.py` has the same for Ray."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        self.count += 1
        return self.count


# ---- what the caller measures; `effort` scales the number of calls (1.0 in a full run)


def measure_noop(rpc: ModuleType, effort: float) -> Metrics:
    return percentiles(time_calls(lambda: rpc.rpc_sync(CALLEE, noop), scaled(1000, effort), num_warm_up=50))


def measure_in_flight(rpc: ModuleType, effort: float) -> Metrics:
    """Bursts of `NUM_IN_FLIGHT` calls; the clock runs from the first send to the last answer."""

    def burst() -> None:
        torch.futures.wait_all([rpc.rpc_async(CALLEE, noop) for _ in range(NUM_IN_FLIGHT)])

    return {"per_call": statistics.median(time_calls(burst, scaled(5, effort), num_warm_up=1)) / NUM_IN_FLIGHT}


def measure_awaited(rpc: ModuleType, effort: float) -> Metrics:
    """`NUM_AWAITED` calls at once in a coroutine, until all have answered; the loop stays free meanwhile.

    torch's futures cannot be awaited: there, one thread of the loop's executor waits for all of them together, which is
    the cheapest way that does not block the loop.
    """
    times_s: list[float] = []

    async def burst() -> None:
        futures = [rpc.rpc_async(CALLEE, noop) for _ in range(NUM_AWAITED)]
        if hasattr(futures[0], "__await__"):
            await asyncio.gather(*futures)
        else:
            await asyncio.get_running_loop().run_in_executor(None, torch.futures.wait_all, futures)

    async def bursts() -> None:
        await burst()
        for _ in range(scaled(20, effort)):
            began = time.perf_counter()
            await burst()
            times_s.append(time.perf_counter() - began)

    asyncio.run(bursts())
    return {"per_call": statistics.median(times_s) / NUM_AWAITED}


def measure_echo(size_bytes: int, num_calls: int) -> Callable[[ModuleType, float], Metrics]:
    def measure(rpc: ModuleType, effort: float) -> Metrics:
        tensor = torch.rand(size_bytes // 4)
        call = partial(rpc.rpc_sync, CALLEE, echo, args=(tensor,))
        if not torch.equal(call(), tensor):
            raise AssertionError(f"an echo of {size_bytes} bytes came back changed")
        return percentiles(time_calls(call, scaled(num_calls, effort), num_warm_up=1))

    return measure


def measure_remote(rpc: ModuleType, effort: float) -> Metrics:
    return percentiles(time_calls(lambda: rpc.remote(CALLEE, noop).to_here(), scaled(300, effort), num_warm_up=20))


def measure_method(rpc: ModuleType, effort: float) -> Metrics:
    counter = rpc.remote(CALLEE, Counter)
    num_warm_up, num_calls = 20, scaled(300, effort)
    times_s = time_calls(lambda: counter.rpc_sync().increment(), num_calls, num_warm_up)
    if (count := counter.rpc_sync().increment()) != num_warm_up + num_calls + 1:
        raise AssertionError(f"the counter was called {num_warm_up + num_calls + 1} times, and says {count}")
    return percentiles(times_s)


def measure_threads(rpc: ModuleType, effort: float) -> Metrics:
    """Calls a second of `NUM_CALLING` threads that each call again as soon as they have their answer."""
    num_calls = [0] * NUM_CALLING
    started = threading.Barrier(NUM_CALLING + 1)
    stop = threading.Event()

    def call(number: int) -> None:
        rpc.rpc_sync(CALLEE, noop)
        started.wait(timeout=JOIN_S)
        while not stop.is_set():
            rpc.rpc_sync(CALLEE, noop)
            num_calls[number] += 1

    threads = start_threads(call, NUM_CALLING)
    started.wait(timeout=JOIN_S)
    began = time.perf_counter()
    stop.wait(CALLING_S * effort)
    measured = sum(num_calls) / (time.perf_counter() - began)
    stop.set()
    join_threads(threads)
    return {"rate": measured}


def measure_noop_under_load(rpc: ModuleType, effort: float) -> Metrics:
    """A no-op's latency for `LOAD_S` seconds, while `NUM_LOADING` threads echo 16 MiB each without a pause."""
    tensor = torch.rand(16 * MIB // 4)
    num_echoes = [0] * NUM_LOADING
    started = threading.Barrier(NUM_LOADING + 1)
    stop = threading.Event()

    def load(number: int) -> None:
        rpc.rpc_sync(CALLEE, echo, args=(tensor,))
        started.wait(timeout=JOIN_S)
        while not stop.is_set():
            rpc.rpc_sync(CALLEE, echo, args=(tensor,))
            num_echoes[number] += 1

    threads = start_threads(load, NUM_LOADING)
    started.wait(timeout=JOIN_S)
    began = time.perf_counter()
    times_s: list[float] = []
    while time.perf_counter() < began + LOAD_S * effort:
        times_s += time_calls(lambda: rpc.rpc_sync(CALLEE, noop), 1, num_warm_up=0)
    stop.set()
    join_threads(threads)
    echoed_bytes = sum(num_echoes) * 16 * MIB
    return percentiles(times_s) | {"echoed": echoed_bytes / (time.perf_counter() - began)}


def start_threads(function: Callable[[int], None], number: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, args=(each,), name=f"load-{each}") for each in range(number)]
    for thread in threads:
        thread.start()
    return threads


def join_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=JOIN_S)
        if thread.is_alive():
            raise AssertionError(f"{thread.name} did not end within {JOIN_S:.0f} s")


def churn(rpc: ModuleType, num_calls: int) -> None:
    """Calls of all kinds, for the growth of memory: of 100 are 40 no-ops, 40 echoes of 1 KiB, 20 remote references."""
    tensor = torch.rand(KIB // 4)
    for _ in range(num_calls // 100):
        futures = [rpc.rpc_async(CALLEE, noop) for _ in range(40)]
        futures += [rpc.rpc_async(CALLEE, echo, args=(tensor,)) for _ in range(40)]
        rrefs = [rpc.remote(CALLEE, echo, args=(tensor,)) for _ in range(20)]
        torch.futures.wait_all(futures)
        for rref in rrefs:
            rref.to_here()


# ---- the table's rows


def budgets(local: float | None = None, tcp: float | None = None, grpc: float | None = None) -> dict[str, float]:
    """The limits of a row by channel, without those that there are not."""
    limits = {"local": local, "tcp": tcp, "grpc": grpc}
    return {channel: limit for channel, limit in limits.items() if limit is not None}


def echo_case(label: str, size_bytes: int, num_calls: int, ratios: dict[str, float], stretch: float | None) -> Case:
    unit, scale = ("us", 1e6) if size_bytes < MIB else ("ms", 1e3)
    row = Row("echo of a float tensor, p50", label, "p50", unit, scale, ratios, stretch=stretch)
    return Case(f"echo-{label.replace(' ', '')}", measure_echo(size_bytes, num_calls), (row,))


def case(name: str, measure: Callable[[ModuleType, float], Metrics], *rows: Row) -> Case:
    return Case(name, measure, rows)


CASES = (
    case(
        "noop",
        measure_noop,
        Row("rpc_sync of a no-op, p50", "", "p50", "us", 1e6, budgets(0.35, 0.6, 1.5), stretch=0.25),
        Row("rpc_sync of a no-op, p99", "", "p99", "us", 1e6, budgets(0.6)),
    ),
    case(
        "in-flight",
        measure_in_flight,
        Row("rpc_async, a call of 1,000 in flight", "", "per_call", "us", 1e6, budgets(0.25, 0.35, 0.5), stretch=0.15),
    ),
    case(
        "awaited",
        measure_awaited,
        Row("await rpc_async, a call of 100 at once", "", "per_call", "us", 1e6, budgets(0.5), stretch=0.3),
    ),
    case(
        "remote",
        measure_remote,
        Row("remote() + to_here(), p50", "", "p50", "us", 1e6, budgets(0.5, 0.8, 1.5), stretch=0.3),
    ),
    case(
        "method",
        measure_method,
        Row("rref.rpc_sync().method(), p50", "", "p50", "us", 1e6, budgets(0.5, 0.8, 1.5), stretch=0.35),
    ),
    case(
        "threads",
        measure_threads,
        Row("no-ops of 8 threads together", "", "rate", "calls/s", 1, budgets(2.0), stretch=3.0, more_is_better=True),
    ),
    echo_case("1 KiB", KIB, 200, budgets(0.5, 0.7, 1.2), 0.35),
    echo_case("64 KiB", 64 * KIB, 100, {}, None),
    echo_case("1 MiB", MIB, 40, budgets(0.5, 1.0, 2.0), 0.3),
    echo_case("16 MiB", 16 * MIB, 8, budgets(0.5, 1.0, 2.0), 0.3),
    echo_case("64 MiB", 64 * MIB, 4, budgets(0.3, 1.0, 2.0), None),
    case(
        "noop-under-load",
        measure_noop_under_load,
        Row("no-op beside 4 echoes, p50", "16 MiB", "p50", "ms", 1e3),
        Row("no-op beside 4 echoes, p99", "16 MiB", "p99", "ms", 1e3, limits=budgets(10.0, 15.0, 25.0), stretch=5.0),
        Row("bytes of the 4 echoes, each way", "16 MiB", "echoed", "MiB/s", 1 / MIB, budgets(1.5), stretch=2.0,
            more_is_better=True),
    ),
)  # fmt: skip
