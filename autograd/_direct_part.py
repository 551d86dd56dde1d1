"""A worker's part in a backward pass whose order is known: no two sources of its graph share a node.

The sources are the roots, and each message that was sent. If they share only leaves, there is nothing to decide: when
the gradient of a source has arrived, the source runs, and everything that it reaches has a gradient; or its receiver
reports that it is unused, and then everything that it reaches is unused, too. Training loops over several workers are
like this, and chains of calls. Other graphs need verdicts before anything runs: `_general_part` handles those. Both
kinds send the same messages, so each worker chooses for itself.

[Note: few functions] The code of a training step runs once in some milliseconds, when the processor's caches have lost
most of it. A function call then costs about a microsecond, whatever the function does. So this module has few of them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from rpcdist.autograd._backward_pass import BackwardPass, PassPart
from rpcdist.autograd._graph_analysis import MAX_NODES_BEFORE_SENDING, AccumulateGrad
from rpcdist.autograd._message_nodes import EngineRun, Gradients, RecordedRecv, RecordedSend, RecvNode, new_edge
from rpcdist.autograd._pass_message import PassMessage

MAX_HELD_BYTES: Final = 32 << 10
"""Gradients of several messages leave together up to this size; larger ones do not wait for each other."""

MAX_WITHOUT_ENGINE: Final = 16
"""For more gradients at once, one call of the engine costs less."""


class GraphSource:
    """The roots, or a sent message, as the beginning of a part of the graph.

    Attributes:
        edges: the edges at which its gradients enter the graph.
        leaves: the nodes of the leaves that it reaches.
        outputs: the edges of the received tensors that it reaches.
        recvs: their messages, by id.
        num_inner: the number of other nodes that it reaches.
        runs_code: whether it reaches a user's function or a leaf with hooks. Hooks of other tensors are not
            visible.
    """

    __slots__ = ("edges", "leaves", "num_inner", "outputs", "recvs", "runs_code")

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.edges = edges
        self.leaves: dict[Any, None] = {}
        self.outputs: dict[GradientEdge, None] = {}
        self.recvs: dict[int, RecordedRecv] = {}
        self.num_inner = 0
        self.runs_code = False

    def walk(self, context_id: int, taken: dict[Any, GraphSource], edges: Sequence[GradientEdge] | None = None) -> bool:
        """Finds the nodes that the source, or some of its edges, reaches; False if this module cannot handle the graph.

        `taken` maps each node to its source; the method adds the nodes that it finds.
        """
        leaves, outputs = self.leaves, self.outputs
        num_inner = num_bytes = 0
        todo: list[Any] = list(self.edges if edges is None else edges)
        for edge in todo:  # it grows meanwhile
            node = edge[0]
            kind = type(node)
            if kind is AccumulateGrad:
                leaves[node] = None
                if node.variable._backward_hooks:
                    self.runs_code = True
                    if taken.setdefault(node, self) is not self:
                        return False  # its hooks must see the whole gradient
                continue
            if node is None:
                continue
            owner = taken.get(node)
            if kind is RecvNode:
                outputs[new_edge((node, edge[1], None))] = None
                if owner is None:
                    recv = node.recv
                    if recv.context_id != context_id or recv.is_hooked:
                        return False
                    num_bytes += recv.size_bytes
                    self.recvs[recv.id] = recv
                    taken[node] = self
                    continue
            elif owner is None:
                num_inner += 1
                if issubclass(kind, BackwardCFunction):
                    self.runs_code = True
                taken[node] = self
                todo += node.next_functions
                continue
            if owner is not self:
                return False
        self.num_inner = num_inner
        # Gradients are sent after the run. If several take long, it is better to send them one after the other.
        return len(self.recvs) <= 1 or (num_inner <= MAX_NODES_BEFORE_SENDING and num_bytes <= MAX_HELD_BYTES)


def find_sources(
    context_id: int, roots: Sequence[GradientEdge], sends: Iterable[RecordedSend]
) -> tuple[GraphSource | None, dict[int, GraphSource]] | None:
    """The roots and the sent messages, as sources; None if the graph needs `_general_part`."""
    taken: dict[Any, GraphSource] = {}
    root = None
    if roots:
        root = GraphSource(roots)
        if not root.walk(context_id, taken):
            return None
    sources: dict[int, GraphSource] = {}
    for send in sends:
        tensors: Any = send.node.next_functions
        source = sources[send.id] = GraphSource([new_edge((node, number, None)) for node, number in tensors])
        if not source.walk(context_id, taken):
            return None
    return root, sources


@dataclass(eq=False, repr=False)
class DirectPart(PassPart):
    """One worker's part: the roots if the pass began here, and the sent messages, by id.

    A source is removed when its gradient has arrived, or it is unused.
    """

    _owner: BackwardPass
    _root: GraphSource | None
    _sources: dict[int, GraphSource]
    _sends: Sequence[RecordedSend]
    _recvs: Sequence[RecordedRecv]
    _told: set[int] = field(default_factory=set)  # they have our begin message, or get it at the end of this turn
    _untold: Collection[int] = ()  # those of `_told` that get it at the end of this turn
    _unheard: set[int] = field(default_factory=set)  # those of `_told` that have not sent theirs
    _children: set[int] = field(default_factory=set)
    _done_early: set[int] = field(default_factory=set)

    def take_part(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        owner, root = self._owner, self._root
        self._told.update(neighbours)
        self._unheard.update(neighbours)
        if len(neighbours) > (owner.parent is not None) and self._is_large():
            self._begin(neighbours, () if root is None else root.recvs)  # they prepare meanwhile
            owner.flush()
        else:
            self._untold = neighbours
        if root is not None:
            self._run([(root, owner.root_gradients)])
        if any([send.to == owner.me for send in self._sends]):
            self._drop_own()
        for sender, message in early:
            self._take(sender, message)
        self._begin_late()
        self._end_if_done()

    def take(self, sender: int, message: PassMessage) -> None:
        self._take(sender, message)
        self._end_if_done()

    def _is_large(self) -> bool:
        """Whether running a part of the graph takes long."""
        sources = self._sources.values() if self._root is None else (self._root, *self._sources.values())
        return any([source.num_inner > MAX_NODES_BEFORE_SENDING for source in sources])

    def _begin_late(self) -> None:
        """Begins with waiting neighbours before anything is sent: messages that a begin does not name are unused."""
        untold, self._untold = self._untold, ()
        if untold:
            self._begin(untold, ())

    def _begin(self, neighbours: Iterable[int], runs: Iterable[int]) -> None:
        """Announces to neighbours that this worker takes part, and which of their messages are undecided.

        The announcement also names their messages in `runs`, because the gradients of these follow at once.
        """
        parent = self._owner.parent
        undecided = {id: None for source in self._sources.values() for id in source.recvs} if self._sources else {}
        undecided.update(dict.fromkeys(runs))
        for to in neighbours:
            message = self._owner.message_to(to)
            message.begins = True
            message.is_child = to == parent
            then = self._owner.then
            if then is not None and self._told == {to} and not any([s.runs_code for s in self._sources.values()]):
                message.follow_up = then.hand_over(to)
        if undecided:
            for recv in self._recvs:
                if recv.id in undecided and recv.sender in neighbours:
                    self._owner.message_to(recv.sender).verdicts.setdefault(recv.id, None)

    def _take(self, sender: int, message: PassMessage) -> None:
        sources = self._sources
        starts: list[tuple[GraphSource, Gradients]] = []
        unused: list[GraphSource] = []
        named = message.named()
        if message.begins:
            self._unheard.discard(sender)
            if message.is_child and sender not in self._done_early:
                self._children.add(sender)
            if sender not in self._told:
                self._told.add(sender)
                self._begin((sender,), ())
            if sources:
                for send in self._sends:
                    if send.to == sender and send.id not in named and send.id in sources:
                        unused.append(sources.pop(send.id))
        if message.messages:
            to_original_devices = self._owner.context.to_original_devices
            for id, gradients in zip(message.messages, message.gradients, strict=True):
                source = sources.pop(id, None)
                if source is not None:
                    starts.append((source, to_original_devices(id, gradients)))
        for id, verdict in message.verdicts.items():
            if verdict == 0 and id in sources:
                unused.append(sources.pop(id))
            elif verdict and id in sources:
                self._pass_on_verdict(sources[id], verdict)
        if message.is_done:
            if sender in self._unheard:  # the message overtook that worker's begin
                self._done_early.add(sender)
            self._children.discard(sender)
        if unused:
            self._drop(unused)
        if starts:
            self._run(starts)

    def _pass_on_verdict(self, source: GraphSource, verdict: int) -> None:
        """A message is used, and its gradient arrives later: marks the messages that it depends on as used, too."""
        todo = [(source, verdict)]
        for used, verdict in todo:  # it grows meanwhile
            reached = GraphSource([edge for number, edge in enumerate(used.edges) if verdict >> number & 1])
            reached.walk(self._owner.context.id, {})
            masks = dict.fromkeys(used.recvs, 0)
            node: Any
            for node, number, _ in reached.outputs:
                masks[node.recv.id] |= 1 << number
            for id, mask in masks.items():
                if (to := used.recvs[id].sender) != self._owner.me:
                    self._owner.message_to(to).verdicts[id] = mask
                elif id in self._sources and mask:
                    todo.append((self._sources[id], mask))
                elif id in self._sources:
                    self._drop([self._sources.pop(id)])

    def _drop(self, unused: list[GraphSource]) -> None:
        """Reports messages that nothing depends on to their senders."""
        for source in unused:  # it grows meanwhile
            for id, recv in source.recvs.items():
                if recv.sender != self._owner.me:
                    self._owner.message_to(recv.sender).verdicts[id] = 0
                elif id in self._sources:
                    unused.append(self._sources.pop(id))

    def _drop_own(self) -> None:
        """Drops unused messages that this worker sent to itself, since no verdict arrives for them."""
        reached = {id for source in self._sources.values() for id in source.recvs}
        own = [send.id for send in self._sends if send.to == self._owner.me and send.id not in reached]
        self._drop([self._sources.pop(id) for id in own if id in self._sources])

    def _run(self, starts: Sequence[tuple[GraphSource, Gradients]]) -> None:
        """Runs sources whose gradients have arrived, in one engine call, then messages of this worker to itself."""
        owner = self._owner
        while starts:
            began_s = time.time()
            edges: list[GradientEdge] = []
            gradients: list[torch.Tensor] = []
            leaves: dict[Any, None] = {}
            outputs: dict[GradientEdge, None] = {}
            received: dict[int, list[torch.Tensor | None]] = {}
            recvs: list[RecordedRecv] = []
            num_inner = 0
            for source, found in starts:
                for edge, gradient in zip(source.edges, found, strict=True):
                    if gradient is not None:
                        edges.append(edge)
                        gradients.append(gradient)
                num_inner += source.num_inner
                leaves.update(source.leaves)
                if source.outputs:
                    outputs.update(source.outputs)
                    for id, recv in source.recvs.items():
                        received[id] = [None] * recv.count
                        recvs.append(recv)
            captured: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if not edges else None
            run = None
            if captured is None and not num_inner and len(edges) <= MAX_WITHOUT_ENGINE:
                captured = _passed_on(edges, gradients, received)
            if captured is None:
                run = EngineRun()
                captured = run.run_apart(edges, gradients, leaves, outputs, received, owner.options.retain_graph)
            owner.spans.append(("run", -1, began_s, time.time()))
            starts = []
            for recv in recvs:
                if recv.sender == owner.me:
                    if (own := self._sources.pop(recv.id, None)) is not None:
                        starts.append((own, owner.context.to_original_devices(recv.id, received[recv.id])))
                else:
                    owner.message_to(recv.sender).add_gradients(recv.id, received[recv.id])
            if run is not None and run.callbacks:
                self._begin_late()
                owner.flush()  # callbacks may wait for results that depend on these gradients
                captured = run.called_back(captured)
            if captured:
                owner.context.gradients.add(captured)

    def _end_if_done(self) -> None:
        if not (self._sources or self._unheard or self._children):
            self._owner.finish()

    def waits_for(self) -> Mapping[int, str]:
        found = dict.fromkeys(self._unheard, "has not begun")
        found.update(dict.fromkeys(self._children, "is not done"))
        found.update({send.to: "owes a gradient" for send in self._sends if send.id in self._sources})
        return found


def _passed_on(
    edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], received: dict[int, list[torch.Tensor | None]]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The gradients of leaves if there is no node to execute; None if the engine is needed.

    If a sent tensor is a parameter, or an unchanged received tensor, its gradient is that of the leaf or of the
    recv. The engine still runs if these tensors have hooks or `retain_grad`, and if gradients
    must be added up or have an unexpected form.
    """
    if len(edges) > 1 and len(set(edges)) < len(edges):
        return None
    captured: list[tuple[torch.Tensor, torch.Tensor]] = []
    found: list[tuple[int, int, torch.Tensor]] = []
    node: Any
    for (node, number, _), gradient in zip(edges, gradients, strict=True):
        kind = type(node)
        if kind is AccumulateGrad:
            leaf = node.variable
            if leaf._backward_hooks or not _fits(gradient, leaf):
                return None
            captured.append((leaf, gradient))
        elif node is None or node.recv.needs_engine() or not _fits(gradient, node._input_metadata[number]):
            return None
        else:
            found.append((node.recv.id, number, gradient))
    for message, number, gradient in found:
        received[message][number] = gradient
    return captured


def _fits(gradient: torch.Tensor, target: Any) -> bool:
    """Whether a gradient has the form that the engine would give it, for a tensor or a node's metadata of one."""
    return (
        gradient.layout is torch.strided
        and gradient.dtype is target.dtype
        and list(gradient.shape) == list(target.shape)
        and gradient.device == target.device
    )
