"""Runs groups of a worker's graph in one call of torch's engine.

[Note: gradients of recvs]
    The engine hands the gradients of received tensors over in one of two ways. Asked for the gradients at their edges,
    it returns them at the end, and does not execute `RecvRpc`, which costs as much as a matrix multiplication of a
    small model. Asked for that of the token, on which every recv depends, it executes `RecvRpc`, whose `backward` has
    them sent at once. That is for runs that take long, so that the next worker begins meanwhile; for gates, which wait
    for what follows from these gradients; and for nodes of recvs that have hooks.

[Note: gates]
    Usually all gradients from which a group runs have arrived. Where the graph of a worker leads out to another worker
    and back in (A->B->A, through shared nodes), some gradients arrive only after others have been sent. For these, the
    tensors of the send pass through `SendRpc`, whose output is a dummy. A chain of `GateOrder` nodes, made for the
    run, runs the gates in decreasing Lamport stamp. An order node waits for the gradient on the engine's thread, so
    the engine must choose it last: it takes ready nodes by decreasing sequence number, order nodes have the number 0,
    and all other nodes a greater one. A gradient never depends on one of a smaller stamp, so the wait ends, or the
    pass fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rpcdist.autograd._graph_analysis import Analysis, new_edge
from rpcdist.autograd._message_nodes import (
    GateOrder,
    Gradients,
    RecordedRecv,
    RecordedSend,
    current_run,
    stash_run,
    token_edge,
)
from rpcdist.autograd._pass_events import Run

LeafGradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Leaves with their gradients."""

Captured = dict[torch.Tensor, torch.Tensor]
"""Gradients by leaf, as `queue_callback` shows them."""

_engine = cast(Any, torch.autograd.Variable._execution_engine)


