"""The models of the benchmarks of data parallelism, the timing of their steps, their command line and their tables."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from _pairs import PairFailed
from _report import RESULTS, Line, about_machine, layout, show, write_results

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "HEAD",
    "Training",
    "begin",
    "compared",
    "finish",
    "make_mlp",
    "make_transformer",
    "run_benchmark",
    "slower",
]

HEAD: Line = ("model", "what", "unit", "ours", "torch", "ours/torch", "in single rounds", "budget", "ok")


def make_mlp() -> nn.Module:
    """10.5 million parameters in four layers."""
    from torch import nn

    sizes = (512, 2048, 2048, 2048, 512)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_transformer() -> nn.Module:
    """3.2 million parameters in four layers."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class Training:
    """A model that is trained by SGD on one batch.

    Args:
        make: the model.
        wrap: makes it parallel.
        shape: of this rank's batch.
        seed: of the batch.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], nn.Module],
        shape: tuple[int, ...],
        seed: int,
    ) -> None:
        import torch

        torch.manual_seed(0)
        self.model = wrap(make())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        torch.manual_seed(seed)
        self.inputs = torch.randn(shape)
        for _ in range(4):  # buckets are rebuilt after the first step
            self.step()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def time_steps(self, count: int, context: AbstractContextManager[Any] | None = None) -> tuple[float, float]:
        """The median seconds of some steps, and of processor time in them."""
        self.step()
        times, busy = [], []
        with context or nullcontext():
            for _ in range(count):
                begin, busy_begin = time.perf_counter(), time.process_time()
                self.step()
                times.append(time.perf_counter() - begin)
                busy.append(time.process_time() - busy_begin)
        return statistics.median(times), statistics.median(busy)


def slower(answers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of both ranks, the longer time and the longer processor time."""
    times, busy = zip(*answers, strict=True)
    return max(times), max(busy)


def compared(name: str, what: str, unit: str, rounds: list[list[float]], scale: float, budget: float | None) -> Line:
    """The table's line for what was measured as [ours, torch] in each round."""
    ours, torch = (statistics.median(values) * scale for values in zip(*rounds, strict=True))
    ratios = sorted(mine / peers for mine, peers in rounds)
    ratio = statistics.median(ratios)
    return (
        name,
        what,
        unit,
        show(ours),
        show(torch),
        f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        "" if budget is None else f"at most {budget:g}x",
        "" if budget is None else "yes" if ratio <= budget else "NO",
    )


def begin(arguments: argparse.Namespace, peers: str) -> list[str]:
    """Prints and returns where and with what is measured; `peers` says what is compared."""
    about = [
        *about_machine("rpcdist", "torch"),
        f"- 2 pairs of 2 processes on this host, 1 thread each; medians of {arguments.rounds} alternating rounds of "
        f"{arguments.steps} steps",
        peers,
    ]
    print("\n".join(about), flush=True)
    return about


def finish(program: str, arguments: argparse.Namespace, about: Sequence[str], lines: Sequence[Line]) -> int:
    """Prints the table, and writes it if asked to; returns the exit status."""
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results(program, [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


def run_benchmark(compare: Callable[[argparse.Namespace], int], cases: Sequence[str], text: str) -> int:
    """Reads the command line and compares; returns the exit status.

    Args:
        compare: takes `rounds`, `steps`, `only` (some of the cases), `write` and `check`.
        cases: what can be compared.
        text: the documentation of the program.
    """
    parser = argparse.ArgumentParser(description=text.partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="alternating rounds (default: 9, or 2 with --quick)")
    parser.add_argument("--steps", type=int, help="of each round (default: 15, or 3 with --quick)")
    parser.add_argument("--only", action="append", choices=cases, help="this case; may be given several times")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 9)
    arguments.steps = arguments.steps or (3 if arguments.quick else 15)
    arguments.only = arguments.only or list(cases)
    os.environ["OMP_NUM_THREADS"] = "1"  # the pairs inherit it
    try:
        return compare(arguments)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
