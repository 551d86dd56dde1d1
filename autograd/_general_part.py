"""A worker's part in a backward pass that needs verdicts: carries out what the pure state machine `PassState` decides.

Threads: the events are handled one after the other by the thread of the pass. A run that blocks has a pool thread of
its own.

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

import threading
import time
from _thread import RLock
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rpcdist.autograd._direct_part import MAX_HELD_BYTES
from rpcdist.autograd._graph_analysis import MAX_NODES_BEFORE_SENDING, Analysis
from rpcdist.autograd._message_nodes import (
    EngineRun,
    GateOrder,
    Gradients,
    LeafGradients,
    RecordedRecv,
    RecordedSend,
    token_edge,
)
from rpcdist.autograd._pass_events import (
    ChildDone,
    Decided,
    Finished,
    GradientArrived,
    GroupEnded,
    PassEvent,
    PeerBegan,
    Run,
    SendBegin,
    SendDone,
    Started,
)
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.autograd._pass_sender import PassOwner
from rpcdist.autograd._verdicts import PassState
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.time_limits import GRADIENT_HOLD_LIMIT_S


class GeneralPart:
    """One worker's part."""

    def __init__(self, owner: PassOwner, analysis: Analysis) -> None:
        self._owner = owner
        self._analysis = analysis
        self._state = PassState(owner.me, owner.options.fast)
        self._gradients = ArrivedGradients()
        self._ready: list[Run] = []  # executed by the thread that handles events
        self._held_bytes = 0  # of gradients that wait for the end of the turn
        self._held_since = 0.0

    def start(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        """Begins, with the messages that came before; `neighbours` are all workers to begin with."""
        for sender, message in early:  # kept until the start, so that the first messages have its consequences
            self.take(sender, message)
        self._handle(Started(self._analysis.local, frozenset(neighbours), self._owner.parent))

    def take(self, sender: int, message: PassMessage) -> None:
        """Handles a neighbour's message; only on the thread that handles the events of the pass."""
        events: list[PassEvent] = []
        if message.begins:
            events.append(PeerBegan(sender, message.is_child, message.named()))
        elif message.verdicts:
            events.append(Decided(sender, message.verdicts))
        if message.messages:
            events += self._keep_gradients(zip(message.messages, message.gradients, strict=True))
        if message.is_done:
            events.append(ChildDone(sender))
        if events:
            self._handle(*events)

    def next_step(self) -> Any:
        """The next step when all events are handled: the runs that they made ready; None if nothing is left."""
        return self._execute_ready if self._ready else None

    def waits_for(self) -> dict[int, str]:
        """The reasons why the pass has not ended on this worker, by the worker that it waits for."""
        return self._state.waits_for()

    def close(self) -> None:
        """Ends all waits: the pass is over."""
        self._gradients.close()

    # ------------------------------------------------------------ the state machine

    def _handle(self, *events: PassEvent) -> None:
        owner = self._owner
        for action in self._state.handle(*events):
            if isinstance(action, Run):
                if action.pending:
                    owner.flush()  # its gates wait for what other workers do with these messages
                    owner.submit(partial(owner.guarded, partial(self._execute_blocking, action)))
                else:
                    self._ready.append(action)
            elif isinstance(action, Finished):
                owner.finish()
            elif isinstance(action, SendDone):
                owner.finish()
            else:
                with owner.lock:
                    message = owner.message_to(action.to)
                    if isinstance(action, SendBegin):
                        message.begins, message.is_child = True, action.child
                        message.verdicts.update(action.received)
                    else:
                        message.verdicts.update(action.verdicts)

    def _execute_ready(self) -> None:
        """Runs all ready groups in one engine call: a hundred small groups would cost a hundred calls."""
        ready = self._ready
        run = ready[0] if len(ready) == 1 else reduce(Run.with_, ready)
        ready.clear()
        takes_long = self._takes_long(run)
        if takes_long:
            self._owner.flush()
        self._execute(run, takes_long)
        self._handle(*map(GroupEnded, run.groups))

    def _takes_long(self, run: Run) -> bool:
        """Whether the other workers should prepare meanwhile: for large gradients, or while a large graph runs."""
        analysis = self._analysis
        if sum([analysis.recvs[id].size_bytes for id in run.recvs]) > MAX_HELD_BYTES:
            return True
        if len(analysis.masks) <= MAX_NODES_BEFORE_SENDING:
            return False
        num_nodes = sum([size for bit, size in enumerate(analysis.sizes) if run.used >> bit & 1])
        return num_nodes > MAX_NODES_BEFORE_SENDING

    def _execute_blocking(self, run: Run) -> None:
        self._execute(run, True)
        self._owner.post(partial(self._handle, *map(GroupEnded, run.groups)))

    def _execute(self, run: Run, takes_long: bool) -> None:
        began_s = time.time()
        GroupRun(self, self._analysis, run, takes_long).execute(self._owner.options.retain_graph)
        self._owner.spans.append(("run", -1, began_s, time.time()))

    # ------------------------------------------------------------ for runs

    def _keep_gradients(self, arrived: Any) -> list[PassEvent]:
        at_home = self._owner.context.at_home
        gradients = {message: at_home(message, found) for message, found in arrived}
        self._gradients.add(gradients)
        return [GradientArrived(message, _mask_of(found)) for message, found in gradients.items()]

    @property
    def root_gradients(self) -> Sequence[torch.Tensor]:
        """The gradients of the roots, by their number."""
        return self._owner.root_gradients

    def gradient(self, message: int) -> Gradients:
        """The gradient of a send that has arrived."""
        return self._gradients[message]

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        """The gradient of a send; blocks until it has arrived."""
        owner = self._owner
        began_s = time.time()
        arrived = self._gradients.wait(send.id, owner.options.deadline)
        owner.spans.append(("gate", send.to, began_s, time.time()))
        if arrived is not None:
            return arrived
        if owner.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from owner.error
        raise DeadlineExceeded(
            f"the gradient of what was sent to worker {owner.name_of(send.to)!r} did not come in time"
        )

    def collect(self, captured: LeafGradients) -> None:
        """Adds the gradients of leaves to the context."""
        self._owner.context.gradients.add(captured)

    def flush(self) -> None:
        """Sends the gradients that wait for more."""
        self._held_since, self._held_bytes = 0.0, 0
        self._owner.flush()

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]], at_once: bool) -> None:
        """Sends the gradients of recvs to the senders of their messages; small ones wait for more unless `at_once`."""
        owner = self._owner
        own = [(recv.id, gradients) for recv, gradients in answers if recv.sender == owner.me]
        if own:
            owner.post(partial(self._take_own, own))
        now = time.monotonic()
        with owner.lock:
            self._held_since = self._held_since or now
            for recv, gradients in answers:
                if recv.sender != owner.me:
                    owner.message_to(recv.sender).add_gradients(recv.id, gradients)
                    self._held_bytes += recv.size_bytes
            is_due = self._held_bytes > MAX_HELD_BYTES or now - self._held_since > GRADIENT_HOLD_LIMIT_S
        if at_once or is_due:
            self.flush()

    def _take_own(self, own: Sequence[tuple[int, Gradients]]) -> None:
        """Handles gradients of messages that this worker sent to itself."""
        self._handle(
            *self._keep_gradients(
                (id, [None if one is None else one.detach() for one in gradients]) for id, gradients in own
            )
        )


