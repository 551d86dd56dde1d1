"""$ python benchmarks/elastic.py
How long `ElasticDataParallel` is without a rank that was killed: until the others go on, and until a new one trains.

Ranks of one machine train a small model. One after the other is killed by SIGKILL, and a new process is started in its
place. "The others": the longest time between two of their steps that count, with the kill between them. "The new
process": from the moment when it is up (Python, torch and the model are loaded) until its first step that counts, which
comes after it got model, optimizer and step from another rank.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path

from _report import RESULTS, about_machine, layout, show, write_results

BUDGET_S = 2.0
STEP_S = 0.005  # at least: the steps of so small a model would only load the cores
LIMIT_S = 60.0


def train(folder: Path, num_ranks: int, name: str) -> None:
    """The work of each process until it is killed."""
    import torch
    from torch import nn

    from rpcdist.collectives import FileStore
    from rpcdist.parallel import ElasticDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(module.parameters())
    store = FileStore(folder / "store", timeout=LIMIT_S)
    inputs, targets = torch.randn(32, 256), torch.randn(32, 10)
    model = ElasticDataParallel(module, optimizer, store, num_ranks=num_ranks)
    up_at = last_at = time.monotonic()
    longest_s, is_new = 0.0, True
    for step in model.steps(1_000_000):
        with step:
            nn.functional.mse_loss(model(inputs), targets).backward()
        if not step.counted:
            continue
        now = time.monotonic()
        if is_new:
            store.queue_push(f"trains {name}", f"{now - up_at}")
            is_new = False
        else:
            longest_s = max(longest_s, now - last_at)
        last_at = now
        if store.check([f"ask {name}"]):
            store.delete_key(f"ask {name}")
            store.queue_push(f"paused {name}", f"{longest_s}")
            longest_s = 0.0
        time.sleep(STEP_S)


def measure(num_ranks: int, kills: int, seed: int) -> tuple[list[float], list[float]]:
    """The pauses of the others, and the times until the new processes trained, in seconds."""
    from rpcdist.collectives import FileStore

    chance = random.Random(seed)
    pauses, joined = [], []
    living: dict[str, SpawnProcess] = {}
    with tempfile.TemporaryDirectory() as name, FileStore(Path(name) / "store", timeout=LIMIT_S) as store:

        def start(number: int) -> None:
            rank = f"process {number}"
            living[rank] = get_context("spawn").Process(target=train, args=(Path(name), num_ranks, rank))
            living[rank].start()

        def ask() -> float:
            for each in living:
                store.set(f"ask {each}", b"1")
            return max(float(store.queue_pop(f"paused {each}")) for each in living)

        try:
            for number in range(num_ranks):
                start(number)
            for each in list(living):
                store.queue_pop(f"trains {each}")
            for number in range(num_ranks, num_ranks + kills):
                ask()
                victim = chance.choice(sorted(living))
                living[victim].kill()
                living.pop(victim).join(LIMIT_S)
                pauses.append(ask())
                start(number)
                joined.append(float(store.queue_pop(f"trains process {number}")))
                print(f"kill {len(joined)}: {pauses[-1]:.2f} s, {joined[-1]:.2f} s", file=sys.stderr, flush=True)
        finally:
            for process in living.values():
                process.kill()
                process.join(LIMIT_S)
    return pauses, joined


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--ranks", type=int, action="append", help="may be repeated (default: 2, 4)")
    parser.add_argument("--kills", type=int, default=5, help="with each number of ranks (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="draws who is killed (default: 0)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when the budget is not kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    about = [
        *about_machine("rpcdist", "torch"),
        f"- {arguments.kills} kills, one after the other; 0.3 M parameters, Adam",
    ]
    print("\n".join(about), flush=True)
    lines, kept = [], True
    for num_ranks in arguments.ranks or (2, 4):
        pauses, joined = measure(num_ranks, arguments.kills, arguments.seed)
        cells = [show(number) for times in (pauses, joined) for number in (statistics.median(times), max(times))]
        good = max(joined) <= BUDGET_S
        kept = kept and good
        lines.append((str(num_ranks), *cells, show(BUDGET_S), "yes" if good else "NO"))
    head = ("ranks", "the others s", "longest", "the new process s", "longest", "budget", "ok")
    table = layout(head, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("elastic.py", [*about, "", *table])
    return int(arguments.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
