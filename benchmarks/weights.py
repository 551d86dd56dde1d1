"""$ python benchmarks/weights.py
Measures published weights, and calls to many workers, against plain copies and against Gloo's broadcast.

Each row is measured beside what it is compared with, in rounds and in turns, by a trainer and four generators of one
host, with one thread each (16 workers for the calls). The table shows medians, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from _report import about_machine, layout, show, write_results

HEAD = ("what", "ms", "against", "ms", "ratio", "in single rounds", "at most", "ok")
NUM_GENERATORS = 4
LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    from rpcdist.testing import WorkerPool

    about = [*about_machine("rpcdist", "torch"), f"- {arguments.rounds} rounds; {arguments.mib} MiB of weights"]
    print("\n".join(about), flush=True)
    folder = str(Path(__file__).resolve().parent)
    with WorkerPool({"OMP_NUM_THREADS": "1", "PYTHONPATH": folder}) as pool:
        names = ["trainer", *(f"g{number}" for number in range(16))]
        bench = Bench(pool.world(*names, rpc_timeout=LIMIT_S), arguments.rounds, arguments.mib)
        lines = bench.lines()
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("weights.py", [*about, "", *table])
    return 0


class Bench:
    """The rows of the table.

    Args:
        world: the workers, which call the functions below.
        rounds: how often each row is measured.
        mib: size of the weights.
    """

    def __init__(self, world: Any, rounds: int, mib: int) -> None:
        self.trainer = world["trainer"]
        self.generators = [world[f"g{number}"] for number in range(NUM_GENERATORS)]
        self.rounds = rounds
        self.mib = mib

    def lines(self) -> list[tuple[str, ...]]:
        all_have_it = f"{self.mib} MiB published, until 4 have it"
        self.prepare("weights", self.mib, 16)
        self.prepare("many", 8, 2000)
        self.prepare("one", 8, 1)
        store = Path(self.trainer.run(new_store))
        joining = [
            worker.begin(join_gloo, str(store), rank, 1 + NUM_GENERATORS)
            for rank, worker in enumerate([self.trainer, *self.generators])
        ]
        for pending in joining:
            pending.result(LIMIT_S)
        copy = f"one copy of {self.mib} MiB"
        return [
            self.row(all_have_it, lambda: self.spread("weights", pull), "five copies", self.five_copies, 1.2),
            self.row(all_have_it + " as a view", lambda: self.spread("weights", look), copy, self.one_copy, 1.3),
            self.row(all_have_it, lambda: self.spread("weights", pull), "Gloo: broadcast in 5 ranks", self.gloo, 0.5),
            self.row(f"publish {self.mib} MiB", lambda: self.trainer.run(publish, "weights"), copy, self.one_copy, 1.2),
            self.row(
                "2,000 tensors of 4 KiB, until 4 have them",
                lambda: self.spread("many", pull),
                "one tensor of 8 MiB",
                lambda: self.spread("one", pull),
                2.0,
            ),
            self.row("call_each of a no-op, 16 workers", self.call_each_16, "one call", self.call_one, 4.0),
            self.row("call_each with 16 MiB, 4 workers", self.call_each_large, "one such call", self.call_large, 1.5),
        ]

    def row(
        self, what: str, ours: Callable[[], float], against: str, theirs: Callable[[], float], at_most: float
    ) -> tuple[str, ...]:
        """Measures both in turns, in changing order; the first round is not counted."""
        samples: list[tuple[float, float]] = []
        for number in range(self.rounds + 1):
            if number % 2:
                mine = ours()
                samples.append((mine, theirs()))
            else:
                other = theirs()
                samples.append((ours(), other))
        mine, other = (statistics.median(values) for values in zip(*samples[1:], strict=True))
        single = sorted(a / b for a, b in samples[1:])
        line = (
            what,
            show(1e3 * mine),
            against,
            show(1e3 * other),
            f"{mine / other:.2f}x",
            f"{single[0]:.2f} - {single[-1]:.2f}",
            f"{at_most:g}x",
            "yes" if mine / other <= at_most else "NO",
        )
        print(" | ".join(line), flush=True)
        return line

    def prepare(self, name: str, mib: int, num: int) -> None:
        for worker in (self.trainer, *self.generators):
            worker.run(make_tensors, name, mib, num)
        self.trainer.run(publish, name)
        for worker in self.generators:
            worker.run(pull, name)

    def spread(self, name: str, take: Callable[[str], float]) -> float:
        """From before the publisher begins until the last generator has the version; they wait for it."""
        waiting = [worker.begin(take, name) for worker in self.generators]
        began = self.trainer.run(publish_at, name)
        return float(max(pending.result(LIMIT_S) for pending in waiting) - began)

    def one_copy(self) -> float:
        return float(self.trainer.run(copy_alone, "weights"))

    def five_copies(self) -> float:
        return 5 * self.one_copy()

    def gloo(self) -> float:
        waiting = [worker.begin(gloo_broadcast, "weights") for worker in self.generators]
        began = time.monotonic()
        self.trainer.run(gloo_broadcast, "weights")
        return float(max(pending.result(LIMIT_S) for pending in waiting) - began)

    def call_each_16(self) -> float:
        return float(self.trainer.run(time_calls, [f"g{number}" for number in range(16)], 0))

    def call_one(self) -> float:
        return float(self.trainer.run(time_calls, ["g0"], 0))

    def call_each_large(self) -> float:
        return float(self.trainer.run(time_calls, [f"g{number}" for number in range(4)], 16))

    def call_large(self) -> float:
        return float(self.trainer.run(time_calls, ["g0"], 16))


# ---------------------------------------------------------------- in the workers

held: dict[str, Any] = {}


def make_tensors(name: str, mib: int, num: int) -> None:
    import torch

    from rpcdist.parallel import Published

    torch.set_num_threads(1)
    size = (mib << 20) // num // 4
    held[name] = {f"t{number}": torch.zeros(size) for number in range(num)}
    held[f"{name}/target"] = {key: torch.ones_like(tensor) for key, tensor in held[name].items()}
    held[f"{name}/published"] = Published(name)
    held[f"{name}/version"] = 0


def publish(name: str) -> float:
    began = time.monotonic()
    held[f"{name}/published"].publish(held[name])
    return time.monotonic() - began


def publish_at(name: str) -> float:
    """When it began, on the clock of this host."""
    began = time.monotonic()
    held[f"{name}/published"].publish(held[name])
    return began


def pull(name: str) -> float:
    """Waits for a version; when it was in this process's own tensors."""
    version = held[f"{name}/version"]
    held[f"{name}/version"] = held[f"{name}/published"].pull_into(held[name], version, wait=version > 0)
    return time.monotonic()


