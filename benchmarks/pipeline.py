"""$ python benchmarks/pipeline.py
Compares `rpcdist.parallel.pipeline` with what its schedule allows, and with `torch.distributed.pipelining` on Gloo.

A transformer is cut over two workers. Two pairs of processes live at the same time, one for each library, and run the
same model, micro-batches and schedule. In each round first one pair takes some steps and then the other, in changing
order, so that a machine that slows down slows down both; so do the measurements of single stages. The table shows
medians over the rounds.

The bound is the length of a step in which tensors would travel in no time. It comes from the schedule, executed on
paper with the times of a forward and a backward of each stage alone, without any pipeline, which both workers of our
pair measure at the same time: their cores share caches and memory in the pipeline, too. Every process has one thread
for computing. On a machine of two cores nothing is left for the threads that communicate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from _pairs import Pair, PairFailed, open_pair
from _report import RESULTS, layout, write_results
from rpc import describe_machine

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("worker0", "worker1")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # and the stages of each worker
BOUND_BUDGET = 0.9  # of the throughput that the schedule allows
TORCH_BUDGET = 0.95  # our time / torch's time
HEAD = (
    "schedule", "ours ms", "torch ms", "ours/torch", "in rounds", "bound ms", "of bound", "in rounds", "bubble", "ok",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The model and the batch."""

    width: int
    num_layers: int
    length: int
    batch: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"{self.num_layers} transformer layers of width {self.width}, {self.batch} sequences of {self.length} "
            f"tokens in {self.microbatches} micro-batches"
        )


# ---- the model; the workers import it from here


