"""$ python benchmarks/gpu.py
Compares calls with tensors on a GPU with torch's RPC, which hands memory of GPUs over by its channel `cuda_ipc`.

Two pairs of processes live at the same time and share one GPU (or have one each, with `--two-gpus`), one for each
library. In each round first one pair measures a case and then the other, in changing order. A time ends when the GPU of
the caller is done. The rows of collectives, DDP and pipelines are of two more pairs, whose processes form a group over
NCCL; on one GPU, NCCL connects them by sockets. The last lines have the same transfers as between hosts, over TCP and
through pinned memory, without shared memory; the bound is the slowest of the copies and the connection.
`--groups-on-cpu` runs only the rows of groups, without a GPU, to try their code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _gpu_groups import BUDGETS as GROUP_BUDGETS
from _gpu_groups import GroupPeer
from _pairs import Pair, free_port, open_pair
from _report import layout

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("caller", "callee")
KIB, MIB = 1 << 10, 1 << 20
BUDGETS = {
    "echo of 64 MiB": 1.0,
    "echo of 1 MiB": 0.8,
    "echo of 1 KiB": 0.8,
    "remote() and to_here(), 16 MiB": 0.8,
    "training step, half of the model on each": 0.8,
}
HEAD = ("what", "ours us", "torch us", "ours/torch", "in rounds", "budget", "ok")


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
        channels: see `RpcOptions`; if they are given, the processes are connected as on two hosts.
        two_gpus: the callee has a GPU of its own.
    """

    def __init__(self, rank: int, port: int, module: str, channels: list[str] | None, two_gpus: bool) -> None:
        self.rank, self.port, self.module, self.channels = rank, port, module, channels
        self.device, self.peer_device = (rank, 1 - rank) if two_gpus else (0, 0)

    def start(self) -> None:
        os.environ["BENCHMARK_RPC"] = self.module
        if self.channels is not None:
            os.environ["RPCDIST_CHANNELS"] = "tcp"
        import torch

        torch.cuda.set_device(self.device)
        self.rpc: Any = importlib.import_module(self.module)
        options = self.rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{self.port}", _channels=self.channels, num_worker_threads=16
        )
        options.set_device_map(NAMES[1 - self.rank], {self.device: self.peer_device})
        self.rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2, rpc_backend_options=options)
        self.measures: dict[str, Callable[[], float]] = {
            "echo of 64 MiB": lambda: self._echo(64 * MIB, 30),
            "echo of 256 MiB": lambda: self._echo(256 * MIB, 3),
            "echo of 1 MiB": lambda: self._echo(MIB, 200),
            "echo of 1 KiB": lambda: self._echo(KIB, 300),
            "remote() and to_here(), 16 MiB": lambda: self._remote(16 * MIB, 50),
            "training step, half of the model on each": self._train,
        }

    def stop(self) -> None:
        self.rpc.shutdown()

    def measure(self, name: str) -> float:
        """Microseconds."""
        return self.measures[name]()

    def _timed(self, count: int, act: Callable[[], object]) -> float:
        import torch

        for _ in range(3):
            act()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            act()
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count * 1e6

    def _echo(self, size: int, count: int) -> float:
        tensor = make(size)
        return self._timed(count, lambda: self.rpc.rpc_sync(NAMES[1], echo, (tensor,)))

    def _remote(self, size: int, count: int) -> float:
        return self._timed(count, lambda: self.rpc.remote(NAMES[1], make, (size,)).to_here())

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

        return self._timed(40, step)

    def bound(self, size: int) -> dict[str, float]:
        """Microseconds that the copies of a transfer take alone: to pinned memory, and from there."""
        import torch

        on_gpu = make(size)
        pinned = torch.empty(size // 4, pin_memory=True)
        return {
            "to the host": self._timed(5, lambda: pinned.copy_(on_gpu, non_blocking=True)),
            "from the host": self._timed(5, lambda: on_gpu.copy_(pinned, non_blocking=True)),
        }

    def host_echo(self, size: int) -> float:
        """Microseconds of the same echo with a tensor of the CPU."""
        import torch

        tensor = torch.ones(size // 4)
        return self._timed(3, lambda: self.rpc.rpc_sync(NAMES[1], echo, (tensor,)))


# ---- the table


def measured(pair: Pair, name: str) -> float:
    return float(pair.ask_first("measure", name))


def measured_together(num_steps: int, pair: Pair, name: str) -> float:
    pair.ask_both("prepare", name)
    return float(max(pair.ask_both("steps", num_steps)))


def compare(
    ours: Pair, torchs: Pair, rounds: int, budgets: Mapping[str, float], measure: Callable[[Pair, str], float]
) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, budget in budgets.items():
        samples: list[tuple[float, float]] = []
        for number in range(rounds):
            if number % 2:
                other = measure(torchs, name)
                samples.append((measure(ours, name), other))
            else:
                mine = measure(ours, name)
                samples.append((mine, measure(torchs, name)))
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


def compare_groups(devices: tuple[str, str], rounds: int) -> list[tuple[str, ...]]:
    with (
        open_pair("rpcdist", GroupPeer, free_port(), "rpcdist", devices) as ours,
        open_pair("torch", GroupPeer, free_port(), "torch", devices) as torchs,
    ):
        num_steps = 1 if "cpu" in devices else 20
        return compare(ours, torchs, rounds, GROUP_BUDGETS, partial(measured_together, num_steps))


def driver() -> str:
    """The version of NVIDIA's driver."""
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+[.\d]*", version.read_text()) if version.exists() else None
    return found.group() if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0].split("\n")[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--two-gpus", action="store_true", help="the callee has a GPU of its own")
    parser.add_argument("--groups-on-cpu", action="store_true", help="only the rows of groups, on the CPU")
    options = parser.parse_args()
    import torch

    if options.groups_on_cpu:
        print("\n".join(layout(HEAD, compare_groups(("cpu", "cpu"), options.rounds))))
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU that torch can use")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver()}")
    print()
    two = options.two_gpus
    with (
        open_pair("rpcdist", GpuPeer, "rpcdist.rpc", None, two) as ours,
        open_pair("torch", GpuPeer, "torch.distributed.rpc", None, two) as torchs,
    ):
        lines = compare(ours, torchs, options.rounds, BUDGETS, measured)
    lines += compare_groups(("cuda:0", "cuda:1" if two else "cuda:0"), options.rounds)
    print("\n".join(layout(HEAD, lines)))
    with open_pair("staged", GpuPeer, "rpcdist.rpc", ["basic"], two) as staged:
        size = 256 * MIB
        took = statistics.median(staged.ask_first("measure", "echo of 256 MiB") for _ in range(options.rounds))
        copies = staged.ask_first("bound", size)
        wire = statistics.median(staged.ask_first("host_echo", size) for _ in range(options.rounds))
        bound = max(wire, 2 * copies["to the host"], 2 * copies["from the host"])
        print(f"\nthrough the host, echo of 256 MiB: {took:.0f} us; bound {bound:.0f} us: {took / bound:.2f}x")
        print(f"(of a CPU tensor {wire:.0f} us; copies {copies['to the host']:.0f}, {copies['from the host']:.0f} us)")


if __name__ == "__main__":
    main()
