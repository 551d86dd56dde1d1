"""The functions that the tests of the distributed optimizer call on workers; driver and workers import this module."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.optim import DistributedOptimizer
from rpcdist.optim._local_optimizer import own_table

rpc_sync: Any = rpc.rpc_sync


class Layer(nn.Module):
    """A layer with known values, on a worker; all of its methods are called through references."""

    def __init__(self, seed: int, size: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(size, size, generator=generator))
        self.bias = nn.Parameter(torch.randn(size, generator=generator))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    def set_grads(self, value: float) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, value)

    def grads(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]

    def collected(self, context_id: int) -> list[Tensor]:
        found = autograd.get_gradients(context_id)
        return [found[parameter] for parameter in self.parameters() if parameter in found]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(18.0).reshape(6, 3))

    def forward(self, rows: Tensor) -> Tensor:
        looked_up: Tensor = self.table(rows)
        return looked_up

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(self.table.weight)]

    def values(self) -> Tensor:
        return self.table.weight.detach().clone()


class PickySGD(torch.optim.SGD):
    """Notices when two steps overlap, and fails on demand."""

    running = 0
    most_running = 0
    lock = threading.Lock()

    def __init__(self, params: Any, lr: float, fails: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.fails = fails

    def step(self, closure: Any = None) -> Any:
        with self.lock:
            PickySGD.running += 1
            PickySGD.most_running = max(PickySGD.most_running, PickySGD.running)
        try:
            if self.fails:
                raise ArithmeticError("this step fails")
            return super().step(closure)
        finally:
            with self.lock:
                PickySGD.running -= 1


class StuckSGD(torch.optim.SGD):
    """Announces its step, and stays in it."""

    def __init__(self, params: Any, path: str) -> None:
        super().__init__(params)
        self.path = path

    def step(self, closure: Any = None) -> Any:
        import rpc_victim_functions

        rpc_victim_functions.announce_and_wait(self.path)


class NoConstructor(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        raise LookupError("this optimizer cannot be made")


def most_running() -> int:
    return PickySGD.most_running


def hold_the_lock(key: str) -> None:
    """Keeps all steps of this worker waiting until told otherwise."""
    import rpc_functions

    with own_table().lock:
        rpc_functions.board.put(f"{key} held")
        rpc_functions.board.wait(f"{key} let go")


def train(layers: list[Any], x: Tensor, num_steps: int, lr: float) -> None:
    """A trainer: many steps on layers that others train as well."""
    optimizer = DistributedOptimizer(PickySGD, [p for layer in layers for p in layer.rpc_sync().parameter_rrefs()], lr)
    for _ in range(num_steps):
        with autograd.context() as context_id:
            # The gradient of each weight is its copy's here: nothing of it is saved at the owner.
            loss = sum(layer.rpc_sync().parameter_rrefs()[1].to_here().sum() for layer in layers) * x
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)


def train_until_death(owner: str, path: str) -> tuple[str, str, list[str], float]:
    """Steps parameters of a worker that dies. Returns the error of the step, with its notes, and when it came."""
    layer: Any = rpc.remote(owner, Layer, (1,))
    optimizer = DistributedOptimizer(StuckSGD, layer.rpc_sync().parameter_rrefs(), path)
    with autograd.context() as context_id:
        autograd.backward(context_id, [layer.rpc_sync().forward(torch.ones(1, 4)).sum()])
        try:
            optimizer.step(context_id)
        except RuntimeError as exc:
            return type(exc).__name__, str(exc), exc.__notes__, time.monotonic()
    return "none", "", [], time.monotonic()


def use(optimizer: DistributedOptimizer, layer: Any, x: Tensor) -> list[str]:
    """Steps an optimizer that was made elsewhere."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [layer.rpc_sync().forward(x).sum()])
        optimizer.step(context_id)
    return [rref.owner_name() for rref in optimizer.remote_optimizers]


def same(x: Tensor) -> Tensor:
    return x * 1


def deadly(x: Tensor) -> Tensor:
    """A tensor whose backward ends this process."""
    result = x * 1
    result.register_hook(lambda gradient: os._exit(9))
    return result


class DeadlySGD(torch.optim.SGD):
    """Ends its process in the first step, on the first worker."""

    def step(self, closure: Any = None) -> Any:
        if rpc.get_worker_info().name == "worker1":
            os._exit(9)
        return super().step(closure)


def step_at_once_with_death(at: str) -> str:
    """The error of `backward_and_step` when worker1 dies in the pass, or in its step."""
    layers = [rpc.remote(worker, Layer, (1,)) for worker in ("worker1", "worker2")]
    rrefs = [rref for layer in layers for rref in layer.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(DeadlySGD if at == "step" else torch.optim.SGD, rrefs, lr=0.1)
    with autograd.context() as context_id:
        x = torch.ones(1, 4, requires_grad=True)
        hidden = rpc_sync("worker1", deadly if at == "pass" else same, (x,))
        losses = [layer.rpc_sync().forward(hidden).sum() for layer in layers]
        try:
            optimizer.backward_and_step(context_id, [losses[0] + losses[1]])
        except RuntimeError as error:
            return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "nothing was raised"
