"""Analyses a worker's graph: which roots and sends lead to which recvs and leaves, and which of them must run together.

The analysis walks over all nodes that roots and sends reach. A bit mask per node says which sources' gradients flow
through it, so it also shows which nodes several sources share.

[Note: groups]
    Sources that share an inner node must run in one engine call: a node that ran twice, with a part of its gradient
    each time, would fire hooks with partial gradients, and do its work twice. Sources that share only leaves may run
    apart, because the context adds up the gradients of leaves. A leaf with hooks counts as an inner node: its hooks
    must see the whole gradient. The tensors of one message run together, too: where a run has to wait for a message
    (see the gates of `GroupRun`), all its gradients flow on at once. So the chain A->B->A->B falls apart into groups
    that run one after the other, and no thread has to wait in the middle of a group, although all hops of B use the
    same layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from rpcdist.autograd._autograd_errors import AutogradError
from rpcdist.autograd._message_nodes import RecordedRecv, RecordedSend, RecvNode, new_edge
from rpcdist.autograd._verdicts import LocalGraph, LocalRecv, LocalSend

MAX_NODES_BEFORE_SENDING: Final = 64
"""A worker with a larger graph lets the others know what it has decided before it runs the graph."""

AccumulateGrad = type(torch.ones((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Analysis(NamedTuple):
    """A worker's graph in one pass.

    Attributes:
        local: the graph as `PassState` needs it.
        edges: the edge of each source, by its number.
        leaves: the nodes of the leaves that a source reaches.
        recvs: by message.
        outputs: by received message that a source reaches, the edges of its tensors, at which the engine hands over
            their gradients.
        sends: by message, with the number of the edge of its first tensor.
        masks: all nodes, with the mask of the sources that reach each.
        sizes: by the number of a source, how many nodes it reaches; those that others reach, too, may be missing.
    """

    local: LocalGraph
    edges: list[GradientEdge]
    leaves: list[Any]
    recvs: dict[int, RecordedRecv]
    outputs: dict[int, list[GradientEdge]]
    sends: dict[int, tuple[RecordedSend, int]]
    masks: dict[Node, int]
    sizes: list[int]


def analyse(
    context_id: int, roots: Sequence[GradientEdge], sends: Sequence[RecordedSend], recvs: Sequence[RecordedRecv]
) -> Analysis:
    """Analyses the graph between the roots and sends on one side, and the recvs and leaves on the other.

    Raises:
        AutogradError: the graph leads into another context.
    """
    edges = list(roots)
    numbered: list[LocalSend] = []
    for send in sends:
        tensors: Any = send.node.next_functions  # torch's stubs say that a node may be None
        numbered.append(LocalSend(send.id, send.to, send.stamp, len(edges), len(tensors)))
        edges += [new_edge((node, number, None)) for node, number in tensors]
    walk = _Walk(edges)
    masks = walk.masks
    joined = [masks[node] for node in walk.leaves if node.variable._backward_hooks]
    joined += [masks[node] for node in walk.meetings]
    joined += [send.mask for send in numbered]
    feeders: dict[int, list[int]] = {}
    outputs: dict[int, list[GradientEdge]] = {}
    node: Any  # torch's stubs lack what nodes of these kinds have
    for edge, mask in walk.outputs.items():
        node = edge.node
        recv = node.recv
        if recv.context_id != context_id:
            raise AutogradError(
                f"the graph of context {context_id} leads to a tensor that was received in another context, "
                f"{recv.context_id}; detach() what is kept from one context to the next, or keep only parameters"
            )
        if recv.id in feeders:
            outputs[recv.id].append(edge)
        else:
            feeders[recv.id] = [0] * recv.count
            outputs[recv.id] = [edge]
        feeders[recv.id][edge.output_nr] = mask
    facts = tuple(
        [LocalRecv(recv.id, recv.sender, recv.stamp, tuple(feeders.get(recv.id, (0,) * recv.count))) for recv in recvs]
    )
    local = LocalGraph(len(roots), tuple(numbered), facts, _groups(len(edges), joined))
    by_id = {send.id: (send, known.first) for send, known in zip(sends, numbered, strict=True)}
    return Analysis(local, edges, walk.leaves, {recv.id: recv for recv in recvs}, outputs, by_id, masks, walk.sizes)


class _Walk:
    """All nodes that edges reach, with the mask of the edges that reach each. The walk ends at recvs and leaves.

    Usually edges share nothing but these ends. Then each edge's nodes are walked over once, in any order. Only where
    edges meet at an inner node, masks have to be passed on in topological order.

    Attributes:
        masks: by node.
        leaves: the nodes at which the walk has ended at leaves.
        meetings: the other nodes where edges may meet.
        outputs: by received tensor, given as an edge: the mask of the sources that reach it.
        sizes: by edge, how many nodes were walked over for it.
    """

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.masks: dict[Node, int] = {}
        self.leaves: list[Any] = []
        self.meetings: Collection[Node] = []
        self.outputs: dict[GradientEdge, int] = {}
        self.sizes: list[int] = []
        self._following: dict[Node, Sequence[tuple[Node | None, int]]] = {}
        if all([self._walk_alone(edge, 1 << bit) for bit, edge in enumerate(edges)]):
            self.meetings = {edge.node for edge in self.outputs}
            return
        self.outputs.clear()
        self._walk_together(edges)
        self.sizes = [len(self.masks)] * len(edges)
        self.leaves = [node for node in self.masks if type(node) is AccumulateGrad]
        self.meetings = [node for node in self.masks if type(node) is not AccumulateGrad]

    def _walk_alone(self, edge: GradientEdge, mask: int) -> bool:
        """Walks over what one edge reaches; False if it meets an inner node of another edge."""
        masks = self.masks
        num_before = len(masks)
        todo: list[tuple[Node | None, int]] = [(edge.node, edge.output_nr)]
        while todo:
            node, number = todo.pop()
            if node is None:
                continue
            kind = type(node)
            known = masks.get(node, 0)
            if kind is AccumulateGrad:
                if not known:
                    self.leaves.append(node)
                masks[node] = known | mask
            elif kind is RecvNode:
                masks[node] = known | mask
                self._reach(node, number, mask)
            elif not known:
                masks[node] = mask
                todo += node.next_functions
            elif known != mask:
                return False
        self.sizes.append(len(masks) - num_before)
        return True

    def _walk_together(self, edges: Sequence[GradientEdge]) -> None:
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
        key = new_edge((node, number, None))
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
        """The next nodes; asked once per node and kept, because torch makes new Python objects each time."""
        kind = type(node)
        following = () if kind is RecvNode or kind is AccumulateGrad else node.next_functions
        self._following[node] = following
        return following


def _groups(count: int, joined: Iterable[int]) -> tuple[int, ...]:
    """The sets into which so many sources fall if those of each mask are in the same one (union-find)."""
    group_of = list(range(count))
    masks = [1 << bit for bit in range(count)]

    def find(bit: int) -> int:
        while group_of[bit] != bit:
            group_of[bit] = group_of[group_of[bit]]
            bit = group_of[bit]
        return bit

    for mask in joined:
        if not mask & (mask - 1):
            continue  # one source
        first = find((mask & -mask).bit_length() - 1)
        while rest := mask & ~masks[first]:
            other = find((rest & -rest).bit_length() - 1)
            group_of[other] = first
            masks[first] |= masks[other]
    return tuple([masks[bit] for bit, first in enumerate(group_of) if first == bit])
