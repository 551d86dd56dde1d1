"""Messages of several tensors, of which some are used at their sender as well, or have hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full_sets import FULL
from torch import Tensor

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.testing import InProcessCluster

rpc_sync: Any = rpc.rpc_sync

NUM_GRAPHS = 1000 if FULL else 60
MAX_CALLS = 4


@pytest.fixture(autouse=True)
def ada(no_agent: None) -> Iterator[None]:
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        yield


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a + b, b


def leaves(count: int = 2) -> list[Tensor]:
    return [torch.tensor([2.0 + index, 4.0 - index], dtype=torch.double, requires_grad=True) for index in range(count)]


def gradients_of(tensors: list[Tensor], make_loss: Callable[[], Tensor], mode: autograd.Mode) -> list[Tensor | None]:
    with autograd.context() as context_id:
        autograd.backward(context_id, [make_loss()], mode=mode)
        found = autograd.get_gradients(context_id)
    return [found.get(tensor) for tensor in tensors]


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_tensor_that_is_used_here_is_sent_beside_a_leaf(mode: autograd.Mode) -> None:
    a, b = leaves()
    hidden = a * 2
    found = gradients_of([a, b], lambda: rpc_sync("bob", product, (hidden, b)).sum() + hidden.sum() + b.sum(), mode)
    assert [None if one is None else one.tolist() for one in found] == [[8.0, 8.0], [5.0, 9.0]]


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_a_leaf_with_a_hook_is_sent_beside_another_leaf(mode: autograd.Mode) -> None:
    a, b = leaves()
    seen: list[list[float]] = []
    a.register_hook(lambda gradient: seen.append(gradient.tolist()))
    found = gradients_of([a, b], lambda: rpc_sync("bob", product, (a, b)).sum() + a.sum() + b.sum(), mode)
    assert [None if one is None else one.tolist() for one in found] == [[4.0, 4.0], [3.0, 5.0]]
    assert seen == [[4.0, 4.0]]  # once, with the whole gradient


def test_random_graphs_have_the_gradients_of_one_process() -> None:
    for seed in range(NUM_GRAPHS):
        tensors = leaves(3)
        found = gradients_of(tensors, lambda: random_loss(seed, tensors, at_bob), "smart")  # noqa: B023
        alone = leaves(3)
        random_loss(seed, alone, here).backward()
        for one, expected in zip(found, alone, strict=True):
            if one is None or expected.grad is None:
                assert one is expected.grad, seed
            else:
                assert torch.equal(one, expected.grad), seed


def at_bob(function: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    return rpc_sync("bob", function, (a, b))


def here(function: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    return function(a, b)


def random_loss(seed: int, tensors: list[Tensor], call: Callable[..., Any]) -> Tensor:
    """A sum of some of the tensors that local functions and calls have made, each used any number of times."""
    chance = random.Random(seed)
    made = list(tensors)
    if chance.random() < 0.3:
        tensors[0].register_hook(lambda gradient: gradient * 2)
    for _ in range(chance.randint(1, MAX_CALLS)):
        a, b = chance.choice(made), chance.choice(made)
        function: Callable[..., Any] = chance.choice([product, both])
        result = call(function, a, b) if chance.random() < 0.6 else function(a, b)
        made += result if isinstance(result, tuple) else [result]
    used = [*chance.sample(made, chance.randint(1, len(made))), made[-1]]
    return torch.stack([tensor.sum() for tensor in used]).sum()
