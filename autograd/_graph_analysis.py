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

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from rpcdist.autograd._message_nodes import RecordedRecv, RecordedSend, RecvNode, new_edge
from rpcdist.autograd._verdicts import LocalGraph, LocalRecv, LocalSend
from rpcdist.errors import AutogradError

MAX_NODES_BEFORE_SENDING: Final = 64
"""A worker that runs more nodes at once sends its decisions to the other workers first."""

AccumulateGrad = type(torch.ones((), device="cpu", requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Analysis(NamedTuple):
    """A worker's graph in one pass.

    Attributes:
        local: the graph as `PassState` needs it.
        edges: the edge of each source, by its number.
        leaves: the nodes of the leaves that a source reaches.
        recvs: by message.
        outputs: by received message that a source reaches, the edges of its tensors, at which the engine returns
            their gradients.
        sends: by message, with the number of the edge of its first tensor.
        masks: all nodes, with the mask of the sources that reach each.
    """

    local: LocalGraph
    edges: list[GradientEdge]
    leaves: list[Any]
    recvs: dict[int, RecordedRecv]
    outputs: dict[int, list[GradientEdge]]
    sends: dict[int, tuple[RecordedSend, int]]
    masks: dict[Node, int]


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
    masks, reached = _walk(edges)
    leaves: list[Any] = [node for node in masks if type(node) is AccumulateGrad]
    joined = [mask for node, mask in masks.items() if type(node) is not AccumulateGrad]
    joined += [masks[leaf] for leaf in leaves if leaf.variable._backward_hooks]
    joined += [send.mask for send in numbered]
    feeders: dict[int, list[int]] = {}
    outputs: dict[int, list[GradientEdge]] = {}
    node: Any  # torch's stubs lack what nodes of these kinds have
    for edge, mask in reached.items():
        node = edge.node
        recv = node.recv
        if recv.context_id != context_id:
            raise AutogradError(
                f"the graph of context {context_id} leads to a tensor that was received in another context, "
                f"{recv.context_id}; detach() tensors that are kept from one context to the next, or keep only "
                "parameters"
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
    return Analysis(local, edges, leaves, {recv.id: recv for recv in recvs}, outputs, by_id, masks)


def _walk(edges: Sequence[GradientEdge]) -> tuple[dict[Node, int], dict[GradientEdge, int]]:
    """The mask of the edges that reach each node, and each received tensor, given as an edge; ends there and at leaves.

    Each node passes its mask on as soon as all those that lead to it have passed on theirs (Kahn's algorithm).
    """
    waits_for: dict[Any, int] = {}  # how many edges lead to each node
    following: dict[Any, Sequence[tuple[Any, int]]] = {}  # kept, because torch makes new Python objects each time
    masks: defaultdict[Node, int] = defaultdict(int)
    outputs: defaultdict[GradientEdge, int] = defaultdict(int)
    for bit, (node, number, *_) in enumerate(edges):
        waits_for[node] = 0
        masks[node] |= 1 << bit
        if type(node) is RecvNode:
            outputs[new_edge((node, number, None))] |= 1 << bit
    todo = list(waits_for)
    for node in todo:  # it grows meanwhile
        kind = type(node)
        following[node] = () if kind is RecvNode or kind is AccumulateGrad else node.next_functions
        for reached, _ in following[node]:
            if reached in waits_for:
                waits_for[reached] += 1
            elif reached is not None:
                waits_for[reached] = 1
                todo.append(reached)
    ready = [node for node in masks if not waits_for[node]]
    for node in ready:  # it grows meanwhile
        mask = masks[node]
        for reached, number in following[node]:
            if reached is None:
                continue
            masks[reached] |= mask
            if type(reached) is RecvNode:
                outputs[new_edge((reached, number, None))] |= mask
            waits_for[reached] -= 1
            if not waits_for[reached]:
                ready.append(reached)
    return masks, outputs


def _groups(count: int, joined: Iterable[int]) -> tuple[int, ...]:
    """Divides `count` sources into sets, such that the sources of each mask are in one set (union-find)."""
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
