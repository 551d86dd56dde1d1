"""$ python benchmarks/slow_link.py
Training steps of `DistributedDataParallel` on a link of 1 Gbit/s, with each communication hook: time and bytes.

Two network namespaces play two hosts, and a pair of virtual interfaces is their cable, which `tc` limits in both
directions; that takes root and iproute2. There is one rank on each, with one thread for computing. All hooks train the
same model on the same data, in rounds in which each has its turn; the table shows medians over the rounds. Bytes are
those that left the interface of rank 0 in a step, headers included, as the kernel counts them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from _hosts import ADDRESSES, NETWORK, device_of, enter, two_hosts
from _pairs import Pair, PairFailed, open_pair
from _report import RESULTS, Line, about_machine, layout, show, write_results
from _training import Training, make_mlp, slower

HOOKS = (
    "none",
    "bf16_compress_hook",
    "quantization_pertensor_hook",
    "powerSGD_hook, rank 1",
    "powerSGD_hook, rank 4",
    "noop_hook",
)
COMPRESSING = HOOKS[1:-1]  # all of them must be faster than none
SHAPE = (32, 512)
HEAD: Line = ("communication hook", "step ms", "of none", "in single rounds", "sent MiB", "of none", "budget", "ok")


class Peer:
    """One rank on its host. Its public methods are the orders."""

    def __init__(self, rank: int, port: int, namespaces: tuple[str, str]) -> None:
        self.rank = rank
        self.port = port
        self.device = device_of(namespaces[rank])
        enter(namespaces[rank])
        self.trainings: dict[str, Training] = {}

    def start(self) -> None:
        import torch

        from rpcdist import collectives
        from rpcdist.collectives.tcp import TcpOptions

        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        # The namespaces share memory, which hosts do not. Encryption is left out: on two cores it would be measured.
        os.environ["RPCDIST_TRUSTED_NETWORKS"] = NETWORK
        collectives.init_process_group("tcp", pg_options=TcpOptions(shared_memory=False))
        collectives.barrier()

    def prepare(self, hook: str) -> None:
        """Makes the model and warms up."""
        from rpcdist.parallel import DistributedDataParallel, comm_hooks

        def wrap(module: Any) -> DistributedDataParallel:
            model = DistributedDataParallel(module)
            name, _, rank = hook.partition(", rank ")
            if name == "powerSGD_hook":
                state: Any = comm_hooks.PowerSGDState(matrix_approximation_rank=int(rank), start_powerSGD_iter=2)
                model.register_comm_hook(state, comm_hooks.powerSGD_hook)
            elif name != "none":
                model.register_comm_hook(None, getattr(comm_hooks, name))
            return model

        self.trainings[hook] = Training(make_mlp, wrap, SHAPE, self.rank)

    def steps(self, hook: str, count: int) -> tuple[float, float]:
        """The median seconds of some steps, and the bytes that this rank sent in each."""
        before = self._sent_bytes()
        seconds, _ = self.trainings[hook].time_steps(count)
        return seconds, (self._sent_bytes() - before) / (count + 1)

    def _sent_bytes(self) -> int:
        line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if self.device in line)
        return int(line.partition(":")[2].split()[8])

    def stop(self) -> None:
        from rpcdist import collectives

        collectives.destroy_process_group()


def measure(pair: Pair, rounds: int, count: int) -> list[Line]:
    for hook in HOOKS:
        print(f"preparing {hook} ...", file=sys.stderr, flush=True)
        pair.ask_both("prepare", hook)
    times: dict[str, list[float]] = {hook: [] for hook in HOOKS}
    sent: dict[str, float] = {}
    for number in range(rounds):
        for hook in HOOKS if number % 2 == 0 else HOOKS[::-1]:
            answers = pair.ask_both("steps", hook, count)
            times[hook].append(slower(answers)[0])
            sent[hook] = answers[0][1]
    return [make_line(hook, times[hook], times["none"], sent[hook], sent["none"]) for hook in HOOKS]


def make_line(hook: str, times: list[float], of_none: list[float], sent: float, sent_by_none: float) -> Line:
    ratios = sorted(one / other for one, other in zip(times, of_none, strict=True))
    ratio = statistics.median(ratios)
    judged = hook in COMPRESSING
    return (
        hook,
        show(statistics.median(times) * 1e3),
        f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        show(sent * 2**-20),
        f"{sent / sent_by_none:.2f}x",
        "less than 1x" if judged else "",
        "" if not judged else "yes" if ratio < 1 else "NO",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="rounds (default: 5, or 1 with --quick)")
    parser.add_argument("--steps", type=int, help="of each hook in a round (default: 5, or 2 with --quick)")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it (default: 1gbit)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    count = arguments.steps or (2 if arguments.quick else 5)
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    about = [
        *about_machine("rpcdist", "torch"),
        f"- 2 ranks, a link of {arguments.rate}, 1 thread each; an MLP of 10.5 M parameters, 32 rows a rank",
        f"- medians of {rounds} rounds of {count} steps",
    ]
    print("\n".join(about), flush=True)
    try:
        with two_hosts(arguments.rate) as namespaces, open_pair("rpcdist", Peer, namespaces) as pair:
            lines = measure(pair, rounds, count)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("slow_link.py", [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