class GroupRun(EngineRun):
    """One call of the engine, which runs one or several groups.

    Args:
        sends_early: whether others should get gradients before the engine has ended; see the note above.
    """

    def __init__(self, owner: GeneralPart, analysis: Analysis, run: Run, sends_early: bool) -> None:
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

    # ------------------------------------------------------------ called by nodes

    def wait_for(self, send: RecordedSend) -> Gradients:
        return self._owner.wait_for_gradient(send)

    def gradient_of(self, send: RecordedSend) -> Gradients:
        return self._owner.gradient(send.id)

    def deliver(self, recv: RecordedRecv, gradients: Gradients) -> None:
        if recv.id in self._unanswered:
            del self._unanswered[recv.id]
            # A run with gates never holds: its gates wait for what others do with the gradient.
            self._owner.answer([(recv, gradients)], bool(self._run.pending))


def _mask_of(gradients: Gradients) -> int:
    """Which of the tensors of a message have a gradient."""
    mask = 0
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            mask |= 1 << index
    return mask


class ArrivedGradients:
    """Gradients by message. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._changed: threading.Condition | None = None  # made for the first gate; most passes have none
        self._gradients: dict[int, Gradients] = {}
        self._is_closed = False

    def __getitem__(self, message: int) -> Gradients:
        return self._gradients[message]

    def add(self, gradients: Mapping[int, Gradients]) -> None:
        with self._lock:
            self._gradients.update(gradients)
            if self._changed is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits: the pass is over."""
        with self._lock:
            self._is_closed = True
            if self._changed is not None:
                self._changed.notify_all()

    def wait(self, message: int, deadline: Deadline) -> Gradients | None:
        """The gradients of a message; blocks until they are there. None when the time or the pass is over."""
        with self._lock, blocking():
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            self._changed.wait_for(lambda: message in self._gradients or self._is_closed, deadline.wait_s())
            return self._gradients.get(message)
