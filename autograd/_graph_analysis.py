"""Finds out what of a worker's graph lies between its sends and recvs.

One walk over the nodes that roots and sends reach, in an order in which each comes before what it leads to, carries a
bit mask along: which sources' gradients flow through this node. What two sources share is thereby known, too.

[Note: groups]
    Sources that share an inner node must be run by one engine call: a node that ran twice, with a part of its gradient
    each time, would fire hooks with partial gradients, and do its work twice. Sources that only share leaves need not:
    the parts are added up in the context. A leaf with hooks is like an inner node, since its hooks must see the whole.
    So the chain A->B->A->B falls apart into groups that run one after the other, and no thread has to wait in the
    middle of one, although the layers of B are used by each of its hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, Node

from rpcdist.autograd._autograd_errors import AutogradError
from rpcdist.autograd._message_nodes import RecordedRecv, RecordedSend, RecvNode
from rpcdist.autograd._pass_events import LocalGraph, Recv, SendRecord

__all__ = ["Analysis", "Leaf", "analyse"]

_AccumulateGrad = type(torch.ones((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that gets a gradient.

    Attributes:
        tensor: the leaf.
        edge: where its gradient arrives.
        sources: those whose gradients reach it.
    """

    tensor: torch.Tensor
    edge: GradientEdge
    sources: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """A worker's graph in one pass.

    Attributes:
        local: what `PassState` needs.
        edges: of the sources, by number.
        leaves: all that any source reaches.
        recvs: by message.
        sends: by message.
        inner: the nodes in between, with the sources that reach each.
    """

    local: LocalGraph
    edges: list[GradientEdge]
    leaves: list[Leaf]
    recvs: dict[int, RecordedRecv]
    sends: dict[int, RecordedSend]
    inner: dict[Node, int]


def analyse(
    context_id: int, roots: Sequence[GradientEdge], sends: Sequence[RecordedSend], recvs: Sequence[RecordedRecv]
) -> Analysis:
    """Walks the graph.

    Raises:
        AutogradError: the graph leads into another context.
    """
    edges = list(roots)
    numbered: list[SendRecord] = []
    for send in sends:
        tensors = send.node.next_functions
        numbered.append(SendRecord(send.id, send.to, send.stamp, len(edges), len(tensors)))
        edges += [GradientEdge(cast(Node, node), number) for node, number in tensors]
    walk = _Walk(edges)
    masks = walk.masks
    unions = _Unions(len(edges))
    leaves: list[Leaf] = []
    feeders: dict[int, list[int]] = {}
    for node, mask in masks.items():
        kind = type(node)
        if kind is _AccumulateGrad:
            leaf = cast(Any, node).variable
            leaves.append(Leaf(leaf, GradientEdge(node, 0), mask))
            if leaf._backward_hooks:
                unions.join(mask)
            continue
        unions.join(mask)
    for (node, number), mask in walk.outputs.items():
        recv = cast(Any, node).recv
        if recv.context_id != context_id:
            raise AutogradError(
                f"the graph of context {context_id} leads to a tensor that was received in another context, "
                f"{recv.context_id}; detach() what is kept from one context to the next, or keep only parameters"
            )
        feeders.setdefault(recv.id, [0] * recv.count)[number] |= mask
    facts = tuple(
        Recv(recv.id, recv.sender, recv.stamp, tuple(feeders.get(recv.id, (0,) * recv.count))) for recv in recvs
    )
    local = LocalGraph(len(roots), tuple(numbered), facts, unions.groups())
    inner = {node: mask for node, mask in masks.items() if type(node) is not _AccumulateGrad}
    return Analysis(local, edges, leaves, {recv.id: recv for recv in recvs}, {send.id: send for send in sends}, inner)


class _Walk:
    """Every node that edges reach, with the edges (as bits) that reach it. Recvs lead nowhere.

    Attributes:
        masks: by node, each before those that it leads to.
        outputs: for each tensor that arrived, as (node of its recv, index): the sources that reach it.
    """

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.outputs: dict[tuple[Node, int], int] = {}
        self._following: dict[Node, Sequence[tuple[Node | None, int]]] = {}
        order = self._topological([edge.node for edge in edges])
        masks = self.masks = dict.fromkeys(order, 0)
        for bit, edge in enumerate(edges):
            masks[edge.node] |= 1 << bit
            if type(edge.node) is RecvNode:
                self._reach(edge.node, edge.output_nr, 1 << bit)
        for node in order:
            mask = masks[node]
            for following, number in self._following[node]:
                if following is not None:
                    masks[following] |= mask
                    if type(following) is RecvNode:
                        self._reach(following, number, mask)

    def _reach(self, node: Node, number: int, mask: int) -> None:
        key = node, number
        self.outputs[key] = self.outputs.get(key, 0) | mask

    def _topological(self, starts: Sequence[Node]) -> list[Node]:
        finished: list[Node] = []
        known = self._following
        for start in starts:
            if start in known:
                continue
            stack = [(start, iter(self._meet(start)))]
            while stack:
                node, rest = stack[-1]
                for following, _ in rest:
                    if following is not None and following not in known:
                        stack.append((following, iter(self._meet(following))))
                        break
                else:
                    stack.pop()
                    finished.append(node)
        finished.reverse()
        return finished

    def _meet(self, node: Node) -> Sequence[tuple[Node | None, int]]:
        """Asks the node once what it leads to: that makes Python objects."""
        kind = type(node)
        following = () if kind is RecvNode or kind is _AccumulateGrad else node.next_functions
        self._following[node] = following
        return following


class _Unions:
    """Sources that belong together; union by bit masks."""

    def __init__(self, count: int) -> None:
        self._group_of = list(range(count))
        self._masks = [1 << bit for bit in range(count)]

    def join(self, mask: int) -> None:
        first = self._find((mask & -mask).bit_length() - 1)
        rest = mask & ~self._masks[first]
        while rest:
            other = self._find((rest & -rest).bit_length() - 1)
            self._group_of[other] = first
            self._masks[first] |= self._masks[other]
            rest &= ~self._masks[first]

    def _find(self, bit: int) -> int:
        group = self._group_of
        while group[bit] != bit:
            group[bit] = group[group[bit]]
            bit = group[bit]
        return bit

    def groups(self) -> tuple[int, ...]:
        return tuple(self._masks[bit] for bit in range(len(self._group_of)) if self._group_of[bit] == bit)
