"""torch's engines, each as a function that trains something small and returns every number of it.

Each takes the rank, the number of ranks and an empty folder that all ranks see, and runs with torch's default group.
All sums over ranks have two terms, so that no backend's order of adding can show; worlds of four ranks are meshes of
2 x 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ENGINES", "Numbers"]

Numbers = dict[str, Tensor]

STEPS = 5
WIDTH, HIDDEN = 12, 22


class Block(nn.Module):
    """Two linear layers and a normalisation, as the parallel styles of torch expect them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return outputs


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def blocks_of(model: nn.Sequential) -> list[nn.Module]:
    return [module for module in model if isinstance(module, Block)]


def batch(step: int, part: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a part of the data, the same for each rank that has this part."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(rows, 4, WIDTH, generator=generator), torch.randn(rows, 4, 1, generator=generator)


def train(
    model: nn.Module,
    part: int,
    steps: Iterable[int] = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
    cut: Callable[[Tensor], Tensor] = lambda whole: whole,
) -> Numbers:
    """The losses of some steps with a part of the data, of which `cut` takes what this rank gets."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: Numbers = {}
    for step in steps:
        inputs, targets = map(cut, batch(step, part))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses


def parameters(model: nn.Module) -> Numbers:
    """All parameters, put together where they are sharded."""
    return {
        name: parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }


# ------------------------------------------------------------ data parallelism


def ddp(rank: int, size: int, folder: str) -> Numbers:
    """With buffers, one bucket and many."""
    found: Numbers = {}
    for bucket_cap_mb in (25.0, 0.001):
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Flatten(0, 1), nn.Linear(WIDTH, 17), nn.BatchNorm1d(17), nn.Linear(17, 1))
        model = DistributedDataParallel(nn.Sequential(layers, nn.Unflatten(0, (-1, 4))), bucket_cap_mb=bucket_cap_mb)
        numbers = {**train(model, rank), **parameters(model), **dict(model.named_buffers())}
        found |= {f"{name}, buckets of {bucket_cap_mb} MiB": value for name, value in numbers.items()}
    return found


def ddp_hooks(rank: int, size: int, folder: str) -> Numbers:
    """Communication hooks of torch; those of PowerSGD wait inside for what they communicate."""
    found: Numbers = {}
    hooks: dict[str, tuple[Any, Callable[..., Any]]] = {
        "float16": (None, default_hooks.fp16_compress_hook),
        "PowerSGD": (
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
            ),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    for label, (state, hook) in hooks.items():
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(state, hook)
        found |= {f"{name}, {label}": value for name, value in {**train(model, rank), **parameters(model)}.items()}
    return found


# ------------------------------------------------------------ sharding


def shard(model: nn.Sequential, mesh: DeviceMesh, reshard: bool = True) -> nn.Sequential:
    """Every block, and then what is left, by `fully_shard`."""
    for layer in blocks_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def fsdp(rank: int, size: int, folder: str) -> Numbers:
    """With the whole gradient's norm clipped."""
    found: Numbers = {}
    for reshard in (True, False):
        model = shard(make_model(), init_device_mesh("cpu", (size,)), reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        numbers = train(model, rank, optimizer=optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        numbers["norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        found |= {f"{name}, reshard {reshard}": value for name, value in {**numbers, **parameters(model)}.items()}
    return found


def hsdp(rank: int, size: int, folder: str) -> Numbers:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    model = shard(make_model(), mesh)
    # The same data along one dimension, so that the mean over four ranks is a sum of two terms that differ.
    return {**train(model, rank // 2), **parameters(model)}


# ------------------------------------------------------------ tensors cut in pieces


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in blocks_of(model):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(rank: int, size: int, folder: str) -> Numbers:
    """Layers by columns and by rows; then with the sequence of what lies between them cut as well."""
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize(make_model(), mesh)
    found = {**train(model, 0), **parameters(model)}
    model = make_model()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan)
    numbers = {**train(model, 0, cut=lambda whole: whole.chunk(size, 1)[rank]), **parameters(model)}
    return found | {f"{name}, sequence": value for name, value in numbers.items()}


def fsdp_and_tensor_parallel(rank: int, size: int, folder: str) -> Numbers:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = shard(parallelize(make_model(), mesh["tensor"]), mesh["data"])
    return {**train(model, rank // 2), **parameters(model)}


def distributed_tensors(rank: int, size: int, folder: str) -> Numbers:
    """From each placement to each other one, and a product."""
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(8, 6, generator=generator)
    placements = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    found: Numbers = {}
    for (first, source), (second, target) in itertools.permutations(placements.items(), 2):
        moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
        found[f"{first} to {second}"] = moved.to_local().clone()
    product = distribute_tensor(whole.t(), mesh, [Shard(1)]) @ distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(product, DTensor)
    return found | {"product": product.full_tensor()}


# ------------------------------------------------------------ the rest


def pipelining(rank: int, size: int, folder: str) -> Numbers:
    """One stage on each rank, and interleaved ones."""
    # Here, because it imports the compiler: no other engine needs that.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    found: Numbers = {}
    for stages_per_rank in (1, 2):
        blocks = [*blocks_of(make_model()), *blocks_of(make_model())]
        per_stage = len(blocks) // (size * stages_per_rank)
        numbers = [rank + size * turn for turn in range(stages_per_rank)]
        parts = [nn.Sequential(*blocks[number * per_stage : (number + 1) * per_stage]) for number in numbers]
        count = size * stages_per_rank
        device = torch.device("cpu")
        stages: list[Any] = [
            PipelineStage(part, number, count, device) for part, number in zip(parts, numbers, strict=True)
        ]
        loss = nn.functional.mse_loss
        schedule: Any = (
            Schedule1F1B(stages[0], 4, loss_fn=loss)
            if stages_per_rank == 1
            else ScheduleInterleaved1F1B(stages, 4, loss_fn=loss)
        )
        optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=0.01)
        for step in range(STEPS):
            inputs = batch(step, 0, rows=8)[0]
            losses: list[Tensor] = []
            optimizer.zero_grad()
            first, last = 0 in numbers, count - 1 in numbers
            keywords = {"target": inputs * 2, "losses": losses} if last else {}
            schedule.step(*([inputs] if first else []), **keywords)
            optimizer.step()
            found |= {f"loss {step}.{number}": value.detach() for number, value in enumerate(losses)}
        for number, part in zip(numbers, parts, strict=True):
            found |= {f"{count} stages, {number}: {name}": value for name, value in parameters(part).items()}
    return found


def checkpoint(rank: int, size: int, folder: str) -> Numbers:
    """A sharded model and its optimizer are saved, trained on, and set back; trained again they come to the same."""
    model = shard(make_model(), init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, rank, range(2), optimizer)
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    later = {**train(model, rank, range(2, STEPS), optimizer), **parameters(model)}
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    again = {**train(model, rank, range(2, STEPS), optimizer), **parameters(model)}
    assert all(torch.equal(value, again[name]) for name, value in later.items())
    return later


def of_tensors(name: str) -> Callable[..., Any]:
    """A function of functional collectives, which had another name before torch 2.13."""
    older = name.replace("single", "into_tensor" if name == "all_gather_single_coalesced" else "tensor")
    return getattr(functional, name, None) or getattr(functional, older)  # type: ignore[no-any-return]


def functional_collectives(rank: int, size: int, folder: str) -> Numbers:
    """Called through C++, with gradients where torch has them."""
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(size * 2, 3, generator=generator)
    found = {
        "all_reduce": functional.all_reduce(mine, "sum", group),
        "average": functional.all_reduce(mine, "avg", group),
        "all_gather": of_tensors("all_gather_single")(mine, 1, group),
        "reduce_scatter": of_tensors("reduce_scatter_single")(mine, "sum", 0, group),
        "all_to_all": functional.all_to_all_single(mine, [2] * size, [2] * size, group),
        "broadcast": functional.broadcast(mine, 1, group),
        "permute": functional.permute_tensor(mine.flatten(), [1, 0], group),
    }
    both = functional.all_reduce_coalesced([mine, mine * 3], "sum", group)
    pairs = of_tensors("all_gather_single_coalesced")([mine, mine + 1], group)
    parts = of_tensors("reduce_scatter_single_coalesced")([mine, mine * 2], "sum", [0, 0], group)
    several = {"coalesced": both, "gathered": pairs, "scattered": parts}
    found |= {f"{name} {number}": value for name, values in several.items() for number, value in enumerate(values)}
    for name in ("all_gather_single_autograd", "reduce_scatter_single_autograd"):
        leaf = mine.clone().requires_grad_()
        arguments = (0, group) if "gather" in name else ("sum", 0, group)
        of_tensors(name)(leaf, *arguments).square().sum().backward()
        assert leaf.grad is not None
        found[f"gradient of {name}"] = leaf.grad
    return {name: value + 0 for name, value in found.items()}


ENGINES: dict[str, tuple[int, Callable[[int, int, str], Numbers]]] = {
    "DDP": (2, ddp),
    "DDP's hooks": (2, ddp_hooks),
    "FSDP2": (2, fsdp),
    "HSDP": (4, hsdp),
    "TP": (2, tensor_parallel),
    "FSDP2 and TP": (4, fsdp_and_tensor_parallel),
    "DTensor": (2, distributed_tensors),
    "pipelining": (2, pipelining),
    "checkpoint": (2, checkpoint),
    "functional collectives": (2, functional_collectives),
}
"""By name: the number of ranks, and the function."""
