"""The functions that the processes of `rank_pool` run in the tests of data parallel training over RPC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ddp_models
import torch
from ddp_ranks import difference, plain, world
from torch import nn

from rpcdist import autograd, rpc
from rpcdist.collectives import flight_recorder
from rpcdist.parallel import DistributedDataParallel
from rpcdist.testing import eventually

table = nn.Embedding(20, 8)


def look_up(words: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table(words)
    return found


def table_gradient(context_id: int) -> torch.Tensor:
    """The gradients of a backward pass at the owner of the table."""
    return autograd.get_gradients(context_id)[table.weight].to_dense()


@contextmanager
def workers(rank: int, size: int, path: str) -> Iterator[None]:
    """All processes are workers of RPC; all but the last, which owns the table, are a process group, too."""
    torch.manual_seed(5)
    table.reset_parameters()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}r")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    try:
        if rank < size - 1:
            with world(rank, size - 1, path):
                yield
        else:
            yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


def train_over_rpc(rank: int, size: int, path: str, options: dict[str, Any]) -> float:
    """All ranks but the last train a model in parallel, on rows that they get from the last one."""
    with workers(rank, size, path):
        return 0.0 if rank == size - 1 else _train(rank, size - 1, options)


def _train(rank: int, size: int, options: dict[str, Any]) -> float:
    owner = f"worker{size}"
    model = DistributedDataParallel(plain(), **options)
    words = torch.randint(20, (size, 6), generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for _ in range(3):
        with autograd.context() as context_id:
            rows = rpc.rpc_sync(owner, look_up, args=(words[rank],))
            autograd.backward(context_id, [ddp_models.loss_of(model(rows))])
            captured = autograd.get_gradients(context_id)
            remote = rpc.rpc_sync(owner, table_gradient, args=(context_id,))
        alone, copied = plain(), nn.Embedding.from_pretrained(table.weight.detach(), freeze=False)
        ddp_models.loss_of(alone(copied(words.flatten()))).backward()
        mine = {name: captured[parameter] for name, parameter in model.module.named_parameters()}
        worst = max(worst, difference(ddp_models.gradients(alone), mine))
        copied.zero_grad()
        ddp_models.loss_of(plain()(copied(words[rank]))).backward()  # the table is not in parallel: only its own rows
        worst = max(worst, float((copied.weight.grad - remote).abs().max()))
        assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.randn(4, 8)).sum().backward()  # an ordinary pass still works
    assert all(parameter.grad is not None for parameter in model.parameters())
    return worst


def overlap_over_rpc(rank: int, size: int, path: str) -> tuple[int, int]:
    """How many reductions there are, and how many began before the backward pass ended, which waits for one."""
    with workers(rank, size, path):
        if rank == size - 1:
            return 0, 0
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 256), *(nn.Linear(256, 256) for _ in range(6)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.25)
        words, early = torch.randint(20, (256,)), [0]
        for number in range(3):
            with autograd.context() as context_id:
                rows = rpc.rpc_sync(f"worker{size - 1}", look_up, args=(words,))
                loss, began_ns = model(rows).square().mean(), time.time_ns()

                def wait(_: torch.Tensor, began_ns: int = began_ns) -> None:
                    """The last step of the pass on this worker."""
                    early.append(eventually(lambda: _num_reductions_since(began_ns), "a reduction has begun"))

                if number == 2:  # the first passes learn the order of the buckets
                    rows.register_hook(wait)
                autograd.backward(context_id, [loss])
        return len(model.reducer.buckets), early[-1]


def _num_reductions_since(time_ns: int) -> int:
    found = [record for record in flight_recorder.entries() if record.operation == "all_reduce"]
    return sum(time_ns < record.started_ns for record in found)


def branches_over_rpc(rank: int, size: int, path: str) -> Any:
    """Each rank uses other branches; then nobody says so."""
    with workers(rank, size, path):
        if rank == size - 1:
            return None
        torch.manual_seed(1)
        module = ddp_models.Branches()
        model = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.0001)
        words = torch.arange(4)
        found = []
        for plan in ([(True, False), (False, True)], [(True, False)] * 2, [(True, True), (False, False)]):
            captured = _captured(model, words, size, *plan[rank])
            found.append(sorted(name for name, each in module.named_parameters() if each in captured))
            alone = ddp_models.Branches()
            alone.load_state_dict(module.state_dict())
            for left, right in plan:
                rows = table(words).detach()
                (ddp_models.loss_of(alone(rows, left, right).values["scores"][0]) / 2).backward()
            mine = {name: captured[each] for name, each in module.named_parameters() if each in captured}
            assert difference(ddp_models.gradients(alone), mine) < 1e-6
        careless = DistributedDataParallel(module)
        try:
            for _ in range(2):
                _captured(careless, words, size, True, False)
        except Exception as exc:
            return found, f"{type(exc).__name__}: {exc}"
        return found, "nothing happened"


def _captured(
    model: DistributedDataParallel, words: torch.Tensor, size: int, left: bool, right: bool
) -> dict[torch.Tensor, torch.Tensor]:
    with autograd.context() as context_id:
        rows = rpc.rpc_sync(f"worker{size - 1}", look_up, args=(words,))
        scores = model(rows, left, right).values["scores"][0]
        autograd.backward(context_id, [ddp_models.loss_of(scores)])
        return autograd.get_gradients(context_id)


def heads_over_rpc(rank: int, size: int, path: str) -> float:
    """Two heads of one model whose losses depend on different calls: the graph falls into parts that run alone."""
    with workers(rank, size, path):
        if rank == size - 1:
            return 0.0

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.other = nn.Linear(8, 3), nn.Linear(8, 3)

            def forward(self, rows: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return self.one(rows), self.other(others)

        torch.manual_seed(2)
        module, alone = Heads(), Heads()
        alone.load_state_dict(module.state_dict())
        model = DistributedDataParallel(module)
        worst = 0.0
        for _ in range(2):
            with autograd.context() as context_id:
                calls = [rpc.rpc_sync(f"worker{size - 1}", look_up, args=(torch.arange(4) + at,)) for at in (rank, 9)]
                outputs = model(*calls)
                autograd.backward(context_id, [output.square().mean() for output in outputs])
                captured = autograd.get_gradients(context_id)
            alone.zero_grad()
            for other in range(size - 1):
                inputs = [table(torch.arange(4) + at).detach() for at in (other, 9)]
                sum(output.square().mean() / (size - 1) for output in alone(*inputs)).backward()
            mine = {name: captured[parameter] for name, parameter in module.named_parameters()}
            worst = max(worst, difference(ddp_models.gradients(alone), mine))
        return worst
