"""$ python benchmarks/inspection.py
The costs of the means to look into a job: no-ops by `rpc_sync` and small all_reduces between two processes
of this machine.

A pair of processes for each way, all alive at the same time; in each round every pair has one burst, in changing order,
and its time is divided by that of the pair without a flight recorder in the same round. The table has the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final

import torch
from _pairs import Pair, open_pair
from _report import RESULTS, Line, about_machine, layout, show, write_results

import rpcdist
from rpcdist import collectives, metrics, rpc
from rpcdist._inspect.asking import Asker
from rpcdist.private_files import SIZE_VARIABLE
from rpcdist.rpc._current import current_agent

HEAD: Final[Line] = ("what", "way", "us", "against no recorder", "budget", "ok")
NOTHING: Final = "no recorder"
WAYS: Final[dict[str, float | None]] = {
    NOTHING: None, "recorder (the default)": 1.04, "and metrics": 1.08, "and a trace": 1.25, "and the page": None,
}  # fmt: skip
NUM_CALLS: Final = 400
NUM_WARM_UPS: Final = 3
_PAGE_PERIOD_S: Final = 0.5


class SeenPeer:
    """One process of a pair; see `_pairs.Peer`."""

    def __init__(self, rank: int, port: int, way: str) -> None:
        self._rank, self._way = rank, way
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._tensor = torch.ones(256)
        self._ends = contextlib.ExitStack()

    def start(self) -> None:
        torch.set_num_threads(1)
        if self._way == NOTHING:
            os.environ[SIZE_VARIABLE] = "0"
        collectives.init_process_group(rank=self._rank, world_size=2)
        rpc.init_rpc(f"seen{self._rank}", rank=self._rank, world_size=2)
        rpc.rpc_sync(f"seen{1 - self._rank}", int)
        if self._way == "and metrics":
            metrics.attach()

    def begin_trace(self) -> None:
        if self._way == "and a trace" and self._rank == 0:
            self._ends.enter_context(rpcdist.trace(Path(os.devnull)))

    def address(self) -> str:
        return str(current_agent().network.address)

    def calls(self) -> float:
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            rpc.rpc_sync("seen1", int)
        return (time.perf_counter() - began) / NUM_CALLS

    def reductions(self) -> float:
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            collectives.all_reduce(self._tensor)
        return (time.perf_counter() - began) / NUM_CALLS

    def end_trace(self) -> None:
        self._ends.close()

    def stop(self) -> None:
        rpc.shutdown()
        collectives.destroy_process_group()


def compare(pairs: dict[str, Pair], rounds: int, burst: Callable[[Pair], float]) -> dict[str, list[float]]:
    """The times of the bursts, by way and round."""
    found: dict[str, list[float]] = {way: [] for way in pairs}
    names = list(pairs)
    for number in range(-NUM_WARM_UPS, rounds):
        start = number % len(names)
        for way in names[start:] + names[:start]:
            took_s = burst(pairs[way])
            if number >= 0:
                found[way].append(took_s)
    return found


def lines_of(what: str, found: dict[str, list[float]]) -> list[Line]:
    lines: list[Line] = []
    for way, times_s in found.items():
        ratio = median(mine / base for mine, base in zip(times_s, found[NOTHING], strict=True))
        limit = WAYS[way]
        budget = ("", "") if limit is None else (f"at most {limit:g}x", "yes" if ratio <= limit else "NO")
        lines.append((what, way, show(median(times_s) * 1e6), f"{ratio:.3f}x", *budget))
    return lines


@contextlib.contextmanager
def looked_at(address: str) -> Iterator[None]:
    """A live view of a job, while the block lasts."""

    ended = threading.Event()

    def look() -> None:
        with Asker(is_live=True) as asker:
            while not ended.wait(_PAGE_PERIOD_S):
                asker.job_at(address)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--rounds", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    about = about_machine("rpcdist", "torch", "grpcio", "uvloop")
    print("\n".join(about), flush=True)
    with contextlib.ExitStack() as stack:
        pairs = {way: stack.enter_context(open_pair(way, SeenPeer, way)) for way in WAYS}
        stack.enter_context(looked_at(pairs["and the page"].ask_first("address")))
        pairs["and a trace"].ask_first("begin_trace")
        lines = lines_of("no-op", compare(pairs, arguments.rounds, lambda pair: pair.ask_first("calls")))
        reduced = compare(pairs, arguments.rounds, lambda pair: pair.ask_both("reductions")[0])
        lines += lines_of("all_reduce of 1 KiB", reduced)
        pairs["and a trace"].ask_first("end_trace")
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("inspection.py", [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
