"""$ python benchmarks/collectives.py
Compares rpcdist's collectives with torch's Gloo in one run on one machine, over shared memory and over TCP alone.

The same processes belong to three groups: ours with shared memory, ours without it, and Gloo's. Every case is measured
in rounds, and each round measures all three, in changing order. The table shows the median over the rounds of the
median iteration at rank 0. Every process has one OpenMP thread. The size is that of the whole buffer: a rank's chunk of
all_gather, reduce_scatter and all_to_all is this divided by the number of ranks. Where mpi4py and an MPI are installed,
`--mpi` measures Open MPI in a run of its own beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from _collective_cases import CASES, SIZES, Case, Runner, measure, name_of_size
from _report import RESULTS, Line, about_machine, layout, show, write_results

from rpcdist import launch

OURS, TCP, GLOO = "ours", "TCP only", "Gloo"
Key = tuple[int, str, int]
Row = tuple[int, str, int, dict[str, list[float]]]
TARGET_S = 0.15
MAX_ITERATIONS = 400
LIMIT_S = 120


def budget(case: str, size: int, world: int, tcp: bool) -> float | None:
    """The most that our time may be of Gloo's: design section 9, and the issue of the collectives for 8 ranks."""
    if case in ("ping-pong", "exchange"):
        return None if tcp else {2: 0.6, 4: 1.0}.get(world)
    if case != "all_reduce":
        return None
    if world == 8:
        return 1 / 3 if size == 4 and not tcp else None
    if world != 2:
        return None
    if tcp:
        return 1.0
    return 0.2 if size <= 1 << 10 else 0.3 if size <= 1 << 16 else 0.35


# ---- on every rank


def run_rank(rank: int, world: int, folder: str, names: Sequence[str], sizes: Sequence[int], rounds: int) -> list[Row]:
    """Measures all cases; returns the ranks, the name, the size and the times of each."""
    import torch
    import torch.distributed as gloo

    import rpcdist.collectives as ours
    from rpcdist.collectives.tcp import TcpOptions

    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    gloo.init_process_group("gloo", f"file://{folder}/gloo", limit, world, rank)
    ours.init_process_group("tcp", f"file://{folder}/ours", limit, world, rank)
    sockets = ours.new_group(pg_options=TcpOptions(shared_memory=False, unix_sockets=False))
    libraries = {OURS: (ours, None), TCP: (ours, sockets), GLOO: (gloo, None)}
    found: list[Row] = []
    for case in [case for case in CASES if case.name in names]:
        for size in [size for size in case.sizes if size in (*sizes, 0)]:
            times = _measure_case(case, libraries, size, rank, world, rounds)
            found.append((world, case.name, size, times))
            if rank == 0:
                print(f"{world} ranks, {case.name} {name_of_size(size)}", file=sys.stderr, flush=True)
    ours.destroy_process_group()
    gloo.destroy_process_group()
    return found


def _measure_case(
    case: Case, libraries: dict[str, tuple[Any, Any]], size: int, rank: int, world: int, rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in libraries}
    runners: dict[str, tuple[Runner, Runner, int]] = {}
    for name, (module, group) in libraries.items():
        runner = case.make(module, group, size, rank, world)
        meet: Runner = lambda module=module, group=group: module.barrier(group=group)  # type: ignore[misc]  # noqa: E731
        runners[name] = runner, meet, _iterations(measure(runner, meet, 3), module, group)
    for number in range(rounds):
        order = list(libraries)
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order:
            times[name].append(measure(*runners[name]))
    return times


def _iterations(estimate_s: float, module: Any, group: Any) -> int:
    """How often to repeat; rank 0 decides for all."""
    import torch

    count = torch.tensor([max(2, min(MAX_ITERATIONS, int(TARGET_S / max(estimate_s, 1e-9))))])
    module.broadcast(count, 0, group=group)
    return int(count)


# ---- Open MPI, beside them


def measure_mpi(world: int, names: Sequence[str], sizes: Sequence[int]) -> dict[Key, float]:
    """The medians of mpi4py's buffer operations, from a run of their own; empty where there is no MPI."""
    launcher = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if launcher is None:
        return {}
    program = Path(__file__).with_name("_mpi_cases.py")
    command = [launcher, "--oversubscribe", "--allow-run-as-root", "-n", str(world), sys.executable, str(program)]
    done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=LIMIT_S * 5, check=False)
    if done.returncode:
        print(f"Open MPI was not measured: {done.stderr[-500:]}", file=sys.stderr)
        return {}
    rows = json.loads(done.stdout.splitlines()[-1])
    return {(world, name, size): seconds for name, size, seconds in rows if size in (*sizes, 0)}


# ---- the table


def make_lines(found: list[Row], mpi: dict[Key, float]) -> list[Line]:
    lines = []
    for world, name, size, times in found:
        gloo = statistics.median(times[GLOO])
        unit, scale = ("ms", 1e3) if gloo > 1e-3 else ("us", 1e6)
        cells = [name, str(world), name_of_size(size), unit, show(gloo * scale)]
        for kind in (OURS, TCP):
            mine = statistics.median(times[kind])
            limit = budget(name, size, world, kind == TCP)
            verdict = "" if limit is None else f"{limit:.2f}x {'yes' if mine / gloo <= limit else 'NO'}"
            cells += [show(mine * scale), f"{mine / gloo:.2f}x", verdict]
        known = mpi.get((world, name, size))
        lines.append((*cells, "" if known is None else show(known * scale)))
    return lines


HEAD: Line = (
    "operation", "ranks", "size", "unit", "Gloo", "ours", "ours/Gloo", "budget", "TCP only", "TCP/Gloo", "budget",
    "Open MPI",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument(
        "--world", type=int, action="append", help="number of ranks; may be repeated (default: 2, 4, 8)"
    )
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="may be repeated")
    parser.add_argument(
        "--max-bytes", type=int, default=SIZES[-1], help="leave larger sizes out (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--mpi", action="store_true", help="measure Open MPI as well, through mpi4py")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = arguments.only or [case.name for case in CASES]
    about = [
        *about_machine("rpcdist", "torch"),
        f"- every process has 1 OpenMP thread; medians of {arguments.rounds} alternating rounds, at rank 0",
    ]
    print("\n".join(about), flush=True)
    found = []
    mpi: dict[Key, float] = {}
    for world in arguments.world or [2, 4, 8]:
        # More ranks than cores: the small sizes show whether waiting degrades gently, the large ones only take time.
        limit = arguments.max_bytes if world <= 4 else min(arguments.max_bytes, 1 << 20)
        sizes = [size for size in SIZES if size <= limit]
        chosen = names if world <= 4 else [name for name in names if name in ("all_reduce", "barrier")]
        with tempfile.TemporaryDirectory() as folder:
            found += launch(run_rank, (world, folder, chosen, sizes, arguments.rounds), workers=world)[0]
        if arguments.mpi:
            mpi |= measure_mpi(world, chosen, sizes)
    lines = make_lines(found, mpi)
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("collectives.py", [*about, "", *table])
    return int(arguments.check and any(cell.endswith("NO") for line in lines for cell in line))


if __name__ == "__main__":
    sys.exit(main())
