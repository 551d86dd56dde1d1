"""Run under `--compat`: who finds which names, and what is refused. Prints `all as it should be` at the end."""

import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from import_forms import check_imports
from names_of_clients import check_clients
from torch.distributed import all_reduce, rpc
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer, PostLocalSGDOptimizer, ZeroRedundancyOptimizer

OURS = (all_reduce, Join, PeriodicModelAverager, RemoteModule, DistributedOptimizer, PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer, torch.nn.SyncBatchNorm, torch.nn.parallel.DistributedDataParallel,
        torch.utils.data.distributed.DistributedSampler, dist.distributed_c10d.all_reduce, dist.TCPStore,
        dist.device_mesh.init_device_mesh, dist.nn.functional.all_reduce, rpc.rpc_sync)  # fmt: skip


def check(true: bool, text: str) -> None:
    if not true:
        sys.exit(text)


def check_names() -> None:
    for found in OURS:
        check(found.__module__.startswith("rpcdist."), f"{found} is not ours")
    check(import_module("torch.distributed.rpc.functions").__name__ == "rpcdist.rpc.functions", "a module below")
    adapters = import_module("rpcdist.collectives.torch_backend").torch_distributed
    theirs = eval("torch.distributed.Store", {"torch": torch, "__name__": "torch.somewhere"})
    check(theirs.__module__.startswith("torch."), "torch's own code finds ours")
    check(adapters is torch.distributed and dist.Store is not theirs, "the adapters need torch's module")


def check_refusals() -> None:
    pipelining = import_module("torch.distributed.pipelining")
    try:
        pipelining.PipelineStage(torch.nn.Linear(1, 1), 0, 1, torch.device("cpu"))
        sys.exit("there is a stage of torch's")
    except RuntimeError as error:
        check("rpcdist.parallel.Pipeline" in str(error), str(error))
    try:
        eval("torch.distributed.distributed_c10d._get_default_group()", {"torch": torch, "__name__": "torch.somewhere"})
        sys.exit("there is a default group of torch's")
    except RuntimeError as error:
        check("without compat" in str(error), str(error))
    try:
        dist.distributed_c10d._get_default_group()
        sys.exit("there is a default group of ours")
    except ValueError as error:
        check("has not been initialized" in str(error), str(error))
    try:
        import_module("torch.distributed.rpc.server_process_global_profiler").anything  # noqa: B018
        sys.exit("the profiler of servers has something")
    except AttributeError as error:
        check("torch.profiler" in str(error), str(error))
    try:
        import_module("torch.distributed.rpc.nothing")
        sys.exit("rpc.nothing was imported")
    except ImportError as error:
        check("rpcdist.rpc.nothing" in str(error), str(error))


if __name__ == "__main__":
    check(sys.argv[1:] == ["--flag", "value"], f"arguments: {sys.argv}")
    check_names()
    check_imports()
    check_refusals()
    check_clients((Path(__file__).parents[2] / "docs" / "coming_from_torch.md").read_text())
    print("all as it should be")
