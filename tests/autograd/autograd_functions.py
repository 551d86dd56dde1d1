"""Functions that the tests of distributed autograd call on workers; driver and workers import this module."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.rpc.functions import async_execution

rpc_sync: Any = rpc.rpc_sync
rpc_async: Any = rpc.rpc_async

LIMIT_S = 30.0


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def double(x: Tensor) -> Tensor:
    return x * 2


def identity(value: Any) -> Any:
    return value


def several(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, x * 3, torch.sin(x)


@dataclass
class Batch:
    data: Tensor
    extra: dict[str, list[Tensor]]


def batch_forward(batch: Batch, weights: list[Tensor]) -> Batch:
    hidden = batch.data @ weights[0]
    return Batch(torch.tanh(hidden), {"more": [hidden * batch.extra["scale"][0], torch.ones(2)]})


async def layer_in_coroutine(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


async def nested_in_coroutine(to: str, x: Tensor, w: Tensor) -> Tensor:
    hidden = await rpc_async(to, layer, (x, w))
    return torch.tanh(hidden @ w)


@async_execution
def layer_in_future(x: Tensor, w: Tensor) -> Any:
    future: Any = torch.futures.Future()
    threading.Thread(target=lambda: future.set_result(torch.tanh(x @ w))).start()
    return future


@async_execution
def nested_in_future(to: str, x: Tensor, w: Tensor) -> Any:
    return rpc_async(to, layer, (x, w)).then(lambda done: rpc_async(to, layer, (done.wait(), w)).wait())


def stream(x: Tensor, count: int) -> Iterator[Tensor]:
    for number in range(count):
        yield x * (number + 1)


async def stream_in_coroutine(x: Tensor, count: int) -> AsyncIterator[Tensor]:
    for number in range(count):
        yield torch.sin(x * (number + 1))


def nested(path: list[str], x: Tensor, w: Tensor) -> Tensor:
    """Passes through the workers of `path`, one inside the other; uses x on the way in and out."""
    if not path:
        return torch.tanh(x @ w)
    inner: Tensor = rpc_sync(path[0], nested, (path[1:], x * 2, w))
    return inner @ w + x


class Model(torch.nn.Module):
    """Parameters on a worker."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def collected(self, context_id: int) -> dict[str, Tensor]:
        """The gradients of this model that the context has."""
        found = autograd.get_gradients(context_id)
        return {name: found[p] for name, p in self.named_parameters() if p in found}


class Embedding(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(10, 3, sparse=True)

    def forward(self, rows: Tensor, dense: bool) -> Tensor:
        looked_up: Tensor = self.table(rows)
        return looked_up + self.table.weight.sum() if dense else looked_up

    def collected(self, context_id: int) -> Tensor:
        return autograd.get_gradients(context_id)[self.table.weight]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("this backward fails")


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        scaled: Tensor = gradient * 3 * x**2
        return scaled


def fails_backward(x: Tensor) -> Tensor:
    result: Tensor = Failing.apply(x)  # type: ignore[no-untyped-call]
    return result


def cubed(x: Tensor) -> Tensor:
    result: Tensor = Cubed.apply(x)  # type: ignore[no-untyped-call]
    return result


def checkpointed(x: Tensor, w: Tensor, reentrant: bool) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    result: Tensor = checkpoint(layer, x, w, use_reentrant=reentrant)
    return result


def calls_inside_checkpoint(x: Tensor, w: Tensor, to: str) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    result: Tensor = checkpoint(lambda a, b: rpc_sync(to, layer, (a, b)), x, w, use_reentrant=False)
    return result


def spoiled(x: Tensor) -> Tensor:
    """Changes in place what its backward needs."""
    y = torch.exp(x * 1)
    z = y.sum()
    y.add_(1)
    return z


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2).add_(1)


kept: dict[str, Tensor] = {}


def keep(key: str, x: Tensor) -> None:
    kept[key] = x * 2


def take(key: str) -> Tensor:
    return kept[key]


def autograd_state() -> dict[str, str]:
    return autograd._interface._get_debug_info()


def wait_at_gradient(x: Tensor, key: str) -> Tensor:
    """Its backward says that it has begun, and then waits."""
    import rpc_functions

    def hook(gradient: Tensor) -> None:
        rpc_functions.board.put(f"{key} begun")
        rpc_functions.board.wait(f"{key} go on", limit_s=LIMIT_S)

    y = x * 2
    y.register_hook(hook)
    return y