class EngineRun:
    """A call of torch's engine, as the hooks that it calls see it.

    Attributes:
        callbacks: see `queue_callback`.
    """

    __slots__ = ("callbacks",)

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Captured], object]] = []

    def run_apart(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        leaves: Mapping[Any, None],
        outputs: Mapping[GradientEdge, None],
        received: Mapping[int, list[torch.Tensor | None]],
        retain_graph: bool,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs what edges reach; returns the gradients of leaves.

        Args:
            edges: where the engine starts.
            gradients: for each of the edges.
            leaves: the nodes of leaves that they reach.
            outputs: the edges of received tensors that they reach.
            received: gets the gradients of those, by message and number.
            retain_graph: see `backward`.
        """
        wanted = [new_edge((node, 0, None)) for node in leaves]
        if outputs:
            wanted += outputs
        if not wanted:
            return []
        results = self._call(edges, gradients, wanted, retain_graph)
        # The zips are not strict: behind the leaves come the outputs.
        captured = [(node.variable, found) for node, found in zip(leaves, results, strict=False) if found is not None]
        node: Any
        for (node, number, _), found in zip(outputs, results[len(leaves) :], strict=True):
            received[node.recv.id][number] = found
        return captured

    def called_back(self, captured: LeafGradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the callbacks make of the gradients of leaves."""
        by_leaf = dict(captured)
        for callback in self.callbacks:
            callback(by_leaf)
        return list(by_leaf.items())

    def _call(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        wanted: Sequence[GradientEdge],
        retain_graph: bool,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients at the edges that are wanted."""
        outer = current_run()
        stash_run(self)
        try:
            # `torch.autograd.grad` calls this after checks that the engine repeats.
            found: Sequence[torch.Tensor | None] = _engine.run_backward(
                tuple(edges), tuple(gradients), retain_graph, False, tuple(wanted), True, accumulate_grad=False
            )
        finally:
            stash_run(outer)
        return found

    # ------------------------------------------------------------ called by nodes (`RunInProgress`)

    def wait_for(self, send: RecordedSend) -> Gradients:
        raise _not_ours()

    def gradient_of(self, send: RecordedSend) -> Gradients:
        raise _not_ours()

    def deliver(self, recv: RecordedRecv, gradients: Gradients) -> None:
        raise _not_ours()


class RunOwner(Protocol):
    """The backward pass that a run belongs to: provides gradients, and takes the results."""

    @property
    def root_gradients(self) -> Sequence[torch.Tensor]:
        """The gradients of the roots, by their number."""

    def gradient(self, message: int) -> Gradients:
        """The gradient of a send that has arrived."""

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        """The gradient of a send; blocks until it has arrived."""

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]], at_once: bool) -> None:
        """Sends the gradients of recvs to the senders of their messages; small ones wait for more unless `at_once`."""

    def flush(self) -> None:
        """Sends what waits for more."""

    def collect(self, captured: LeafGradients) -> None:
        """Adds the gradients of leaves to the context."""


class GroupRun(EngineRun):
    """One call of the engine, which runs one or several groups.

    Args:
        owner: the pass.
        analysis: the worker's graph.
        run: the groups, and their inputs and outputs.
        sends_early: whether others should get gradients before the engine has ended; see the note above.
    """

    def __init__(self, owner: RunOwner, analysis: Analysis, run: Run, sends_early: bool) -> None:
        super().__init__()
        self._owner = owner
        self._analysis = analysis
        self._run = run
        self._recvs = [analysis.recvs[id] for id in run.recvs]
        self._delivers = sends_early or bool(run.pending)
        for recv in self._recvs:
            if recv.is_hooked:
                self._delivers = True
        self._unanswered = dict.fromkeys(run.recvs)

    def execute(self, retain_graph: bool) -> None:
        """Runs, answers every recv, and collects the gradients of leaves. Blocks only if there are gates."""
        edges, gradients = self._starts()
        captured = self._with_engine(edges, gradients, retain_graph)
        if captured:
            self._owner.collect(captured)

    def _with_engine(
        self, edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], retain_graph: bool
    ) -> LeafGradients:
        """Runs the engine, answers every recv, and returns the gradients of leaves."""
        analysis, used = self._analysis, self._run.used
        leaves = [leaf for leaf in analysis.leaves if leaf.sources & used] if edges else []
        wanted = [leaf.edge for leaf in leaves]
        if edges and self._recvs:
            if self._delivers:
                wanted.append(token_edge())
            else:
                for recv in self._recvs:
                    wanted += analysis.outputs[recv.id]
        results = self._call(edges, gradients, wanted, retain_graph) if wanted else ()
        self._answer(wanted, results, len(leaves))
        # The zip is not strict: what the leaves do not have belongs to the recvs.
        captured = [(leaf.tensor, found) for leaf, found in zip(leaves, results, strict=False) if found is not None]
        if self.callbacks:
            self._owner.flush()  # they may wait for what other workers do with the gradients
            return self.called_back(captured)
        return captured

    def _answer(self, edges: Sequence[GradientEdge], results: Sequence[torch.Tensor | None], at: int) -> None:
        """Answers the recvs that were not delivered, with the results from the number `at` on, if they have any."""
        answers: list[tuple[RecordedRecv, Gradients]] = []
        for recv in self._recvs:
            gradients: list[torch.Tensor | None] = [None] * recv.count
            if not self._delivers and results:
                for _ in self._analysis.outputs[recv.id]:
                    gradients[edges[at].output_nr] = results[at]
                    at += 1
            if recv.id in self._unanswered:
                answers.append((recv, gradients))
        if answers:
            self._owner.answer(answers, bool(self._run.pending))

    def _starts(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges at which the engine starts, and their gradients."""
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        used = self._run.used
        for root in range(self._analysis.local.num_roots):
            if used >> root & 1:
                edges.append(self._analysis.edges[root])
                gradients.append(self._owner.root_gradients[root])
        for id in self._run.arrived:
            for bit, gradient in enumerate(self._owner.gradient(id), self._analysis.first_edges[id]):
                if gradient is not None and used >> bit & 1:
                    edges.append(self._analysis.edges[bit])
                    gradients.append(gradient)
        if self._run.pending:
            edges.append(self._gates())
            gradients.append(torch.zeros(()))
        return edges, gradients

    def _gates(self) -> GradientEdge:
        """The chain of order nodes; see [Note: gates]."""
        chain = torch.zeros((), requires_grad=True)
        orders: list[Any] = []  # torch's stubs lack `_set_sequence_nr`
        with torch.enable_grad():
            for id in reversed(self._run.pending):
                send = self._analysis.sends[id]
                chain = GateOrder.apply(send, chain, send.gate)  # type: ignore[no-untyped-call]
                orders.append(chain.grad_fn)
                self._raise_sequence(send.node)
        for order in orders:
            order._set_sequence_nr(0)
        for node, mask in self._analysis.masks.items():
            if mask & self._run.used:
                self._raise_sequence(node)
        return get_gradient_edge(chain)

    @staticmethod
    def _raise_sequence(node: Any) -> None:
        if node._sequence_nr() == 0:
            node._set_sequence_nr(1)

    # ------------------------------------------------------------ called by nodes (`RunInProgress`)

    def wait_for(self, send: RecordedSend) -> Gradients:
        return self._owner.wait_for_gradient(send)

    def gradient_of(self, send: RecordedSend) -> Gradients:
        return self._owner.gradient(send.id)

    def deliver(self, recv: RecordedRecv, gradients: Gradients) -> None:
        if recv.id in self._unanswered:
            del self._unanswered[recv.id]
            # A run with gates never holds: its gates wait for what others do with the gradient.
            self._owner.answer([(recv, gradients)], bool(self._run.pending))


def _not_ours() -> RuntimeError:
    return RuntimeError("a hook ran an ordinary backward through the graph of a distributed autograd context")


def queue_callback(callback: Callable[[Captured], object]) -> None:
    """Calls a function when the engine call on this thread has ended, before its gradients are added to the context.

    It is for tensor hooks that start work on a gradient and replace it by the result at the end, as the reducer of
    DistributedDataParallel does. Call it inside a tensor hook.

    Args:
        callback: gets the gradients that the engine call returned, by leaf; it may replace them in the dict.

    Raises:
        RuntimeError: no distributed backward runs on this thread.
    """
    run = current_run()
    if not isinstance(run, EngineRun):
        raise RuntimeError("queue_callback is for hooks that run in a distributed backward pass")
    run.callbacks.append(callback)


def is_in_backward() -> bool:
    """Whether a distributed backward pass runs on this thread, and not an ordinary one. For tensor hooks."""
    return current_run() is not None
