"""The functions that the ranks of `rank_pool` run in the tests of `torch_backend`: functions of torch alone, on groups
of ours.

Each function takes the rank and the number of ranks, runs with torch's default group made, and asserts.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rpcdist.collectives.torch_backend
from rpcdist.collectives import flight_recorder
from rpcdist.collectives.torch_backend import torch_group
from rpcdist.errors import CollectiveMismatch, ConfigError, RankLost
from rpcdist.testing import eventually

__all__ = ["run", "run_dropped", "run_made_from_stores"]

LIMIT = timedelta(seconds=40)


@contextmanager
def default_group(rank: int, size: int, path: str) -> Iterator[None]:
    """torch's own default group, by torch's own file store, on our backend."""
    store = dist.FileStore(path, size)
    dist.init_process_group("rpcdist", store=store, rank=rank, world_size=size, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(rank: int, size: int, name: str, path: str) -> None:
    """Runs a function of this module; for `rank_pool`."""
    function: Callable[[int, int], None] = globals()[name]
    with default_group(rank, size, path):
        function(rank, size)


def run_made_from_stores(rank: int, size: int, path: str) -> None:
    """`torch_group` twice on one store, as a library does that goes on with the ranks which are left."""
    assert not dist.is_initialized()
    shared = dist.FileStore(path, -1)
    with restarted_times(rank):  # ranks that were started again by their own agents meet the others
        for number, left in ((0, size), (1, 1)):
            if rank >= left:
                continue
            group = torch_group(dist.PrefixStore(f"quorum {number}", shared), rank, left, timeout=LIMIT)
            assert (group.rank(), group.size(), group.getBackendName()) == (rank, left, "rpcdist")
            tensor = torch.full((3,), rank + 1.0)
            group.allreduce([tensor]).wait()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            dist.broadcast(tensor, group_src=0, group=group)
            assert tensor.tolist() == [left * (left + 1) / 2] * 3
            model = DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            assert model.module.weight.grad is not None
            assert model.module.weight.grad.tolist() == [[(left + 1) / 2] * 2]
            group.barrier().wait()
            group.abort() if number else group.shutdown()
    assert not dist.is_initialized()


def run_dropped(rank: int, size: int, path: str) -> None:
    """A rank drops its group without `shutdown`, as torchft does; the others hear of it long before the timeout."""
    group = torch_group(dist.FileStore(path, size), rank, size, timeout=LIMIT)
    tensor = torch.ones(2)
    work = group.allreduce([tensor])
    if rank == size - 1:
        del group
        work.wait()  # what was submitted is done
        assert tensor.tolist() == [float(size)] * 2
        return
    work.wait()
    began = time.monotonic()
    with pytest.raises(RankLost, match=f"rank {size - 1} left the group .*Connection closed by peer"):
        group.barrier().wait()
    assert time.monotonic() - began < LIMIT.total_seconds() / 4
    backend = group.group
    del group
    eventually(lambda: not backend.device_types, "the dropped group has ended")


@contextmanager
def restarted_times(count: int) -> Iterator[None]:
    """The variables that torchrun sets for a process that it has started again so many times."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)
    try:
        yield
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


# ------------------------------------------------------------ operations


def collectives(rank: int, size: int) -> None:
    everyone = [torch.full((2, 3), float(other + 1)) for other in range(size)]
    total = torch.stack(everyone).sum(0)
    mine = everyone[rank].clone()
    assert dist.get_backend() == "rpcdist" and dist.get_world_size() == size and dist.get_rank() == rank
    dist.all_reduce(mine)
    assert torch.equal(mine, total)
    work = dist.all_reduce(mine.copy_(everyone[rank]), op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None and work.wait() and work.is_completed() and work.is_success()
    assert torch.equal(mine, everyone[-1]) and torch.equal(work.get_future().value()[0], mine)
    strided = torch.zeros(3, 2).t()
    dist.broadcast(strided.copy_(everyone[rank]), src=1)
    assert torch.equal(strided, everyone[1])
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, everyone[rank])
    assert all(map(torch.equal, outputs, everyone))
    whole = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(whole, everyone[rank])
    assert torch.equal(whole, torch.cat(everyone))
    part = torch.empty(2, 3)
    dist.reduce_scatter_tensor(part, whole)
    assert torch.equal(part, everyone[rank] * size)
    dist.reduce_scatter(part, list(everyone))
    assert torch.equal(part, everyone[rank] * size)
    dist.all_to_all_single(whole, whole.clone())
    assert torch.equal(whole, everyone[rank].repeat(size, 1))
    dist.reduce(mine.copy_(everyone[rank]), dst=0)
    assert torch.equal(mine, total if rank == 0 else everyone[rank])
    dist.gather(everyone[rank], outputs if rank == 0 else None, dst=0)
    dist.scatter(part, list(everyone) if rank == 1 else None, src=1)
    assert torch.equal(part, everyone[rank])
    if hasattr(dist, "gather_single"):  # torch 2.14
        single = torch.zeros(size, 2, 3) if rank == 1 else None
        dist.gather_single(everyone[rank], single, dst=1)
        assert single is None or torch.equal(single, torch.stack(everyone))
    dist.barrier()


