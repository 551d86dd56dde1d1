"""The cases of benchmarks/gpu.py in which two processes act together: collectives, DDP, pipelines, and NCCL alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["BUDGETS", "ECHOES", "GroupPeer", "NcclPeer", "timed"]

NAMES = ("worker0", "worker1")
NUM_MICROBATCHES = 4
KIB, MIB = 1 << 10, 1 << 20
UINT8 = 1  # as NCCL numbers the types
WIDTH = 1024
BUDGETS = {
    "all_reduce of 4 KiB": 1.0,
    "all_reduce of 64 MiB": 1.0,
    "DDP step, 12 layers of 512 x 512": 1.0,
    "pipeline, 4 micro-batches of 4 MiB": 1.05,
}
ECHOES = {
    "echo of 1 KiB": (KIB, 300),
    "echo of 16 KiB": (16 * KIB, 300),
    "echo of 1 MiB": (MIB, 200),
    "echo of 4 MiB": (4 * MIB, 100),
    "echo of 64 MiB": (64 * MIB, 30),
    "echo of 256 MiB": (256 * MIB, 3),
}
"""The size in bytes, and the number of times in a round."""


def timed(count: int, act: Callable[[], object]) -> float:
    """Microseconds."""
    import torch

    for _ in range(3):
        act()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        act()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e6


class NcclPeer:
    """One process of a pair that NCCL connects, without a library around it."""

    def __init__(self, rank: int, port: int, two_gpus: bool) -> None:
        self.rank, self.two_gpus = rank, two_gpus

    def start(self) -> None:
        if not self.two_gpus:  # NCCL refuses two ranks of one host on one GPU
            os.environ.update(NCCL_HOSTID=f"host {self.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        import torch

        from rpcdist.collectives._nccl.communicator_calls import CudaRuntime

        self.device = torch.device("cuda", self.rank if self.two_gpus else 0)
        torch.cuda.set_device(self.device)
        self.nccl = CudaRuntime(self.device)

    def unique_id(self) -> bytes:
        return self.nccl.unique_id()

    def connect(self, unique_id: bytes) -> None:
        self.communicator = self.nccl.connect(2, unique_id, self.rank)

    def measure(self, name: str) -> float:
        """Microseconds; both processes measure at the same time."""
        import torch

        size, count = ECHOES[name]
        memory = torch.ones(size, dtype=torch.uint8, device=self.device)
        peer, stream = 1 - self.rank, torch.cuda.current_stream().cuda_stream
        steps = [self.communicator.send, self.communicator.recv]

        def echo() -> None:
            for step in steps if self.rank == 0 else reversed(steps):
                step(memory.data_ptr(), size, UINT8, peer, stream)

        return timed(count, echo)

    def stop(self) -> None:
        self.communicator.destroy()


def make_stage(seed: int) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])


def first_stage() -> nn.Module:
    return make_stage(1)


def last_stage() -> nn.Module:
    return make_stage(2)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


class GroupPeer:
    """One process of a pair; its public methods are the orders of the benchmark, which go to both processes.

    Args:
        rpc_port: for rpcdist's pipeline, which needs RPC in addition to the group.
        library: "rpcdist" or "torch".
        devices: of the two processes.
    """

    def __init__(self, rank: int, port: int, rpc_port: int, library: str, devices: tuple[str, str]) -> None:
        self.rank, self.port, self.rpc_port = rank, port, rpc_port
        self.is_torch = library == "torch"
        self.devices = devices

    def start(self) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), RANK=str(self.rank), WORLD_SIZE="2")
        if self.devices[0] == self.devices[1]:  # NCCL refuses two ranks of one host on one GPU
            os.environ.update(NCCL_HOSTID=f"host {self.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        import torch

        self.device = torch.device(self.devices[self.rank])
        self.is_cuda = self.device.type == "cuda"
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        if self.is_torch:
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            self.dist: Any = dist
            self.wrapper: Any = DistributedDataParallel
        else:
            from rpcdist import collectives, parallel, rpc

            self.dist, self.wrapper = collectives, parallel.DistributedDataParallel
            options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{self.rpc_port}")
            rpc.init_rpc(NAMES[self.rank], rank=self.rank, world_size=2, rpc_backend_options=options)
        self.dist.init_process_group("nccl" if self.is_cuda else "gloo")
        self.acts: dict[str, Callable[[], Callable[[], object] | None]] = {
            "all_reduce of 4 KiB": lambda: self._all_reduce(4 << 10),
            "all_reduce of 64 MiB": lambda: self._all_reduce(64 << 20),
            "DDP step, 12 layers of 512 x 512": self._ddp,
            "pipeline, 4 micro-batches of 4 MiB": self._torch_pipeline if self.is_torch else self._our_pipeline,
        }

    def prepare(self, name: str) -> None:
        """Makes what a case needs, and warms up."""
        self.act = self.acts[name]()
        self.steps(1)

    def steps(self, count: int) -> float:
        """Microseconds of each; 0 on a process that has nothing to do by itself."""
        if self.act is None:
            return 0.0
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self.act()
            self._synchronize()
        return (time.perf_counter() - begin) / count * 1e6

    def _synchronize(self) -> None:
        import torch

        if self.is_cuda:
            torch.cuda.synchronize()

    def _all_reduce(self, size: int) -> Callable[[], object]:
        import torch

        tensor = torch.ones(size // 4, device=self.device)
        return lambda: self.dist.all_reduce(tensor)

    def _ddp(self) -> Callable[[], object]:
        import torch
        from torch import nn

        torch.manual_seed(1)
        model = self.wrapper(nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)]).to(self.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.rand(64, 512, device=self.device)

        def step() -> None:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _batch(self) -> tuple[Tensor, Tensor]:
        import torch

        shape = NUM_MICROBATCHES * (4 << 20) // 4 // WIDTH, WIDTH  # float32
        return torch.rand(shape), torch.rand(shape)

    def _our_pipeline(self) -> Callable[[], object] | None:
        from rpcdist.parallel.pipeline import Pipeline

        if self.rank:
            return None
        inputs, targets = self._batch()
        pipe = Pipeline(
            [first_stage, last_stage], NAMES, schedule="gpipe", num_microbatches=NUM_MICROBATCHES, loss_fn=loss_of,
            devices=list(self.devices),
        )  # fmt: skip
        return lambda: pipe.step(inputs, targets)

    def _torch_pipeline(self) -> Callable[[], object]:
        from torch.distributed import pipelining

        stage = pipelining.PipelineStage(make_stage(self.rank + 1).to(self.device), self.rank, 2, self.device)
        schedule = pipelining.ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=loss_of)
        inputs, targets = self._batch()
        if self.rank:  # our driver, too, has the batch on the CPU
            return lambda: schedule.step(target=targets.to(self.device), losses=[])
        return lambda: schedule.step(inputs.to(self.device))

    def stop(self) -> None:
        self.act = None
        self.acts.clear()
        if not self.is_torch:
            from rpcdist import rpc

            rpc.shutdown()
        self.dist.destroy_process_group()
