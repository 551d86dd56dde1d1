"""Run under `--compat`: the names that modules find, and those that are refused. Prints `all as it should be` at the
end.
"""

import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from import_forms import check_imports
from names_of_clients import check_clients
from torch.distributed import all_reduce, rpc
from torch.distributed.algorithms import Join
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
    replicated = import_module("torch.distributed._composable.replicate").replicate(torch.nn.Linear(1, 1))
    default_group = eval("torch.distributed.distributed_c10d._get_default_group", {"torch": torch, "__name__": "torch"})
    for needs_group in (
        default_group,
        lambda: replicated(torch.ones(1)),
    ):  # torch's DDP has the function under its name
        try:
            needs_group()
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


def check_replacements() -> None:
    """A program's mock or wrapper takes the place of a name, and torch's own code does not see it."""
    real: object = dist.all_reduce
    seen: list[object] = []
    theirs = eval("torch.distributed.all_reduce", {"torch": torch, "__name__": "torch.somewhere"})
    with mock.patch("torch.distributed.all_reduce", seen.append):
        dist.all_reduce(1)
        from torch.distributed import all_reduce as imported

        imported(2)
        check(dist.distributed_c10d.all_reduce is real, "another module is replaced, too")
        check(
            eval("torch.distributed.all_reduce", {"torch": torch, "__name__": "torch.somewhere"}) is theirs,
            "torch's own code sees a mock",
        )
    check(seen == [1, 2], f"the mock was called with {seen}")
    check(dist.all_reduce is real, "the mock stays")
    check(vars(dist)["all_reduce"] is real and dict(vars(dist))["all_reduce"] is real, "vars() has torch's own")
    check(pickle.loads(b"ctorch.distributed.distributed_c10d\nall_reduce\n.") is real, "pickle finds torch's own")
    starred: dict[str, object] = {}
    exec("from torch.distributed import *", starred)
    check(starred["all_reduce"] is real, "a starred import brings torch's own")
    vars(dist).update(all_reduce=seen.append, of_the_program=1)
    check(dist.all_reduce == seen.append and vars(dist).pop("of_the_program") == 1, "what vars() was given is lost")
    check(not hasattr(dist, "of_the_program"), "what vars() gave up stays")
    vars(dist)["all_reduce"] = real
    check(dist.all_reduce is real and "all_reduce" in dir(dist), "a name stays replaced")
    parallel: Any = torch.nn.parallel
    ours = parallel.DistributedDataParallel
    parallel.DistributedDataParallel = type("Own", (ours,), {})
    check(parallel.DistributedDataParallel.__name__ == "Own", "a class is not replaced")
    parallel.DistributedDataParallel = ours
    check(parallel.DistributedDataParallel is ours, "a class stays replaced")


if __name__ == "__main__":
    check(sys.argv[1:] == ["--flag", "value"], f"arguments: {sys.argv}")
    check_names()
    check_imports()
    check_refusals()
    check_replacements()
    check_clients((Path(__file__).parents[2] / "docs" / "coming_from_torch.md").read_text())
    print("all as it should be")