def look(name: str) -> float:
    """The same without a copy. What is viewed is given back at once, for the rounds that follow."""
    published, version = held[f"{name}/published"], held[f"{name}/version"]
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        published.view()
        if published.version > version or not version:
            break
        time.sleep(0.0005)  # `view` does not wait for a newer version
    ended = time.monotonic()
    held[f"{name}/version"] = published.version
    return ended


def copy_alone(name: str) -> float:
    target: dict[str, Any] = held[f"{name}/target"]
    began = time.monotonic()
    for key, tensor in held[name].items():
        target[key].copy_(tensor)
    return time.monotonic() - began


def new_store() -> str:
    import tempfile

    return str(Path(tempfile.mkdtemp(prefix="rpcdist-benchmark-")) / "store")


def join_gloo(store: str, rank: int, size: int) -> None:
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )


def gloo_broadcast(name: str) -> float:
    import torch.distributed

    for tensor in held[name].values():
        torch.distributed.broadcast(tensor, 0)
    return time.monotonic()


def no_operation(*_: object) -> None:
    """What is called."""


def time_calls(workers: Sequence[str], mib: int) -> float:
    """Median of a few, in seconds."""
    import torch

    from rpcdist import rpc

    arguments = (torch.zeros(mib << 18),) if mib else ()
    found = []
    for _ in range(9 if mib else 101):
        began = time.perf_counter()
        rpc.call_each(workers, no_operation, *arguments)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
