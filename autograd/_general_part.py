"""A worker's part in a backward pass that needs verdicts: carries out what the pure state machine `PassState` decides.

Threads: the events are handled one after the other by the thread of the pass. A run that blocks has a pool thread of
its own.

[Note: gradients of recvs]
    The engine delivers the gradients of received tensors in one of two ways. For gradients at their edges, it returns
    them at the end, and does not execute `RecvRpc`, which costs as much as a matrix multiplication of a
    small model. For the gradient of the token, on which every recv depends, it executes `RecvRpc`, whose `backward`
    sends them at once. The second way is for long runs, so that the next worker can begin during the run; for gates,
    which wait for results of these gradients; and for nodes of recvs that have hooks.

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
from collections.abc import Collection, Iterable, Sequence
from functools import partial, reduce
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rpcdist.autograd._backward_pass import BackwardPass, PassPart
from rpcdist.autograd._direct_part import MAX_HELD_BYTES
from rpcdist.autograd._graph_analysis import MAX_NODES_BEFORE_SENDING, Analysis
from rpcdist.autograd._message_nodes import DUMMY_DEVICE, EngineRun, GateOrder, Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.autograd._verdicts import Actions, PassState, Run
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.time_limits import BATCH_DELAY_S


class GeneralPart(PassPart):
    """One worker's part."""

    def __init__(self, owner: BackwardPass, analysis: Analysis) -> None:
        self.owner = owner
        self.ready: list[Run] = []  # executed by the thread that handles events
        self._analysis = analysis
        self._state = PassState(owner.me, owner.options.fast)
        self._lock = RLock()
        self._changed: threading.Condition | None = None  # made for the first gate; most passes have none
        self.gradients: dict[int, Gradients] = {}  # those of sends that have arrived
        self._is_closed = False
        self._held_bytes = 0  # of gradients that wait for the end of the turn
        self._held_since = 0.0

    def take_part(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        for sender, message in early:  # kept until the start, so that the first messages include their consequences
            self.take(sender, message)
        self._act(self._state.start_part(self._analysis.local, neighbours, self.owner.parent))

    def take(self, sender: int, message: PassMessage) -> None:
        used = self._keep_gradients(zip(message.messages, message.gradients, strict=True)) if message.messages else {}
        self._act(self._state.take(sender, message.begins, message.is_child, message.named(), used, message.is_done))

    def waits_for(self) -> dict[int, str]:
        return self._state.waits_for()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._changed is not None:
                self._changed.notify_all()

    # ------------------------------------------------------------ the state machine

    def _act(self, actions: Actions) -> None:
        owner = self.owner
        for action in actions:
            if not isinstance(action, Run):
                with owner.lock:
                    message = owner.message_to(action.to)
                    if action.begins:
                        message.begins, message.is_child = True, action.is_child
                    message.verdicts.update(action.verdicts)
            elif action.pending:
                owner.flush()  # its gates wait for what other workers do with these messages
                owner.submit(partial(owner.guarded, partial(self._execute_blocking, action)))
            else:
                self.ready.append(action)
        if self._state.is_done:
            owner.finish()

    def run_ready(self) -> None:
        """Runs all ready groups in one engine call: a hundred small groups would cost a hundred calls."""
        ready = self.ready
        run = ready[0] if len(ready) == 1 else reduce(Run.with_, ready)
        ready.clear()
        takes_long = self._takes_long(run)
        if takes_long:
            self.owner.flush()
        self._execute(run, takes_long)
        self._ended(run)

    def _takes_long(self, run: Run) -> bool:
        """Whether the other workers should prepare during the run: for large gradients or a large graph."""
        analysis = self._analysis
        if sum([analysis.recvs[id].size_bytes for id in run.recvs]) > MAX_HELD_BYTES:
            return True
        if len(analysis.masks) <= MAX_NODES_BEFORE_SENDING:
            return False
        reached = (1 for mask in analysis.masks.values() if mask & run.used)
        return next(islice(reached, MAX_NODES_BEFORE_SENDING, None), 0) == 1

    def _execute_blocking(self, run: Run) -> None:
        self._execute(run, True)
        self.owner.post(partial(self._ended, run))

    def _execute(self, run: Run, takes_long: bool) -> None:
        began_s = time.time()
        GroupRun(self, self._analysis, run, takes_long).execute()
        self.owner.spans.append(("run", -1, began_s, time.time()))

    def _ended(self, run: Run) -> None:
        self._state.ended(run)
        self._act([])

    # ------------------------------------------------------------ gradients of sends and recvs

    def _keep_gradients(self, arrived: Iterable[tuple[int, Gradients]]) -> dict[int, int]:
        """Keeps gradients of sends; returns, by message, which of its tensors have one."""
        to_original_devices = self.owner.context.to_original_devices
        gradients = {message: to_original_devices(message, found) for message, found in arrived}
        with self._lock:
            self.gradients.update(gradients)
            if self._changed is not None:
                self._changed.notify_all()
        return {
            message: sum([1 << index for index, one in enumerate(found) if one is not None])
            for message, found in gradients.items()
        }

    def wait_for_gradient(self, send: RecordedSend) -> None:
        """Blocks until the gradient of a send has arrived."""
        owner = self.owner
        began_s = time.time()
        with self._lock, blocking():
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            self._changed.wait_for(
                lambda: send.id in self.gradients or self._is_closed, owner.options.deadline.wait_s()
            )
        owner.spans.append(("gate", send.to, began_s, time.time()))
        if send.id in self.gradients:
            return
        if owner.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from owner.error
        text = f"the gradient of what was sent to worker {owner.name_of(send.to)!r} did not come in time"
        raise DeadlineExceeded(text)

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]], at_once: bool) -> None:
        """Sends the gradients of recvs to the senders of their messages; small ones wait for more unless `at_once`."""
        owner = self.owner
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
            is_due = self._held_bytes > MAX_HELD_BYTES or now - self._held_since > BATCH_DELAY_S
        if at_once or is_due:
            self.flush()

    def flush(self) -> None:
        """Sends the gradients that wait for more."""
        self._held_since, self._held_bytes = 0.0, 0
        self.owner.flush()

    def _take_own(self, own: Sequence[tuple[int, Gradients]]) -> None:
        """Handles gradients of messages that this worker sent to itself."""
        arrived = [(id, [None if one is None else one.detach() for one in gradients]) for id, gradients in own]
        self._act(self._state.take(self.owner.me, used=self._keep_gradients(arrived)))


