"""The analysis of torch's graph: both ways to walk over it say the same, and what shares nothing is apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rpcdist.autograd._graph_analysis import _Walk, analyse
from rpcdist.autograd._message_nodes import RecordedRecv, attach

CONTEXT = 7


def received(message: int, count: int = 1) -> tuple[RecordedRecv, list[Tensor]]:
    recv = RecordedRecv(CONTEXT, message, 1, message, count, 4 * count)
    tensors = [torch.ones(()) for _ in range(count)]
    attach(recv, tensors)
    return recv, tensors


def apart(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [a * w, b * w]


def one_recv_twice(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [a * w, (a + b).tanh()]


def inner_shared(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    trunk = a * w
    return [trunk.tanh(), trunk + b, b * w]


def inner_shared_late(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    deep = (w * 2).exp()
    return [a * 3, b * deep, a + deep]


def root_inside_another(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    inner = a * w
    return [inner, inner.tanh() + b]


def the_same_twice(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    both = a * b
    return [both, both]


def ends_only(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [a, b, w]


GRAPHS = [apart, one_recv_twice, inner_shared, inner_shared_late, root_inside_another, the_same_twice, ends_only]


class Together(_Walk):
    """The walk that copes with everything."""

    def _walk_alone(self, edge: GradientEdge, mask: int) -> bool:
        return False


@pytest.mark.parametrize("graph", GRAPHS)
def test_both_walks_find_the_same(graph: Callable[..., list[Tensor]]) -> None:
    w = torch.ones((), requires_grad=True)
    _, (a, b) = received(1, 2)
    edges = [get_gradient_edge(tensor) for tensor in graph(w, a, b)]
    fast, thorough = _Walk(edges), Together(edges)
    assert fast.masks == thorough.masks
    assert fast.outputs == thorough.outputs


@pytest.mark.parametrize("has_hook", [False, True])
def test_sources_that_share_a_leaf_run_apart_unless_it_has_hooks(has_hook: bool) -> None:
    w = torch.ones((), requires_grad=True)
    if has_hook:
        w.register_hook(lambda gradient: None)
    (first, [a]), (second, [b]) = received(1), received(2)
    roots = [get_gradient_edge(a * w), get_gradient_edge(b * w)]
    found = analyse(CONTEXT, roots, [], [first, second])
    assert found.local.groups == ((0b11,) if has_hook else (0b01, 0b10))
    assert [recv.feeders for recv in found.local.recvs] == [(0b01,), (0b10,)]
    assert [found.masks[leaf] for leaf in found.leaves] == [0b11]


def test_a_long_graph_needs_no_recursion() -> None:
    _, [a] = received(1)
    value = a
    for _ in range(20_000):
        value = value + 1.0
    walk = _Walk([get_gradient_edge(value)])
    assert len(walk.masks) == 20_001