def hooks_and_limits(rank: int, size: int) -> None:
    """Methods of groups that torch has had since 2.14; ours has them with every torch."""
    group: Any = dist.group.WORLD
    names: list[str] = []
    group.register_pre_hook(1, lambda args: names.append(f"before {args.name.name}"))
    group.register_post_hook(1, lambda args: names.append(f"after {args.name.name}"))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert names == ["before ALLREDUCE", "after ALLREDUCE", "before BARRIER", "after BARRIER"]
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    group.set_timeout(timedelta(seconds=30))
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.wait() and work.timeout == timedelta(seconds=30) and len(names) == 4
    assert group.get_backend(torch.device("cpu")) is group
    assert not group.supports_reconfigure and not group.supports_window
    assert group.supports_abort_hooks and not group.supports_completion_hooks
    for refused in (group.get_reconfigure_handle, group.new_window, lambda: group.reconfigure(None)):
        with pytest.raises(ConfigError, match="does not support"):
            refused()
    group.register_abort_hook(1, lambda: names.append("abort"))
    group.unregister_abort_hook(1)
    if hasattr(dist, "get_backend_impl"):
        assert dist.get_backend_impl() is group and dist.get_backend_impl(device=torch.device("cpu")) is group
    gathered: list[object] = [None] * size
    all_gather_object: Any = dist.all_gather_object
    if "weights_only" in inspect.signature(all_gather_object).parameters:
        all_gather_object(gathered, {"rank": rank}, weights_only=True)
        assert gathered == [{"rank": other} for other in range(size)]


def objects_and_messages(rank: int, size: int) -> None:
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": other} for other in range(size)]
    shared = [rank, "x"]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [1, "x"]
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(4, dtype=torch.bfloat16)
    sent = torch.full((4,), rank, dtype=torch.bfloat16)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]):
        work.wait()
    assert got.tolist() == [left] * 4
    if rank == 0:
        assert dist.recv(got, tag=3) == size - 1
    elif rank == size - 1:
        dist.send(sent, 0, tag=3)


def subgroups(rank: int, size: int) -> None:
    group = dist.new_group([1, 0], backend="rpcdist")
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=mesh.get_group("all"))
    assert tensor.item() == sum(range(size + 1))
    dist.destroy_process_group(group)


def groups_of_groups(rank: int, size: int) -> None:
    """Methods of a group that make another: torch's C++ code would make it of the backends that ours does not have."""
    world: Any = dist.group.WORLD
    for _ in range(2):  # a second group of the same ranks is another one
        both, alone = world.split_group([1, 0]), world.split_group([1], group_name="alone")
        assert (both.rank(), both.size(), alone is None) == (rank, size, rank == 0)
        assert both.group_name.endswith(":split:0_1") and world.use_pg_for_symm_mem_rendezvous is False
        tensor = torch.tensor([rank + 1])
        both.allreduce([tensor]).wait()
        assert tensor.item() == 3
        if alone is not None:
            assert (alone.rank(), alone.size(), alone.group_name) == (0, 1, "alone")
        both.shutdown()
    for wrong in ([], [0, 0], [7]):
        with pytest.raises(ValueError, match=r"split group|not part of group"):
            world.split_group(wrong)
    merged = world.merge_remote_group(dist.PrefixStore("merged", world.get_group_store()), size, LIMIT)
    tensor = torch.tensor([rank + 1])
    merged.allreduce([tensor]).wait()
    assert tensor.item() == 3 and merged.rank() in range(size) and merged.size() == size
    merged.shutdown()


def functional(rank: int, size: int) -> None:
    """The functional collectives reach groups through C++."""
    from torch.distributed import _functional_collectives as functions

    group = dist.group.WORLD
    assert group is not None
    everyone = [torch.full((2,), float(other)) for other in range(size)]
    reduced = functions.all_reduce(everyone[rank], "sum", group)
    assert torch.equal(reduced + 0, torch.stack(everyone).sum(0))
    assert torch.equal(functions.all_gather_tensor(everyone[rank], 0, group) + 0, torch.cat(everyone))
    scattered = functions.reduce_scatter_tensor(torch.cat(everyone), "sum", 0, group)
    assert torch.equal(scattered + 0, everyone[rank] * size)
    both = functions.all_reduce_coalesced([everyone[rank], everyone[rank].double()], "sum", group)
    assert both[0].tolist() == both[1].tolist() == reduced.tolist()
    gathered = functions.all_gather_into_tensor_coalesced([everyone[rank], everyone[rank] + 1], group)
    assert torch.equal(gathered[1] + 0, torch.cat(everyone) + 1)
    for which in (dist.new_group(backend="gloo"), group):
        functional_with_outputs(rank, size, which)