class GroupRun(EngineRun):
    """One call of the engine, which runs one or several groups.

    Args:
        sends_early: whether other workers should get gradients before the engine has ended; see the note above.
    """

    def __init__(self, part: GeneralPart, analysis: Analysis, run: Run, sends_early: bool) -> None:
        super().__init__()
        self._part = part
        self._analysis = analysis
        self._run = run
        recvs = [analysis.recvs[id] for id in run.recvs]
        self._delivers = sends_early or bool(run.pending) or any([recv.is_hooked for recv in recvs])
        self._unanswered = {recv.id: recv for recv in recvs}

    def execute(self) -> None:
        """Runs, answers every recv, and collects the gradients of leaves. Blocks only if there are gates."""
        analysis, owner, used = self._analysis, self._part.owner, self._run.used
        edges, gradients = self._starts()
        leaves = [leaf for leaf in analysis.leaves if analysis.masks[leaf] & used]
        received: dict[int, list[torch.Tensor | None]] = {
            id: [None] * recv.count for id, recv in self._unanswered.items()
        }
        outputs = [] if self._delivers else [edge for id in received for edge in analysis.outputs[id]]
        is_executed = self._delivers and bool(received)
        captured = self.run_apart(edges, gradients, leaves, outputs, received, owner.options.retain_graph, is_executed)
        if self._unanswered:
            answers = [(recv, received[id]) for id, recv in self._unanswered.items()]
            self._part.answer(answers, bool(self._run.pending))
        if self.callbacks:
            self._part.flush()  # they may wait for what other workers do with the gradients
            captured = self.called_back(captured)
        if captured:
            owner.context.gradients.add(captured)

    def _starts(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges at which the engine starts, and their gradients."""
        analysis, used = self._analysis, self._run.used
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        found: list[tuple[int, Gradients]] = [(0, self._part.owner.root_gradients)]
        found += [(analysis.sends[id][1], self._part.gradients[id]) for id in self._run.arrived]
        for first, of_message in found:
            for bit, gradient in enumerate(of_message, first):
                if gradient is not None and used >> bit & 1:
                    edges.append(analysis.edges[bit])
                    gradients.append(gradient)
        if self._run.pending:
            edges.append(self._gates())
            gradients.append(torch.zeros((), device=DUMMY_DEVICE))
        return edges, gradients

    def _gates(self) -> GradientEdge:
        """The chain of order nodes; see [Note: gates]."""
        chain = torch.zeros((), device=DUMMY_DEVICE, requires_grad=True)
        orders: list[Any] = []  # torch's stubs lack `_set_sequence_nr`
        others: list[Any] = [node for node, mask in self._analysis.masks.items() if mask & self._run.used]
        with torch.enable_grad():
            for id in reversed(self._run.pending):
                send, _ = self._analysis.sends[id]
                chain = GateOrder.apply(send, chain, send.gate)  # type: ignore[no-untyped-call]
                orders.append(chain.grad_fn)
                others.append(send.node)
        for order in orders:
            order._set_sequence_nr(0)
        for node in others:
            if node._sequence_nr() == 0:
                node._set_sequence_nr(1)
        return get_gradient_edge(chain)

    # ------------------------------------------------------------ called by nodes

    def wait_for(self, send: RecordedSend) -> None:
        self._part.wait_for_gradient(send)

    def gradient_of(self, message: int) -> Gradients:
        return self._part.gradients[message]

    def deliver(self, recv: RecordedRecv, gradients: Gradients) -> None:
        if self._unanswered.pop(recv.id, None) is not None:
            # A run with gates sends at once: its gates wait for results that depend on the gradient.
            self._part.answer([(recv, gradients)], bool(self._run.pending))
