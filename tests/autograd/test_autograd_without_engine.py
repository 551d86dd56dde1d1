"""Gradients of tensors that a worker only passes on: without torch's engine, and as the engine would give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.autograd import _direct_part, _message_nodes
from rpcdist.testing import InProcessCluster

rpc_sync: Any = rpc.rpc_sync


@pytest.fixture
def engine_calls(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of edges at which each engine call of a pass began, on both workers; this one is `ada`."""
    calls: list[int] = []
    engine = cast(Any, torch.autograd.Variable._execution_engine)

    class Counting:
        @staticmethod
        def run_backward(edges: Sequence[Any], *arguments: Any, **options: Any) -> Any:
            calls.append(len(edges))
            return engine.run_backward(edges, *arguments, **options)

    monkeypatch.setattr(_message_nodes, "_engine", Counting)
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        yield calls


def weighted(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def total(*tensors: Tensor) -> Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def look_up(rows: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.embedding(torch.tensor([1]), rows, sparse=True).sum() * x.sum()


def leaves(count: int = 2) -> list[Tensor]:
    return [torch.full((3,), 2.0 + index, requires_grad=True) for index in range(count)]


def test_what_is_only_passed_on_needs_no_engine(engine_calls: list[int]) -> None:
    x, w = leaves()
    with autograd.context() as context_id:
        hidden = rpc_sync("bob", weighted, (rpc_sync("bob", weighted, (x, w)), w))
        autograd.backward(context_id, [rpc_sync("bob", total, (hidden,))])
        found = autograd.get_gradients(context_id)
    assert len(engine_calls) == 3  # one for each of the calls, all of bob's
    assert found[x].tolist() == [9.0] * 3
    assert found[w].tolist() == [12.0] * 3


def test_a_hook_on_a_received_tensor_is_called(engine_calls: list[int]) -> None:
    x, w = leaves()
    with autograd.context() as context_id:
        hidden = rpc_sync("bob", weighted, (x, w))
        hidden.register_hook(lambda gradient: gradient * 10)
        autograd.backward(context_id, [rpc_sync("bob", total, (hidden,))])
        assert autograd.get_gradients(context_id)[x].tolist() == [30.0] * 3


def test_a_received_tensor_retains_its_gradient(engine_calls: list[int]) -> None:
    x, w = leaves()
    with autograd.context() as context_id:
        hidden = rpc_sync("bob", weighted, (x, w))
        loss = rpc_sync("bob", total, (hidden,))
        hidden.retain_grad()
        autograd.backward(context_id, [loss])
        assert hidden.grad.tolist() == [1.0] * 3


def test_a_hook_on_a_leaf_is_called(engine_calls: list[int]) -> None:
    x, w = leaves()
    w.register_hook(lambda gradient: gradient * 10)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("bob", total, (rpc_sync("bob", weighted, (x, w)),))])
        found = autograd.get_gradients(context_id)
    assert found[w].tolist() == [20.0] * 3
    assert found[x].tolist() == [3.0] * 3


@pytest.mark.parametrize("count", [2, 16, 17])
def test_many_leaves(engine_calls: list[int], count: int) -> None:
    tensors = leaves(count)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("bob", total, tuple(tensors))])
        found = autograd.get_gradients(context_id)
    assert all(found[leaf].tolist() == [1.0] * 3 for leaf in tensors)
    assert engine_calls.count(count) == (count > _direct_part.MAX_WITHOUT_ENGINE)


def test_a_leaf_that_is_sent_twice_in_a_call(engine_calls: list[int]) -> None:
    x, _ = leaves()
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("bob", total, (x, x.view(3), x))])
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0] * 3


def test_a_sparse_gradient(engine_calls: list[int]) -> None:
    rows, x = torch.ones(2, 3, requires_grad=True), leaves()[0]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("bob", look_up, (rows, x))])
        found = autograd.get_gradients(context_id)
    assert found[rows].is_sparse
    assert found[rows].to_dense().tolist() == [[0.0] * 3, [6.0] * 3]
