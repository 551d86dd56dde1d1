"""The functions of two ranks that share one GPU in the tests of groups and of training: each function runs on both
ranks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import rpcdist.collectives as dist
import rpcdist.collectives.torch_backend
from rpcdist.collectives import functional
from rpcdist.collectives.device_mesh import init_device_mesh
from rpcdist.errors import CollectiveError
from rpcdist.parallel import DistributedDataParallel, MixedPrecision, SyncBatchNorm, ZeroRedundancyOptimizer, comm_hooks
from rpcdist.parallel._ddp._ddp_errors import NonFiniteGradients

GPU = torch.device("cuda", 0)
SIZE = 2
LIMIT = timedelta(seconds=60)


@contextmanager
def default_group(rank: int, url: str, backend: str | None = None) -> Iterator[None]:
    torch.cuda.set_device(GPU)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=SIZE, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def full(value: float, length: int = 4) -> Tensor:
    return torch.full((length,), float(value), device=GPU)


# ---------------------------------------------------------------- the API of groups


def collectives(rank: int, url: str) -> None:
    """The functions of torch.distributed on the default backend of a machine with a GPU."""
    with default_group(rank, url):
        assert dist.get_backend_config() == "cpu:tcp,cuda:nccl"
        _collectives(rank)
        on_host = torch.ones(3) + rank
        dist.all_reduce(on_host)
        assert on_host.tolist() == [3.0] * 3


def staged(rank: int, url: str) -> None:
    """Tensors of the GPU through the backend of CPUs."""
    with default_group(rank, url, "tcp"):
        _collectives(rank)


def _collectives(rank: int) -> None:
    other = 1 - rank
    tensor = full(rank + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 4
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [3.0] * 4
    tensor = full(rank)
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [1.0] * 4
    parts = [torch.empty(4, device=GPU) for _ in range(SIZE)]
    dist.all_gather(parts, full(rank))
    assert [part[0].item() for part in parts] == [0, 1]
    gathered = torch.empty(8, device=GPU)
    dist.all_gather_into_tensor(gathered, full(rank))
    assert gathered.tolist() == [0.0] * 4 + [1.0] * 4
    reduced = torch.empty(4, device=GPU)
    dist.reduce_scatter_tensor(reduced, torch.arange(8.0, device=GPU))
    assert reduced.tolist() == [2.0 * number for number in range(4 * rank, 4 * rank + 4)]
    exchanged = torch.empty(4, device=GPU)
    dist.all_to_all_single(exchanged, full(rank))
    assert exchanged.tolist() == [0.0, 0.0, 1.0, 1.0]
    dist.gather(full(rank), parts if rank == 0 else None, dst=0)
    dist.scatter(tensor, [full(5), full(6)] if rank == 1 else None, src=1)
    assert tensor.tolist() == [5.0 + rank] * 4
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.MAX)
    assert rank or tensor.tolist() == [6.0] * 4

    received = torch.empty(4, device=GPU)
    operations = [dist.P2POp(dist.isend, full(rank), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        assert work.wait()
    assert received.tolist() == [float(other)] * 4
    if rank == 0:
        dist.send(full(9), 1)
    else:
        dist.recv(received, 0)
        assert received.tolist() == [9.0] * 4

    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": rank, "on the GPU": full(rank)})
    assert [each["rank"] for each in objects] == [0, 1]
    reducing = dist.all_reduce(tensor, async_op=True)
    assert reducing is not None and reducing.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in (tensor, received):
            dist.all_reduce(each)
    manager.wait()
    dist.barrier()
    dist.monitored_barrier()


def groups(rank: int, url: str) -> None:
    with default_group(rank, url):
        both, alone = dist.new_group([0, 1]), dist.new_group([1])
        tensor = full(rank + 1)
        dist.all_reduce(tensor, group=both)
        if rank == 1:
            dist.all_reduce(tensor, group=alone)
        assert tensor.tolist() == [3.0] * 4
        halves = dist.split_group(split_ranks=[[0], [1]])
        assert dist.get_world_size(halves) == 1
        dist.all_reduce(tensor, group=halves)
        assert tensor.tolist() == [3.0] * 4
        mesh = init_device_mesh("cuda", (SIZE,), mesh_dim_names=("ranks",))
        dist.all_reduce(tensor, group=mesh.get_group("ranks"))
        assert tensor.tolist() == [6.0] * 4


def through_gradients(rank: int, url: str) -> None:
    """Collectives that gradients flow through."""
    with default_group(rank, url):
        value = full(rank + 1).requires_grad_()
        (functional.all_reduce(value) * (rank + 1)).sum().backward()
        assert value.grad is not None and value.grad.tolist() == [3.0] * 4


def many_streams(rank: int, url: str) -> None:
    """Asynchronous operations, on several streams at once, keep memory that is dropped early."""
    with default_group(rank, url):
        streams = [torch.cuda.Stream() for _ in range(3)]
        works, results = [], []
        for number in range(60):
            with torch.cuda.stream(streams[number % 3]):
                tensor = torch.full((100_000,), float(number + rank), device=GPU)
                work = dist.all_reduce(tensor, async_op=True)
                assert work is not None
                works.append(work)
                results.append((number, tensor))
                del tensor
                torch.empty(100_000, device=GPU).fill_(-1)  # would be given the memory of a tensor that was forgotten
        for work, (number, tensor) in zip(works, results, strict=True):
            work.wait()
            assert tensor.eq(2 * number + 1).all(), number


# ---------------------------------------------------------------- data parallel training


def make_model(normalised: bool = False) -> nn.Module:
    torch.manual_seed(4)
    norm: list[nn.Module] = [nn.BatchNorm1d(32)] if normalised else []
    model = nn.Sequential(nn.Linear(16, 32), *norm, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    return model.to(GPU, torch.float64)


def batches() -> list[Tensor]:
    torch.manual_seed(8)
    return [torch.rand(8, 16, dtype=torch.float64, device=GPU) for _ in range(6)]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None = None, accumulate: bool = False
) -> list[Tensor]:
    """On this rank's half of each batch, or on all of it; returns the parameters."""
    for number, batch in enumerate(batches()):
        part = batch if rank is None else batch.chunk(SIZE)[rank]
        held = accumulate and number % 2 == 0
        with model.no_sync() if held and isinstance(model, DistributedDataParallel) else nullcontext():
            model(part).square().mean().backward()
        if not held:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(rank: int, url: str, options: dict[str, Any], accumulate: bool) -> None:
    alone = make_model()
    wanted = train(alone, sgd(alone), accumulate=accumulate)
    with default_group(rank, url):
        model = DistributedDataParallel(make_model(), **options)
        torch.testing.assert_close(train(model, sgd(model), rank, accumulate), wanted)