def make_stage(size: Size, num_stages: int, stage: int) -> nn.Module:
    """A part of the transformer: its share of the layers."""
    import torch
    from torch import nn

    torch.manual_seed(stage)
    layers = [
        nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(size.num_layers // num_stages)
    ]
    return nn.Sequential(*layers)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def make_batch(size: Size) -> tuple[Tensor, Tensor]:
    import torch

    torch.manual_seed(99)
    shape = (size.batch, size.length, size.width)
    return torch.randn(shape), torch.randn(shape)


# ---- what runs in the processes


class Peer:
    """One process of a pair; its public methods are the orders of the benchmark."""

    def __init__(self, rank: int, port: int, size: Size) -> None:
        self.rank = rank
        self.port = port
        self.size = size

    def start(self) -> None:
        import torch

        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        self.inputs, self.targets = make_batch(self.size)
        self.connect()

    def connect(self) -> None:
        raise NotImplementedError

    def prepare(self, schedule: str) -> None:
        raise NotImplementedError

    def take_step(self) -> object:
        raise NotImplementedError

    def steps(self, count: int) -> list[float]:
        """The seconds of each of some steps."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.take_step()
            times.append(time.perf_counter() - begin)
        return times


class OurPeer(Peer):
    """Rank 0 drives the pipeline and is its first worker."""

    def connect(self) -> None:
        import rpcdist.rpc as rpc

        rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2)

    def prepare(self, schedule: str) -> None:
        from rpcdist.parallel.pipeline import Pipeline

        self.num_stages = 2 * SCHEDULES[schedule]
        self.modules = [
            make_stage(self.size, self.num_stages, stage) for stage in range(self.rank, self.num_stages, len(NAMES))
        ]
        if self.rank == 0:
            stages = [partial(make_stage, self.size, self.num_stages, stage) for stage in range(self.num_stages)]
            self.pipe = Pipeline(
                stages, NAMES, schedule=schedule, num_microbatches=self.size.microbatches, loss_fn=loss_of
            )

    def take_step(self) -> object:
        return self.pipe.step(self.inputs, self.targets)

    def stage_times(self, repeats: int) -> list[tuple[float, float]]:
        """Median seconds of a forward and a backward of one micro-batch through each stage of this worker, alone."""
        return [self._time_stage(module, repeats) for module in self.modules]

    def _time_stage(self, module: nn.Module, repeats: int) -> tuple[float, float]:
        import torch

        parts = self.inputs.chunk(self.size.microbatches)
        gradient = torch.randn_like(parts[0])
        forwards, backwards = [], []
        for part in [*parts[:1], *list(parts) * repeats]:  # the first one warms up
            leaf = part.detach().requires_grad_()
            begin = time.perf_counter()
            output = module(leaf)
            middle = time.perf_counter()
            output.backward(gradient)
            forwards.append(middle - begin)
            backwards.append(time.perf_counter() - middle)
        return statistics.fmean(forwards[1:]), statistics.fmean(backwards[1:])

    def timeline(self) -> str:
        return repr(self.pipe.timeline)

    def draw(self, path: str) -> None:
        self.pipe.draw_timeline(path, f"{self.size}")

    def bound(self, times: dict[int, tuple[float, float]]) -> tuple[float, float]:
        """The length of a step in seconds that the schedule allows, and its bubble."""
        from rpcdist.parallel.pipeline import bubble, simulate

        forward_s, backward_s = zip(*(times[stage] for stage in range(self.num_stages)), strict=True)
        slots = simulate(self.pipe.schedule, forward_s, backward_s)
        return max(slot.end_s for slot in slots), bubble(slots, len(NAMES))

    def stop(self) -> None:
        import rpcdist.rpc as rpc

        if self.rank == 0:
            del self.pipe
        rpc.shutdown()


class TorchPeer(Peer):
    """Both ranks take the step together, as torch's schedules want it."""

    def connect(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def prepare(self, schedule: str) -> None:
        import torch
        from torch.distributed import pipelining

        num_stages = 2 * SCHEDULES[schedule]
        stages = [
            pipelining.PipelineStage(make_stage(self.size, num_stages, stage), stage, num_stages, torch.device("cpu"))
            for stage in range(self.rank, num_stages, len(NAMES))
        ]
        kinds: dict[str, Callable[..., Any]] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
        }
        whole = stages if schedule == "interleaved" else stages[0]
        self.schedule = kinds[schedule](whole, self.size.microbatches, loss_fn=loss_of)

    def take_step(self) -> object:
        if self.rank == 0:
            return self.schedule.step(self.inputs)
        return self.schedule.step(target=self.targets, losses=[])

    def stop(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


# ---- the benchmark's side


@dataclass
class Round:
    """Seconds of one round."""

    ours: float
    torch: float
    bound: float
    bubble: float


def measure(schedule: str, ours: Pair, torch: Pair, rounds: int, steps: int) -> list[Round]:
    """Alternates between the pairs, after steps that warm them up."""
    for pair in (ours, torch):
        pair.ask_both("prepare", schedule)
    ours.ask_first("steps", 2)
    torch.ask_both("steps", 2)
    found = []
    for number in range(rounds):
        times = dict[str, float]()
        order: list[tuple[str, Callable[[], list[float]]]] = [
            ("ours", lambda: ours.ask_first("steps", steps)),
            ("torch", lambda: torch.ask_both("steps", steps)[0]),
        ]
        for who, run in order if number % 2 == 0 else reversed(order):
            times[who] = statistics.median(run())
        bound, bubble = ours.ask_first("bound", stage_times(ours, schedule, steps))
        found.append(Round(times["ours"], times["torch"], bound, bubble))
    print(f"{schedule}: last step of ours: {ours.ask_first('timeline')}", flush=True)
    return found


def stage_times(ours: Pair, schedule: str, repeats: int) -> dict[int, tuple[float, float]]:
    """The times of every stage; both workers measure at the same time."""
    by_worker = ours.ask_both("stage_times", repeats)
    return {
        rank + len(NAMES) * local: times
        for rank, of_worker in enumerate(by_worker)
        for local, times in enumerate(of_worker)
    }


def make_line(schedule: str, found: Sequence[Round]) -> tuple[str, ...]:
    ratios = sorted(one.ours / one.torch for one in found)
    shares = sorted(one.bound / one.ours for one in found)
    ratio, share = statistics.median(ratios), statistics.median(shares)
    return (
        schedule,
        f"{1000 * statistics.median(one.ours for one in found):.1f}",
        f"{1000 * statistics.median(one.torch for one in found):.1f}",
        f"{ratio:.2f}x",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        f"{1000 * statistics.median(one.bound for one in found):.1f}",
        f"{share:.2f}",
        f"{shares[0]:.2f} to {shares[-1]:.2f}",
        f"{100 * statistics.median(one.bubble for one in found):.0f} %",
        "yes" if share >= BOUND_BUDGET and ratio <= TORCH_BUDGET else "NO",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, default=0, help="alternating rounds (default: 7, or 2 with --quick)")
    parser.add_argument("--steps", type=int, default=5, help="steps per round and library (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=list(SCHEDULES), help="this schedule; may be repeated")
    parser.add_argument("--width", type=int, default=256, help="of the transformer (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="per batch (default: %(default)s)")
    parser.add_argument("--draw", metavar="FILE", help="a Gantt picture of our last step")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a budget is not kept")
    arguments = parser.parse_args()
    if arguments.rounds < 0 or arguments.steps < 1 or arguments.microbatches < 2:
        parser.error("--rounds and --steps must be at least 1, --microbatches at least 2")
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 7)
    os.environ["OMP_NUM_THREADS"] = "1"  # the pairs inherit it
    if arguments.quick:
        size = Size(32, 4, 16, 2 * arguments.microbatches, arguments.microbatches)
    else:
        size = Size(arguments.width, 8, 64, 2 * arguments.microbatches, arguments.microbatches)
    try:
        return compare(arguments, size)
    except PairFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def compare(arguments: argparse.Namespace, size: Size) -> int:
    """Prints the table; returns the exit status."""
    measured = argparse.Namespace(
        pin=False, unsuspecting=False, torch_tcp=False, rounds=arguments.rounds, ours="rpcdist.parallel.pipeline"
    )
    about = describe_machine(measured)
    about = [line.replace("torch.distributed.rpc", "torch.distributed.pipelining on Gloo") for line in about]
    about.append(f"- {size}")
    print("\n".join(about), flush=True)
    lines = []
    with open_pair("rpcdist", OurPeer, size) as ours, open_pair("torch", TorchPeer, size) as torch:
        for schedule in arguments.only or SCHEDULES:
            lines.append(make_line(schedule, measure(schedule, ours, torch, arguments.rounds, arguments.steps)))
            if arguments.draw:
                ours.ask_first("draw", arguments.draw)
    table = layout(HEAD, lines)
    print("\n".join(["", *table]))
    if arguments.write:
        write_results("pipeline.py", [*about, "", *table])
    return int(arguments.check and any(line[-1] == "NO" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
