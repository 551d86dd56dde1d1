"""$ python benchmarks/weights.py
Measures published weights, and calls to many workers, against plain copies and against Gloo's broadcast.

Each row is measured beside what it is compared with, in rounds and in turns, by a trainer and four generators of one
host, with one thread each (16 workers for the calls). The table shows medians, and the ratio of the medians.

With `--ray PYTHON`, there is a row for Ray: put, get in four actors, and a copy into tensors of their own.

With `--hosts`, it measures five network namespaces in place of that, which play hosts with links of 1 Gbit/s each way
(`tc tbf`; it takes root): until four hosts have the weights, against one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import _ray
from _report import about_machine, layout, show, write_results

HEAD = ("what", "ms", "against", "ms", "ratio", "in single rounds", "at most", "ok")
NUM_GENERATORS = 4
LIMIT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights")
    parser.add_argument("--hosts", action="store_true", help="between network namespaces, with links of 1 Gbit/s")
    parser.add_argument("--ray", metavar="PYTHON", help=f"against Ray, too; PYTHON has `{_ray.REQUIREMENT}` and torch")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    from rpcdist.testing import WorkerPool

    about = [*about_machine("rpcdist", "torch"), f"- {arguments.rounds} rounds; {arguments.mib} MiB of weights"]
    print("\n".join(about), flush=True)
    folder = str(Path(__file__).resolve().parent)
    if arguments.hosts:
        with WorkerPool({"OMP_NUM_THREADS": "1", "PYTHONPATH": folder}) as pool, hosts_with_links(5) as namespaces:
            lines = lines_between_hosts(pool, namespaces, arguments.rounds, arguments.mib)
        print("\n".join(["", *layout(HEAD, lines)]))
        return 0
    with WorkerPool({"OMP_NUM_THREADS": "1", "PYTHONPATH": folder}) as pool, ExitStack() as stack:
        ray = None
        if arguments.ray:
            about.append(f"- Ray {_ray.version(arguments.ray)}")
            program = ("_ray_weights.py", str(arguments.mib))
            ray = stack.enter_context(_ray.open_actor(arguments.ray, *program))
        names = ["trainer", *(f"g{number}" for number in range(16))]
        bench = Bench(pool.world(*names, rpc_timeout=LIMIT_S), arguments.rounds, arguments.mib, ray)
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
        ray: actors of Ray to compare with; None without it.
    """

    def __init__(self, world: Any, rounds: int, mib: int, ray: _ray.Actor | None = None) -> None:
        self.ray = ray
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
        self.prepare_shards()
        lines = []
        if (ray := self.ray) is not None:
            ray.measure(1)  # its first put takes the memory
            theirs = "Ray: put, get in 4 actors, copied"
            lines.append(
                self.row(all_have_it, lambda: self.spread("weights", pull), theirs, lambda: ray.measure(1)["s"], 0.5)
            )
        return [
            *lines,
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
            self.row(
                f"2 row shards pulled as 4 columns, {self.mib} MiB",
                lambda: self.spread_shards(pull_columns),
                "the same bytes unsharded",
                lambda: self.spread_shards(pull_unsharded),
                1.5,
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
        time.sleep(0.02)  # they are told to begin through pipes, and look at their targets first
        began = self.trainer.run(publish_at, name)
        return float(max(pending.result(LIMIT_S) for pending in waiting) - began)

    def prepare_shards(self) -> None:
        """Two trainers have half of the rows each; the weights of the other name have as many bytes."""
        self.owners = [self.trainer, self.generators[0]]
        for shard, owner in enumerate(self.owners):
            owner.run(make_rows, shard, self.mib)
        for shard, owner in enumerate(self.owners):
            owner.run(publish_rows, shard)
        for number, worker in enumerate(self.generators):
            worker.run(make_columns, number, self.mib)
        for take in (pull_columns, pull_unsharded):
            for worker in self.generators:
                worker.run(take)

    def spread_shards(self, take: Callable[[], float]) -> float:
        """From when both have published until the last generator has its columns, a quarter of the bytes."""
        publishing = [owner.begin(publish_rows, shard) for shard, owner in enumerate(self.owners)]
        began = max(pending.result(LIMIT_S) for pending in publishing)
        waiting = [worker.begin(take) for worker in self.generators]
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
    """The same without a copy. A viewed tensor is given back at once, for the rounds that follow."""
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


ROW_SHAPE = (256, 4096)
"""Of a row shard of one tensor; its whole has twice the rows."""


def make_rows(shard: int, mib: int) -> None:
    import torch

    from rpcdist.parallel import Published, TensorPart

    torch.set_num_threads(1)
    whole = (2 * ROW_SHAPE[0], ROW_SHAPE[1])
    rows = [torch.ones(ROW_SHAPE) for _ in range(mib // 8)]
    held["rows"] = {f"t{n}": TensorPart(t, (shard * ROW_SHAPE[0], 0), whole) for n, t in enumerate(rows)}
    held["flat"] = {f"f{shard}/{n}": t for n, t in enumerate(rows)}
    held["rows/published"] = Published("rows")
    held["flat/published"] = Published(f"flat{shard}")


def publish_rows(shard: int) -> float:
    """Publishes both; when it had done so: what is compared is the pulls."""
    held["rows/published"].publish(held["rows"], shard=(shard, 2))
    held["flat/published"].publish(held["flat"])
    return time.monotonic()


def make_columns(number: int, mib: int) -> None:
    import torch

    from rpcdist.parallel import Published, TensorPart

    rows, columns = 2 * ROW_SHAPE[0], ROW_SHAPE[1] // 4
    parts = [torch.zeros(rows, columns) for _ in range(mib // 8)]
    whole = (rows, ROW_SHAPE[1])
    held["columns"] = {f"t{n}": TensorPart(t, (0, number * columns), whole) for n, t in enumerate(parts)}
    # As many bytes: half of the tensors of one publisher, each whole.
    first, half = number // 2, number % 2
    names = [f"f{first}/{n}" for n in range(half * (mib // 16), (half + 1) * (mib // 16))]
    held["unsharded"] = {name: torch.zeros(ROW_SHAPE) for name in names}
    held["columns/published"] = Published("rows")
    held["unsharded/published"] = Published(f"flat{first}")


def pull_columns() -> float:
    held["columns/published"].pull_into(held["columns"])
    return time.monotonic()


def pull_unsharded() -> float:
    held["unsharded/published"].pull_into(held["unsharded"])
    return time.monotonic()


def copy_alone(name: str) -> float:
    target: dict[str, Any] = held[f"{name}/target"]
    began = time.monotonic()
    for key, tensor in held[name].items():
        target[key].copy_(tensor)
    return time.monotonic() - began


# ---------------------------------------------------------------- between hosts

ADDRESS = "10.214.9.{}"
CLONE_NEWNET = 0x40000000


@contextmanager
def hosts_with_links(count: int) -> Iterator[list[str]]:
    """Network namespaces on one bridge, each with a link of 1 Gbit/s both ways."""
    bridge = f"rw{os.getpid() % 100000}"
    namespaces = [f"{bridge}n{number}" for number in range(count)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, namespace in enumerate(namespaces):
            outside = f"{bridge}v{number}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "wan0", "netns", namespace)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            address = f"{ADDRESS.format(number + 1)}/24"
            _run("ip", "-n", namespace, "address", "add", address, "dev", "wan0")
            for device in ("wan0", "lo"):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            shape = ["root", "tbf", "rate", "1gbit", "burst", "1mb", "latency", "50ms"]
            _run("tc", "qdisc", "add", "dev", outside, *shape)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", "wan0", *shape)
        yield namespaces
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=10)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True, timeout=10)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)


def lines_between_hosts(pool: Any, namespaces: Sequence[str], rounds: int, mib: int) -> list[tuple[str, ...]]:
    url = f"tcp://{ADDRESS.format(1)}:29572"
    names = ["trainer", *(f"g{number}" for number in range(NUM_GENERATORS))]
    workers = [pool.start(name) for name in names]
    joining = [
        worker.begin(join_on_host, namespaces[rank], ADDRESS.format(rank + 1), name, rank, url)
        for rank, (worker, name) in enumerate(zip(workers, names, strict=True))
    ]
    for pending in joining:
        pending.result(LIMIT_S)
    bench = Bench({worker.name: worker for worker in workers}, rounds, mib)
    generators = bench.generators
    bench.prepare("weights", mib, 16)
    bench.generators = generators[:1]
    bench.prepare("alone", mib, 16)

    def spread(name: str, to: list[Any]) -> float:
        bench.generators = to
        return bench.spread(name, pull)

    return [
        bench.row(
            f"{mib} MiB published, until 4 hosts have it",
            lambda: spread("weights", generators),
            "until 1 host has it",
            lambda: spread("alone", generators[:1]),
            1.25,
        )
    ]


def join_on_host(namespace: str, host: str, name: str, rank: int, url: str) -> None:
    from rpcdist.testing.worker_pool import join

    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(descriptor)
    join(name, rank, None, url, host=host)


# ---------------------------------------------------------------- Gloo and calls


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
    """The called function."""


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
