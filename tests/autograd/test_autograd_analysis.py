"""The analysis of torch's graph: masks say what each edge reaches, and what shares nothing is apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from rpcdist.autograd._graph_analysis import _walk, analyse
from rpcdist.autograd._message_nodes import RecordedRecv, RecvNode, attach

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


def reached_by(tensor: Tensor) -> tuple[set[Any], set[tuple[Any, int]]]:
    """The nodes and the received tensors that one edge reaches, found by following every path."""
    start = get_gradient_edge(tensor)
    nodes: set[Any] = set()
    outputs: set[tuple[Any, int]] = set()
    todo: list[tuple[Any, int]] = [(start.node, start.output_nr)]
    while todo:
        node, number = todo.pop()
        if node is None:
            continue
        nodes.add(node)
        if type(node) is RecvNode:
            outputs.add((node, number))
        else:
            todo += node.next_functions
    return nodes, outputs


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_masks_say_what_each_edge_reaches(graph: Callable[..., list[Tensor]]) -> None:
    w = torch.ones((), requires_grad=True)
    _, (a, b) = received(1, 2)
    tensors = graph(w, a, b)
    masks, outputs = _walk([get_gradient_edge(tensor) for tensor in tensors])
    alone = [reached_by(tensor) for tensor in tensors]
    everything: set[Any] = set().union(*[nodes for nodes, _ in alone])
    assert masks == {
        node: sum(1 << bit for bit, (nodes, _) in enumerate(alone) if node in nodes) for node in everything
    }
    found = {(edge.node, edge.output_nr): mask for edge, mask in outputs.items()}
    reached: set[Any] = set().union(*[ends for _, ends in alone])
    assert found == {end: sum(1 << bit for bit, (_, ends) in enumerate(alone) if end in ends) for end in reached}


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
    masks, _ = _walk([get_gradient_edge(value)])
    assert len(masks) == 20_001