def marked_while_it_waits(rank: int, size: int) -> None:
    """torch's autograd marks what a functional collective returns, and the operation may still wait for other ranks."""
    store = dist.distributed_c10d._get_default_store()
    for number in range(10):
        tensor = torch.ones(4)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            eventually(lambda: flight_recorder.entries()[-1].state == "running")
            tensor.requires_grad_()
            store.set(f"marked {number}", "")
            work.wait()
        else:
            store.wait([f"marked {number}"])
            dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 4


def functional_with_outputs(rank: int, size: int, group: dist.ProcessGroup) -> None:
    ops: Any = torch.ops._c10d_functional
    everyone = [torch.full((2,), float(other)) for other in range(size)]
    gathered = torch.empty(2 * size)
    given = ops.all_gather_into_tensor_out(everyone[rank], size, group.group_name, out=gathered)
    assert torch.equal(ops.wait_tensor(given), torch.cat(everyone)) and given.data_ptr() == gathered.data_ptr()
    summed = torch.empty(2)
    given = ops.reduce_scatter_tensor_out(torch.cat(everyone), "sum", size, group.group_name, out=summed)
    assert torch.equal(ops.wait_tensor(given), everyone[rank] * size)
    if not hasattr(ops, "batch_p2p_ops"):
        return  # of torch 2.12
    to, source, received = (rank + 1) % size, (rank - 1) % size, torch.empty(2)
    both = ["isend", "irecv"]
    sent, got = ops.batch_p2p_ops(both, [to, source], [7, 7], [everyone[rank], received], group.group_name)
    assert ops.wait_tensor(sent).numel() == 0 and torch.equal(ops.wait_tensor(got), everyone[source])


def mismatch(rank: int, size: int) -> None:
    """Our checks hold for torch's functions too, and the error is ours."""
    group = dist.new_group(backend="rpcdist")
    try:
        dist.all_reduce(torch.ones(3 + rank), group=group)
    except CollectiveMismatch as exc:
        assert "rank 1 called all_reduce #1" in str(exc), exc
    else:
        raise AssertionError("no mismatch was found")


def watched_barrier(rank: int, size: int) -> None:
    """torch's own function knows Gloo only."""
    dist.monitored_barrier(timeout=LIMIT)
    pair = dist.new_group(backend="rpcdist")
    if rank == 0:
        try:
            dist.monitored_barrier(pair, timedelta(seconds=0.1))
        except RuntimeError as exc:
            assert "rank 1" in str(exc).lower(), exc
        else:
            raise AssertionError("rank 0 did not miss rank 1")
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo, LIMIT)


def again(rank: int, size: int) -> None:
    """The default group ends and begins again in the same processes: the function needs only another call."""
    dist.barrier()


# ------------------------------------------------------------ training; see tests/torch_engines for more


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank + 1)
    return [(torch.randn(6, 10, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(4)]


def train(
    model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> list[float]:
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(size: int) -> nn.Module:
    """One process with all ranks' batches: the mean over all of them is the mean of the ranks' means."""
    model = make_model()
    data = [batches(rank) for rank in range(size)]
    together = [(torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])) for step in zip(*data, strict=True)]
    train(model, together, torch.optim.Adam(model.parameters(), lr=0.01))
    return model


def equal_models(got: nn.Module, wanted: nn.Module) -> None:
    expected = dict(wanted.named_parameters())
    for name, parameter in got.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def ddp_compiled(rank: int, size: int) -> None:
    """torch's compiler leaves our methods alone, which run in the middle of what it compiles."""
    model = DistributedDataParallel(make_model())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, batches(rank), torch.optim.Adam(model.parameters(), lr=0.01))  # type: ignore[arg-type]
    equal_models(model.module, train_alone(size))
    torch.compiler.reset()


def ddp_joined(rank: int, size: int) -> None:
    """torch's C++ code keeps a Work of ours, and waits for it when nothing else refers to it."""
    for divide in (False, True):
        net = DistributedDataParallel(nn.Linear(5, 5, bias=False), bucket_cap_mb=1)
        with net.join(divide_by_initial_world_size=divide):
            for step in range(3 + 2 * rank):
                net(torch.ones(1, 5)).sum().backward()
                gradient = net.module.weight.grad
                assert gradient is not None
                running = sum(other >= rank or step < 3 + 2 * other for other in range(size))
                assert gradient[0, 0].item() == (running / size if divide else 1.0), (divide, step, gradient)
                net.zero_grad()
    dist.barrier()


def ddp_with_builtin_hooks(rank: int, size: int) -> None:
    """The hooks that torch has in C++, one of which takes apart what a future of the group brings."""
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        net = DistributedDataParallel(nn.Linear(5, 5, bias=False))
        net._register_builtin_comm_hook(kind)
        net(torch.full((1, 5), rank + 1.0)).sum().backward()
        gradient = net.module.weight.grad
        assert gradient is not None and gradient[0, 0].item() == (size + 1) / 2
        assert net._get_ddp_logging_data()["comm_hook"] == str(kind)


assert rpcdist.collectives.torch_backend.NAME == "rpcdist"
