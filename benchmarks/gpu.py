"""$ python benchmarks/gpu.py
Compares calls with tensors on a GPU with torch's RPC, which hands memory of GPUs over by its channel `cuda_ipc`.

Two pairs of processes live at the same time, one for each library. The processes of a pair have a GPU each, or share
one if there is only one, or with `--one-gpu`. In each round first one pair measures a case and then the other, in
changing order. A time ends when the GPU of the caller is done. The rows of collectives, DDP and pipelines are of two
more pairs, whose processes form a group over NCCL; on one GPU, NCCL connects them by sockets.

The other tables decide what is worth building: a way of their own for small tensors, and NCCL for tensors that go
through host memory. Those transfers are over TCP and pinned memory, without shared memory, as between hosts. The last
lines compare one with its bound, the slowest of the copies and the connection.

A part that fails is reported, and the next one runs; each step of a pair has a limit of three minutes.
`--groups-on-cpu` runs only the rows of groups, without a GPU, to try their code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _gpu_groups import BUDGETS as GROUP_BUDGETS
from _gpu_groups import ECHOES, GroupPeer, NcclPeer, timed
from _pairs import Pair, free_port, open_pair
from _report import about_machine, layout

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("caller", "callee")
MIB = 1 << 20
BUDGETS = {
    "echo of 64 MiB": 1.0,
    "echo of 1 MiB": 0.8,
    "echo of 1 KiB": 0.8,
    "remote() and to_here(), 16 MiB": 0.8,
    "training step, half of the model on each": 0.8,
}
HEAD = ("what", "ours us", "torch us", "ours/torch", "in rounds", "budget", "ok")
SMALL_BUDGETS = {"echo of 1 KiB": 1.0, "echo of 16 KiB": 1.0}
SMALL_HEAD = ("what", "GPU to GPU us", "by the host us", "ratio", "in rounds", "limit", "suffices")
STAGED_BUDGETS = {"echo of 4 MiB": 1.5, "echo of 64 MiB": 1.5, "echo of 256 MiB": 1.5}
STAGED_HEAD = ("what", "staged us", "NCCL us", "staged/NCCL", "in rounds", "limit", "suffices")
STAGED_LIMIT = 1.3
"""Of an echo of 256 MiB through host memory: so many times its bound."""


# ---- what runs in the processes


def echo(tensor: Tensor) -> Tensor:
    return tensor


def make(size: int) -> Tensor:
    import torch

    return torch.ones(size // 4, device="cuda")


def make_half(seed: int) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers).to("cuda")


def parameters_of(rref: Any) -> list[Any]:
    rpc = importlib.import_module(os.environ["BENCHMARK_RPC"])
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def forward(rref: Any, hidden: Tensor) -> Tensor:
    result: Tensor = rref.local_value()(hidden)
    return result


class GpuPeer:
    """One process of a pair; its public methods are the orders of the benchmark.

    Args:
        module: of the RPC library.
        channels: see `RpcOptions`.
        connections: the value of `RPCDIST_CHANNELS`; with "tcp", the processes are connected as on two hosts.
        two_gpus: the callee has a GPU of its own.
    """

    def __init__(
        self, rank: int, port: int, module: str, channels: list[str] | None, connections: str, two_gpus: bool
    ) -> None:
        self.rank, self.port, self.module = rank, port, module
        self.channels, self.connections = channels, connections
        self.device, self.peer_device = (rank, 1 - rank) if two_gpus else (0, 0)

    def start(self) -> None:
        os.environ["BENCHMARK_RPC"] = self.module
        os.environ["RPCDIST_CHANNELS"] = self.connections
        import torch

        torch.cuda.set_device(self.device)
        self.rpc: Any = importlib.import_module(self.module)
        options = self.rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{self.port}", _channels=self.channels, num_worker_threads=16
        )
        options.set_device_map(NAMES[1 - self.rank], {self.device: self.peer_device})
        self.rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2, rpc_backend_options=options)
        self.measures: dict[str, Callable[[], float]] = {
            **{name: partial(self._echo, *size_and_count) for name, size_and_count in ECHOES.items()},
            "remote() and to_here(), 16 MiB": lambda: self._remote(16 * MIB, 50),
            "training step, half of the model on each": self._train,
        }

    def stop(self) -> None:
        self.rpc.shutdown()

    def measure(self, name: str) -> float:
        """Microseconds."""
        return self.measures[name]()

    def _echo(self, size: int, count: int) -> float:
        tensor = make(size)
        return timed(count, lambda: self.rpc.rpc_sync(NAMES[1], echo, (tensor,)))

    def _remote(self, size: int, count: int) -> float:
        return timed(count, lambda: self.rpc.remote(NAMES[1], make, (size,)).to_here())

    def _train(self) -> float:
        import torch

        is_torch = self.module.startswith("torch.")
        autograd: Any = importlib.import_module("torch.distributed.autograd" if is_torch else "rpcdist.autograd")
        optim: Any = importlib.import_module("torch.distributed.optim" if is_torch else "rpcdist.optim")
        rpc = self.rpc
        mine, theirs = make_half(1), rpc.remote(NAMES[1], make_half, (2,))
        rrefs = [rpc.RRef(parameter) for parameter in mine.parameters()]
        rrefs += rpc.rpc_sync(NAMES[1], parameters_of, (theirs,))
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.01)
        inputs, targets = torch.rand(256, 1024, device="cuda"), torch.rand(256, 1024, device="cuda")

        def step() -> None:
            with autograd.context() as context:
                output = rpc.rpc_sync(NAMES[1], forward, (theirs, mine(inputs)))
                loss = torch.nn.functional.mse_loss(output, targets)
                autograd.backward(context, [loss])
                optimizer.step(context)

        return timed(40, step)

    def bound(self, size: int) -> dict[str, float]:
        """Microseconds that the copies of a transfer take alone: to pinned memory, and from there."""
        import torch

        on_gpu = make(size)
        pinned = torch.empty(size // 4, pin_memory=True)
        return {
            "to the host": timed(5, lambda: pinned.copy_(on_gpu, non_blocking=True)),
            "from the host": timed(5, lambda: on_gpu.copy_(pinned, non_blocking=True)),
        }

    def host_echo(self, size: int) -> float:
        """Microseconds of the same echo with a tensor of the CPU."""
        import torch

        tensor = torch.ones(size // 4)
        return timed(3, lambda: self.rpc.rpc_sync(NAMES[1], echo, (tensor,)))


# ---- the table


def measured(pair: Pair, name: str) -> float:
    return float(pair.ask_first("measure", name))


def measured_together(num_steps: int, pair: Pair, name: str) -> float:
    pair.ask_both("prepare", name)
    return float(max(pair.ask_both("steps", num_steps)))


def measured_by_both(pair: Pair, name: str) -> float:
    return float(max(pair.ask_both("measure", name)))


def compare(
    ours: Pair,
    others: Pair,
    rounds: int,
    budgets: Mapping[str, float],
    measure: Callable[[Pair, str], float],
    measure_other: Callable[[Pair, str], float] | None = None,
) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    measure_other = measure_other or measure
    for name, budget in budgets.items():
        samples: list[tuple[float, float]] = []
        for number in range(rounds):
            if number % 2:
                other = measure_other(others, name)
                samples.append((measure(ours, name), other))
            else:
                mine = measure(ours, name)
                samples.append((mine, measure_other(others, name)))
        ratios = sorted(mine / other for mine, other in samples)
        ratio = statistics.median(ratios)
        lines.append(
            (
                name,
                f"{statistics.median(mine for mine, _ in samples):.0f}",
                f"{statistics.median(other for _, other in samples):.0f}",
                f"{ratio:.2f}x",
                f"{ratios[0]:.2f}..{ratios[-1]:.2f}",
                f"{budget:.2f}x",
                "yes" if ratio <= budget else "NO",
            )
        )
        print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    return lines


def compare_calls(two_gpus: bool, rounds: int) -> list[str]:
    with (
        open_pair("rpcdist", GpuPeer, "rpcdist.rpc", None, "auto", two_gpus) as ours,
        open_pair("torch", GpuPeer, "torch.distributed.rpc", None, "auto", two_gpus) as torchs,
    ):
        return layout(HEAD, compare(ours, torchs, rounds, BUDGETS, measured))


def compare_groups(devices: tuple[str, str], rounds: int) -> list[str]:
    with (
        open_pair("rpcdist", GroupPeer, free_port(), "rpcdist", devices) as ours,
        open_pair("torch", GroupPeer, free_port(), "torch", devices) as torchs,
    ):
        num_steps = 1 if "cpu" in devices else 20
        return layout(HEAD, compare(ours, torchs, rounds, GROUP_BUDGETS, partial(measured_together, num_steps)))


def compare_small(two_gpus: bool, rounds: int) -> list[str]:
    """Small tensors from GPU to GPU, and through memory that the processes of a host share."""
    with (
        open_pair("GPU to GPU", GpuPeer, "rpcdist.rpc", None, "auto", two_gpus) as direct,
        open_pair("by the host", GpuPeer, "rpcdist.rpc", ["basic"], "auto", two_gpus) as by_host,
    ):
        return layout(SMALL_HEAD, compare(direct, by_host, rounds, SMALL_BUDGETS, measured))


def compare_staged(two_gpus: bool, rounds: int) -> list[str]:
    """Tensors between hosts, and over NCCL alone; and what bounds the former."""
    size = 256 * MIB
    with open_pair("staged", GpuPeer, "rpcdist.rpc", ["basic"], "tcp", two_gpus) as staged:
        with open_pair("NCCL", NcclPeer, two_gpus) as nccl:
            nccl.ask_both("connect", nccl.ask_first("unique_id"))
            lines = layout(STAGED_HEAD, compare(staged, nccl, rounds, STAGED_BUDGETS, measured, measured_by_both))
        took = statistics.median(staged.ask_first("measure", "echo of 256 MiB") for _ in range(rounds))
        copies = staged.ask_first("bound", size)
        wire = statistics.median(staged.ask_first("host_echo", size) for _ in range(rounds))
    bound = max(wire, 2 * copies["to the host"], 2 * copies["from the host"])
    ok = "yes" if took <= STAGED_LIMIT * bound else "NO"
    return [
        *lines,
        "",
        f"through the host, echo of 256 MiB: {took:.0f} us; bound {bound:.0f} us: {took / bound:.2f}x; "
        f"budget {STAGED_LIMIT:.2f}x, {ok}",
        f"(of a CPU tensor {wire:.0f} us; copies {copies['to the host']:.0f}, {copies['from the host']:.0f} us)",
    ]


def about_gpus() -> list[str]:
    """The cards, the driver, and the versions of the libraries."""
    import torch

    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+[.\d]*", version.read_text()) if version.exists() else None
    cards = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        f"- GPUs: {', '.join(f'{count} x {name}' for name, count in cards.items())}; driver "
        f"{found.group() if found else 'unknown'}, CUDA {torch.version.cuda}, torch's NCCL {nccl}",
        *about_machine("rpcdist", "torch", "cupy-cuda12x", "cupy-cuda13x"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0].split("\n")[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-gpu", action="store_true", help="both processes of a pair share a GPU")
    parser.add_argument("--groups-on-cpu", action="store_true", help="only the rows of groups, on the CPU")
    options = parser.parse_args()
    import torch

    rounds = options.rounds
    if options.groups_on_cpu:
        print("\n".join(compare_groups(("cpu", "cpu"), rounds)))
        return 0
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a GPU that torch can use", file=sys.stderr)
        return 1
    print("\n".join(about_gpus()), flush=True)
    two = torch.cuda.device_count() > 1 and not options.one_gpu
    groups = "cuda:0", "cuda:1" if two else "cuda:0"
    failed = False
    for part in (
        partial(compare_calls, two),
        partial(compare_groups, groups),
        partial(compare_small, two),
        partial(compare_staged, two),
    ):
        try:
            lines = part(rounds)
        except Exception as exc:  # the machine may be lent for a short time: the other parts run
            failed, lines = True, [f"{part.func.__name__} failed: {exc}"]
        print("\n".join(["", *lines]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
