"""The objects of a call are freed when it has ended, and not by the next garbage collection, which may be far away.

A cycle of references would keep arguments, results, and the graph of a context, with the activations in it. Both ends
are in this process, whose collector is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import rpcdist.autograd as autograd
from rpcdist import rpc
from rpcdist.autograd import _get_debug_info  # type: ignore[attr-defined]  # torch's name
from rpcdist.optim import DistributedOptimizer
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.testing.limits import LIMIT_S

NUM = 20


def same(value: Any) -> Any:
    return value


async def same_later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def fails() -> None:
    raise ValueError("a failure of the function")


def hangs() -> None:
    with contextlib.suppress(TimeoutError):
        rpc.Future[None]().wait(LIMIT_S)


def count_up() -> Iterator[int]:
    yield from range(4)


async def count_up_later() -> AsyncIterator[int]:
    for number in range(4):
        yield number


def fails_in_the_middle() -> Iterator[int]:
    yield 1
    raise ValueError("a failure of the generator")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        raise ValueError("a failure of the backward")


def fails_backward(x: torch.Tensor) -> Any:
    return FailsBackward.apply(x)  # type: ignore[no-untyped-call]


def expects_failure(use: Callable[[], object]) -> None:
    with contextlib.suppress(ValueError, RuntimeError, TimeoutError):
        use()
        pytest.fail("did not fail")


async def awaited(function: Any, *arguments: Any) -> None:
    with contextlib.suppress(ValueError):
        await rpc.rpc_async("b", function, arguments)


async def streamed_later() -> None:
    assert [number async for number in rpc.rpc_stream("b", count_up_later)] == [0, 1, 2, 3]


def left_early() -> None:
    stream = rpc.rpc_stream("b", count_up)
    next(stream)
    stream.close()


def forward(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("b", torch.mul, (x, x)).sum()


def in_context(use: Callable[[int, torch.Tensor], object]) -> None:
    with autograd.context() as context_id:
        use(context_id, torch.ones(3, requires_grad=True))


def there_and_back_again(context_id: int, x: torch.Tensor) -> None:
    """A graph with gates."""
    first = rpc.rpc_sync("b", torch.mul, (x, x))
    second = rpc.rpc_sync("b", torch.mul, (first * 2, x))
    autograd.backward(context_id, [(second + first * first).sum()])


def stepped(at_once: bool) -> Callable[[int, torch.Tensor], object]:
    def step(context_id: int, x: torch.Tensor) -> None:
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(x)], lr=0.1)
        if at_once:
            optimizer.backward_and_step(context_id, [forward(x)])
        else:
            autograd.backward(context_id, [forward(x)])
            optimizer.step(context_id)

    return step


loop = asyncio.new_event_loop()

USES: dict[str, Callable[[], object]] = {
    "a call": lambda: rpc.rpc_sync("b", same, (1,)),
    "a call with tensors": lambda: rpc.rpc_sync("b", same, ([torch.ones(3), torch.ones(100_000)],)),
    "a call of a coroutine": lambda: rpc.rpc_sync("b", same_later, (1,)),
    "a call that fails": lambda: expects_failure(lambda: rpc.rpc_sync("b", fails)),
    "a call that times out": lambda: expects_failure(lambda: rpc.rpc_sync("b", same_later, (1,), timeout=1e-6)),
    "futures": lambda: rpc.wait_all([rpc.rpc_async("b", same, (1,)) for _ in range(4)]),
    "a future that fails": lambda: expects_failure(lambda: rpc.rpc_async("b", fails).wait()),
    "a future that times out": lambda: expects_failure(
        lambda: rpc.rpc_async("b", same_later, (1,), timeout=1e-6).wait()
    ),
    "an awaited call": lambda: loop.run_until_complete(awaited(same, 1)),
    "an awaited call that fails": lambda: loop.run_until_complete(awaited(fails)),
    "a reference": lambda: rpc.remote("b", same, (1,)).to_here(),
    "a reference that fails": lambda: expects_failure(lambda: rpc.remote("b", fails).to_here()),
    "a stream": lambda: list(rpc.rpc_stream("b", count_up)),
    "an async stream": lambda: loop.run_until_complete(streamed_later()),
    "a stream that is left early": left_early,
    "a stream that fails": lambda: expects_failure(lambda: list(rpc.rpc_stream("b", fails_in_the_middle))),
    "calls to several workers": lambda: rpc.call_each(["a", "b"], same, 1),
    "calls to several workers that fail": lambda: rpc.call_each(["a", "b"], fails, return_exceptions=True),
    "a forward pass": lambda: in_context(lambda _, x: forward(x)),
    "a backward pass": lambda: in_context(lambda id, x: autograd.backward(id, [forward(x)])),
    "a backward pass with gates": lambda: in_context(there_and_back_again),
    "a backward pass that fails elsewhere": lambda: in_context(
        lambda id, x: expects_failure(lambda: autograd.backward(id, [rpc.rpc_sync("b", fails_backward, (x,)).sum()]))
    ),
    "a step": lambda: in_context(stepped(at_once=False)),
    "a backward pass and a step": lambda: in_context(stepped(at_once=True)),
}


def garbage_of(cluster: InProcessCluster, use: Callable[[], object]) -> dict[str, int]:
    """The kinds of objects of which a use leaves one or more, with their number in `NUM` uses.

    Functions, cells and the like do not count alone: each call of torch's `tree_flatten` leaves a function that refers
    to itself.
    """

    def repeat() -> None:
        for _ in range(NUM):
            use()

    cluster.run("a", repeat)  # the first of a kind may make what lasts
    gc.collect()
    gc.disable()
    try:
        cluster.run("a", repeat)
        eventually(lambda: not int(cluster.run("b", _get_debug_info)["num_autograd_contexts"]))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    left = {kind: count for kind, count in found.items() if count >= NUM}
    return left if any(not kind.startswith(("builtins.", "types.")) for kind in left) else {}


def test_nothing_is_left_to_the_garbage_collector() -> None:
    with contextlib.closing(loop), InProcessCluster("a", "b") as cluster:
        left = {name: garbage for name, use in USES.items() if (garbage := garbage_of(cluster, use))}
    assert left == {}