def ddp_hooks(rank: int, url: str) -> None:
    hooks: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
        "fp16": lambda: (None, comm_hooks.fp16_compress_hook),
        "bf16": lambda: (None, comm_hooks.bf16_compress_hook),
        "PowerSGD": lambda: (
            comm_hooks.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=3, min_compression_rate=1),
            comm_hooks.powerSGD_hook,
        ),
    }
    alone = make_model()
    wanted = train(alone, sgd(alone))
    with default_group(rank, url):
        for name, make_hook in hooks.items():
            model = DistributedDataParallel(make_model())
            model.register_comm_hook(*make_hook())
            got = train(model, sgd(model), rank)
            worst = max((one - two).abs().max().item() for one, two in zip(got, wanted, strict=True))
            assert worst < 0.05, (name, worst)


def not_finite(rank: int, url: str) -> None:
    """All ranks hear whose loss was NaN."""
    with default_group(rank, url):
        model = DistributedDataParallel(make_model())
        for number, batch in enumerate(batches()[:3]):
            loss = model(batch.chunk(SIZE)[rank]).square().mean()
            if number == 1:
                with pytest.warns(NonFiniteGradients, match=r"rank 1 contributed NaN or infinity to .*4\.weight"):
                    (loss * (float("nan") if rank == 1 else 1.0)).backward()
            else:
                loss.backward()
            model.zero_grad()


def mixed_precision(rank: int, url: str) -> None:
    alone = make_model().float()
    with default_group(rank, url):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = DistributedDataParallel(copy.deepcopy(alone), mixed_precision=precision)
        for batch in batches():
            model(batch.float().chunk(SIZE)[rank]).square().mean().backward()
            alone(batch.float()).square().mean().backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert mine.grad.dtype == torch.float32
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.1, atol=0.05)


def batch_norm(rank: int, url: str) -> None:
    """Statistics of all ranks' parts together give what one process gets from the whole batch."""
    alone = make_model(normalised=True)
    wanted = train(alone, sgd(alone))
    with default_group(rank, url):
        model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(make_model(normalised=True)))
        torch.testing.assert_close(train(model, sgd(model), rank), wanted)


def uneven(rank: int, url: str) -> None:
    with default_group(rank, url):
        model = DistributedDataParallel(make_model())
        with model.join():
            for batch in batches()[: 3 + 3 * rank]:
                model(batch).sum().backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        assert flat.isfinite().all()


def zero_redundancy(rank: int, url: str) -> None:
    alone = make_model()
    wanted = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01))
    with default_group(rank, url):
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        torch.testing.assert_close(train(model, optimizer, rank), wanted)


def torch_engines(rank: int, url: str) -> None:
    """torch's own DDP and FSDP over the backend that is registered with torch."""
    from torch.distributed.fsdp import fully_shard

    alone = make_model()
    wanted = train(alone, sgd(alone))
    torch.cuda.set_device(GPU)
    name = rpcdist.collectives.torch_backend.NAME
    torch_dist.init_process_group(name, init_method=url, rank=rank, world_size=SIZE, timeout=LIMIT)
    try:
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        torch.testing.assert_close(train(wrapped, sgd(wrapped), rank), wanted)
        sharded = make_model()
        for module in sharded:  # type: ignore[attr-defined]
            if list(module.parameters()):
                fully_shard(module)
        fully_shard(sharded)
        train(sharded, sgd(sharded), rank)
        got = [parameter.full_tensor() for parameter in sharded.parameters()]  # type: ignore[attr-defined]
        torch.testing.assert_close(got, wanted)
    finally:
        torch_dist.destroy_process_group()


# ---------------------------------------------------------------- failures


def waits_for_a_dead_rank(rank: int, url: str, entered: str) -> tuple[str, float]:
    """Rank 1 says that it is here, and does not come to the collective; rank 0's kernel waits for it."""
    torch.cuda.set_device(GPU)
    dist.init_process_group(init_method=url, rank=rank, world_size=SIZE, timeout=LIMIT)
    tensor = full(rank)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        Path(entered).touch()
        time.sleep(3600)  # until it is killed
    began = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    with pytest.raises(CollectiveError) as failed:
        work.wait(LIMIT)
    took = time.monotonic() - began
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return str(failed.value), took


def on_a_tensor_of_the_wrong_device(rank: int, url: str) -> None:
    """A call that is refused leaves the group as it was."""
    with default_group(rank, url, "nccl"):
        with pytest.raises(Exception, match="cpu"):
            dist.all_reduce(torch.ones(2))
        tensor = full(1)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 4
