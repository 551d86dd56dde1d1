"""$ python benchmarks/torch_engines.py
Compares torch's own DDP, FSDP2 and tensor parallelism on our backend with the same on Gloo.

Two pairs of processes live at the same time, one for each backend, with the same models and data. In each round first
one pair takes some steps and then the other, in changing order; the table shows medians over the rounds. A step is
forward, backward and a step of SGD, with all that the engine communicates in them. Every process has one thread for
computing. `tests/torch_engines` has the proof that the numbers are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _pairs import Pair, open_pair
from _report import Line
from _training import Training, begin, compared, finish, make_mlp, make_transformer, run_benchmark, slower

if TYPE_CHECKING:
    from torch import nn

BACKENDS = ("rpcdist", "gloo")
BUDGET = 0.9


def data_parallel(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    """Each layer by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    layers: Any = getattr(model, "layers", model)
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def cut_by_tensors(model: nn.Module) -> nn.Module:
    """The first linear layer by columns, the next one by rows, and so on."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    turns = itertools.cycle((ColwiseParallel, RowwiseParallel))
    styles: dict[str, Any] = {name: style() for name, style in zip(names, turns, strict=False)}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), styles)


@dataclass(frozen=True)
class Case:
    """An engine, and what it trains.

    Attributes:
        name: for the table.
        make: the model.
        wrap: the engine.
        shape: of one rank's batch.
    """

    name: str
    make: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    shape: tuple[int, ...]


MLP, TRANSFORMER = (32, 512), (1, 32, 256)
CASES = {
    "ddp-mlp": Case("DDP, MLP of 10.5 M parameters", make_mlp, data_parallel, MLP),
    "ddp-transformer": Case("DDP, transformer of 3.2 M parameters", make_transformer, data_parallel, TRANSFORMER),
    "fsdp-mlp": Case("FSDP2, MLP of 10.5 M parameters", make_mlp, fully_sharded, MLP),
    "fsdp-transformer": Case("FSDP2, transformer of 3.2 M parameters", make_transformer, fully_sharded, TRANSFORMER),
    "tp-mlp": Case("TP, MLP of 10.5 M parameters", make_mlp, cut_by_tensors, MLP),
}


class Peer:
    """One rank on one backend. Its public methods are the orders."""

    def __init__(self, rank: int, port: int, backend: str) -> None:
        self.rank = rank
        self.port = port
        self.backend = backend

    def start(self) -> None:
        import torch
        import torch.distributed as dist

        if self.backend == "rpcdist":
            import rpcdist.collectives.torch_backend  # noqa: F401  # registers it
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        dist.init_process_group(self.backend)
        dist.barrier()

    def prepare(self, name: str) -> None:
        """Makes the model and warms up."""
        case = CASES[name]
        self.training = Training(case.make, case.wrap, case.shape, self.rank)

    def steps(self, count: int) -> tuple[float, float]:
        return self.training.time_steps(count)

    def stop(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def measure(name: str, pairs: list[Pair], rounds: int, count: int) -> list[Line]:
    """Alternates between the backends."""
    for pair in pairs:
        pair.ask_both("prepare", name)
    steps: list[list[float]] = []
    busy: list[list[float]] = []
    for number in range(rounds):
        order = pairs if number % 2 == 0 else pairs[::-1]
        times = {pair.name: slower(pair.ask_both("steps", count)) for pair in order}
        steps.append([times[backend][0] for backend in BACKENDS])
        busy.append([times[backend][1] for backend in BACKENDS])
    return [
        compared(CASES[name].name, "training step", "ms", steps, 1e3, BUDGET),
        compared(CASES[name].name, "its processor time", "ms", busy, 1e3, None),
    ]


def compare(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status."""
    about = begin(arguments, '- ours is torch\'s engine on `init_process_group("rpcdist")`, torch is the same on Gloo')
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(open_pair(backend, Peer, backend)) for backend in BACKENDS]
        for name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            lines += measure(name, pairs, arguments.rounds, arguments.steps)
    return finish("torch_engines.py", arguments, about, lines)


def main() -> int:
    return run_benchmark(compare, list(CASES), __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
