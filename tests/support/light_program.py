"""A program that uses each part of the package that trains, and prints which modules of a list it has imported then.

    python tests/support/light_program.py torch._dynamo sympy

A process of its own, since other tests have imported these modules in theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import rpcdist.autograd as dist_autograd
from rpcdist import collectives, data, rpc
from rpcdist.collectives import functional, torch_backend
from rpcdist.nn import RemoteModule
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import (
    DiLoCoOptimizer,
    DistributedDataParallel,
    ElasticDataParallel,
    Join,
    MixedPrecision,
    ParameterServer,
    Pipeline,
    ShardedEmbedding,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    comm_hooks,
)
from rpcdist.parallel.model_averaging import PeriodicModelAverager, PostLocalSGDOptimizer
from rpcdist.testing import free_port

INPUTS = torch.ones(4, 3)
OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, object]] = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.Adam: {},
    torch.optim.AdamW: {"foreach": True},
    torch.optim.Adagrad: {},
    torch.optim.RMSprop: {},
}


def loss_of(module: nn.Module) -> torch.Tensor:
    return mse_loss(module(INPUTS).float(), torch.zeros(4, 3))  # torch 2.11 takes no bfloat16 beside float32


def use_distributed_optimizers() -> None:
    module = nn.Linear(3, 3)
    references = [rpc.RRef(parameter) for parameter in module.parameters()]
    for kind, options in OPTIMIZERS.items():
        optimizer = DistributedOptimizer(kind, references, lr=0.01, **options)
        for hogwild in (False, True):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [loss_of(module)])
                optimizer.clip_grad_norm_(context_id, 1.0)
                optimizer.step(context_id, hogwild=hogwild)
        optimizer.load_state_dict(optimizer.state_dict())
        with torch.autograd.profiler.profile(), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(module)])
            optimizer.step(context_id)


def use_remote_parts() -> None:
    remote = RemoteModule("worker0/cpu", nn.Linear, (3, 3))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [remote(INPUTS).sum()])
        DistributedOptimizer(torch.optim.SGD, remote.remote_parameters(), lr=0.1).step(context_id)
    pipeline = Pipeline([nn.Linear(3, 3)], ["worker0"], num_microbatches=2, loss_fn=mse_loss)
    optimizer = pipeline.make_optimizer(torch.optim.AdamW, lr=0.1)
    optimizer.zero_grad()
    pipeline.step(INPUTS, torch.zeros(4, 3))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    module = nn.Linear(3, 3)
    server = ParameterServer(module, ["worker0"], torch.optim.Adam, lr=0.1, trainers=["worker0"])
    loss_of(module).backward()
    server.step(module)
    server.load_state_dict(server.state_dict())
    table = ShardedEmbedding(10, 4, ["worker0"], torch.optim.SparseAdam, lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    table.step()


def use_data_parallelism() -> None:
    functional.all_reduce(torch.ones(3, requires_grad=True)).sum().backward()
    collectives.all_gather_object([None], "object")
    batch_norm = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3))
    for model in (
        DistributedDataParallel(batch_norm, find_unused_parameters=True),
        DistributedDataParallel(nn.Linear(3, 3), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
        DistributedDataParallel(nn.Linear(3, 3), static_graph=True),
    ):
        with Join([model]):
            loss_of(model).backward()
    for hook, state in (
        (comm_hooks.fp16_compress_hook, None),
        (comm_hooks.powerSGD_hook, comm_hooks.PowerSGDState(None, start_powerSGD_iter=2)),
    ):
        model = DistributedDataParallel(nn.Linear(3, 3))
        model.register_comm_hook(state, hook)
        loss_of(model).backward()


def use_optimizers_of_ranks() -> None:
    module = nn.Linear(3, 3)
    loss_of(module).backward()
    sharded = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    averaging = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2))
    rare = DiLoCoOptimizer(torch.optim.AdamW(module.parameters()), period=1)
    for optimizer in (sharded, averaging, rare):
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    scheduler.step()
    sharded.consolidate_state_dict()
    sharded.load_state_dict(sharded.state_dict())


def use_elastic_training() -> None:
    module = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = ElasticDataParallel(module, optimizer, collectives.HashStore(), num_ranks=1, stateful=[scheduler])
    for step in model.steps(2):
        with step:
            loss_of(model).backward()
    scheduler.step()
    model.close()


def use_torch_groups() -> None:
    torch.distributed.init_process_group(torch_backend.NAME, store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(3))
    torch.distributed.destroy_process_group()


def main(names: list[str]) -> None:
    rpc.init_rpc(
        "worker0",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}"),
    )
    collectives.init_process_group(store=collectives.HashStore(), rank=0, world_size=1)
    imported: dict[str, list[str]] = {}
    for use in (
        use_distributed_optimizers,
        use_remote_parts,
        use_data_parallelism,
        use_optimizers_of_ranks,
        use_torch_groups,
    ):
        use()
        imported[use.__name__] = [name for name in names if name in sys.modules]
    list(data.DistributedSampler(range(4), num_replicas=1, rank=0))
    collectives.destroy_process_group()
    use_elastic_training()
    imported["use_elastic_training"] = [name for name in names if name in sys.modules]
    from rpcdist import checkpoint  # last: torch's checkpoints import sympy, not the compiler

    state = {"model": nn.Linear(3, 3), "table": rpc.RRef(torch.ones(3))}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "saved", state)
        checkpoint.load(Path(folder) / "saved", state)
    imported["use_checkpoints"] = [name for name in names if name in sys.modules]
    rpc.shutdown()
    print(json.dumps(imported))


if __name__ == "__main__":
    main(sys.argv[1:])
