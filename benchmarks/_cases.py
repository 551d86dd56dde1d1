"""What the RPC benchmark measures: each case runs on the caller of a pair, with the callee as its only peer.

Both libraries run the same Python code: `rpc` is the module `rpcdist.rpc` or `torch.distributed.rpc`.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["CALLEE", "CASES", "Case", "churn"]

CALLEE = "callee"
NUM_IN_FLIGHT = 1000
NUM_LOADING = 4  # echoes that are in flight while the latency of a no-op is measured
LOAD_S = 2.0
KIB, MIB = 2**10, 2**20

Metrics = dict[str, float]  # what was measured -> seconds, or calls per second for rates


# ---- what the callee runs


def noop() -> None:
    pass


def echo(tensor: Tensor) -> Tensor:
    return tensor


# ---- what the caller measures; `effort` scales the number of calls (1.0 in a full run)


def measure_noop(rpc: ModuleType, effort: float) -> Metrics:
    return percentiles(time_calls(lambda: rpc.rpc_sync(CALLEE, noop), scaled(1000, effort), num_warm_up=50))


def measure_in_flight(rpc: ModuleType, effort: float) -> Metrics:
    """Bursts of `NUM_IN_FLIGHT` calls; the clock runs from the first send to the last answer."""

    def burst() -> None:
        torch.futures.wait_all([rpc.rpc_async(CALLEE, noop) for _ in range(NUM_IN_FLIGHT)])

    times_s = time_calls(burst, scaled(5, effort), num_warm_up=1)
    return {"rate": NUM_IN_FLIGHT / statistics.median(times_s)}


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


def measure_noop_under_load(rpc: ModuleType, effort: float) -> Metrics:
    """A no-op's latency for `LOAD_S` seconds, while `NUM_LOADING` threads echo 16 MiB each without a pause."""
    tensor = torch.rand(16 * MIB // 4)
    ends = time.perf_counter() + LOAD_S * effort
    num_echoes = [0] * NUM_LOADING
    started = threading.Barrier(NUM_LOADING + 1)

    def load(number: int) -> None:
        rpc.rpc_sync(CALLEE, echo, args=(tensor,))
        started.wait(timeout=60)
        while time.perf_counter() < ends:
            rpc.rpc_sync(CALLEE, echo, args=(tensor,))
            num_echoes[number] += 1

    threads = [threading.Thread(target=load, args=(number,), name=f"load-{number}") for number in range(NUM_LOADING)]
    for thread in threads:
        thread.start()
    started.wait(timeout=60)
    ends = time.perf_counter() + LOAD_S * effort
    began = time.perf_counter()
    times_s: list[float] = []
    while time.perf_counter() < ends:
        times_s += time_calls(lambda: rpc.rpc_sync(CALLEE, noop), 1, num_warm_up=0)
    for thread in threads:
        thread.join(timeout=60)
    echoed_bytes = sum(num_echoes) * 16 * MIB
    return percentiles(times_s) | {"echoed": echoed_bytes / (time.perf_counter() - began)}


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


# ---- helpers


def time_calls(call: Callable[[], object], num_calls: int, num_warm_up: int) -> list[float]:
    """Seconds that each of `num_calls` calls takes, after some that are not counted."""
    for _ in range(num_warm_up):
        call()
    times_s = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began)
    return times_s


def percentiles(times_s: list[float]) -> Metrics:
    ordered = sorted(times_s)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


def scaled(num_calls: int, effort: float) -> int:
    return max(2, round(num_calls * effort))


# ---- the table's rows


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a metric of a case, and the budget that it must keep.

    Attributes:
        metric: key in what the case measured.
        unit: what the number is shown in.
        scale: what the measured value is multiplied with for that.
        ratio: limit on ours / torch's: an upper one, or for rates (`more_is_better`) a lower one.
        channel_ratio: the same where the local channel is in use.
        limit: upper limit on ours alone, in `unit`.
    """

    what: str
    size: str
    metric: str
    unit: str
    scale: float
    ratio: float | None = None
    channel_ratio: float | None = None
    limit: float | None = None
    more_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement that runs on a pair, and the rows that come of it."""

    name: str
    measure: Callable[[ModuleType, float], Metrics]
    rows: tuple[Row, ...]


def echo_case(
    label: str, size_bytes: int, num_calls: int, ratio: float | None = None, channel_ratio: float | None = None
) -> Case:
    unit, scale = ("us", 1e6) if size_bytes < MIB else ("ms", 1e3)
    row = Row("echo of a float tensor, p50", label, "p50", unit, scale, ratio, channel_ratio)
    return Case(f"echo-{label.replace(' ', '')}", measure_echo(size_bytes, num_calls), (row,))


CASES = (
    Case(
        "noop",
        measure_noop,
        (
            Row("rpc_sync of a no-op, p50", "", "p50", "us", 1e6, ratio=1.4, channel_ratio=0.5),
            Row("rpc_sync of a no-op, p99", "", "p99", "us", 1e6),
        ),
    ),
    Case(
        "in-flight",
        measure_in_flight,
        (Row("rpc_async, 1,000 in flight", "", "rate", "calls/s", 1, 2.0, channel_ratio=3.0, more_is_better=True),),
    ),
    echo_case("1 KiB", KIB, 200),
    echo_case("64 KiB", 64 * KIB, 100),
    echo_case("1 MiB", MIB, 40, 2.0, 0.5),
    echo_case("16 MiB", 16 * MIB, 8, 2.0, 0.3),
    echo_case("64 MiB", 64 * MIB, 4, 2.0, 0.3),
    Case("remote", measure_remote, (Row("remote() + to_here(), p50", "", "p50", "us", 1e6, 1.5, channel_ratio=0.6),)),
    Case(
        "noop-under-load",
        measure_noop_under_load,
        (
            Row("no-op beside 4 echoes, p50", "16 MiB", "p50", "ms", 1e3),
            Row("no-op beside 4 echoes, p99", "16 MiB", "p99", "ms", 1e3, limit=10.0),
            Row("bytes of the 4 echoes, each way", "16 MiB", "echoed", "MiB/s", 1 / MIB, more_is_better=True),
        ),
    ),
)
