"""Distributed autograd of one worker: owns its contexts and backward passes, and handles their messages.

`on_pass` handles the messages of a pass; `on_message` handles all others, and the gRPC service `Autograd`.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2, rpc_pb2, value_pb2
from rpcdist.autograd import _pass_message as pass_message
from rpcdist.autograd._backward_pass import BackwardPass, PassOptions, PassPart
from rpcdist.autograd._context import MAX_PUT_OFF, Context, ContextTable, Releases, make_id, worker_of
from rpcdist.autograd._direct_part import DirectPart, find_sources
from rpcdist.autograd._general_part import GeneralPart
from rpcdist.autograd._graph_analysis import analyse
from rpcdist.autograd._message_nodes import new_edge
from rpcdist.autograd._step_part import Outcome, StepPart, do_work
from rpcdist.deadline import Deadline
from rpcdist.errors import AutogradError, CallRefused, Overloaded, ProtocolViolation, RpcdistError, SerializationError
from rpcdist.ids import Identity
from rpcdist.inspection import ContextFacts, PassFacts
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._peers.network import AnySession, PoolJob
from rpcdist.rpc._serving.active_calls import CALL_BYTES
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.exceptions import add_note
from rpcdist.rpc.future import Future
from rpcdist.time_limits import CONTEXT_DROP_DELAY_S
from rpcdist.transport.io_loop import Timer
from rpcdist.transport.wire_messages import CompactPass


def make_part(owner: BackwardPass, roots: Sequence[GradientEdge]) -> PassPart:
    """The part of this worker in a pass, of the kind that its graph needs. Takes time."""
    context = owner.context
    sends, recvs = context.snapshot()
    if not (owner.options.fast or context.was_general):
        found = find_sources(context.id, roots, sends)
        if found is not None:
            return DirectPart(owner, *found, sends, recvs)
        context.was_general = True
    return GeneralPart(owner, analyse(context.id, roots, sends, recvs))


class AutogradWorker:
    """Distributed autograd of one agent: `rpcdist.rpc._autograd_hooks.AutogradHooks`.

    Attributes:
        pass_taps: functions that get the id, the spans and the messages of each pass when it has ended here.
    """

    def __init__(self, agent: Agent) -> None:
        self.id = agent.identity.id
        self.contexts = ContextTable(self.id)
        self.agent = agent
        self.pass_taps: list[Callable[[int, Sequence[Any], Sequence[Any]], object]] = []
        self._passes: dict[int, BackwardPass] = {}  # those that run, by id
        self._finding = threading.Lock()
        self._releases = Releases(agent)
        self._to_drop: deque[Context] = deque()
        self._drop_timer: Timer | None = None  # I/O loop

    # ------------------------------------------------------------ backward

    def backward(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> None:
        """Runs a pass on this thread and on all workers of the context; blocks."""
        begun, first = self._begin(context_id, roots, PassOptions(mode == "fast", retain_graph, deadline))
        try:
            begun.run_here(first)
        finally:
            del begun, first  # the traceback of an error refers to this frame

    def step(
        self,
        context_id: int,
        work: Mapping[int, bytes],
        own: Callable[[], object],
        deadline: Deadline,
        roots: Sequence[torch.Tensor] | None = None,
    ) -> dict[int, Outcome]:
        """Runs work at owners of parameters, after a pass from `roots` if there are any; blocks.

        `work` has the bytes for each owner; this process calls `own` at the same time. Returns the outcomes by owner.
        """
        part = StepPart(work, own)
        options = PassOptions(self.agent.options.autograd_mode == "fast", False, deadline)
        begun, first = self._begin(context_id, roots, options, then=part)
        try:
            begun.run_here(first)
        except Exception as exc:
            if part.handed is not None:
                may = "has" if part.is_stepping else "may have"
                add_note(exc, f"worker {begun.name_of(part.handed)!r} {may} taken its step; this worker has not")
            raise
        finally:
            begun.then = None
            del begun, first  # as in `backward`
        return part.outcomes

    def backward_async(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> Future[None]:
        """Runs a pass on pool threads and on all workers of the context. Cancelling the future ends the pass."""
        future: Future[None] = Future()
        timers: list[Timer] = []

        def complete(error: BaseException | None) -> None:
            for timer in timers:
                timer.cancel()
            future._complete(None) if error is None else future._fail(error)

        options = PassOptions(mode == "fast", retain_graph, deadline)
        submit = self.agent.pool.submit
        begun, first = self._begin(context_id, roots, options, lambda ended: submit(complete, ended.error))
        future._on_cancel = lambda: begun.fail(AutogradError("the backward pass was cancelled by its caller"))
        if deadline.is_finite:
            timers.append(self.agent.call_later(deadline.remaining_s(), partial(begun.post, begun.expire)))
        begun.post(first)
        return future

    def _begin(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor] | None,
        options: PassOptions,
        on_end: Callable[[BackwardPass], object] = lambda ended: None,
        then: StepPart | None = None,
    ) -> tuple[BackwardPass, Callable[[], object]]:
        """A new pass, and the function that starts it on the thread of the pass: with `then` if there are no roots."""
        context = self.contexts.find(context_id)
        edges = [] if roots is None else _checked_roots(roots)
        gradients = [torch.ones_like(root, requires_grad=False) for root in roots or ()]
        # The id cannot be guessed: a worker that has it got it from the pass.
        begun = self._make_pass(context, make_id(self.id, secrets.randbits(47)), on_end, gradients, options)
        begun.then = then
        self._check(begun)
        return begun, begun.start_step if roots is None else partial(begun.start_part, edges, context.partners(), None)

    def _make_pass(
        self,
        context: Context,
        id: int,
        on_end: Callable[[BackwardPass], object] = lambda ended: None,
        root_gradients: Sequence[torch.Tensor] = (),
        options: PassOptions | None = None,
    ) -> BackwardPass:
        """Makes a pass, and keeps it until it ends. Follow it by `_check`."""
        spans = call_records.exporter
        traceparent, end_span = "", None
        if spans is not None and options is not None:  # the pass begins here
            traceparent, end_span = spans.begin_pass("backward" if root_gradients else "step", id)

        def remove(ended: BackwardPass) -> None:
            self._passes.pop(id, None)
            hops: Sequence[Any] = ended.hops or ()
            try:
                for tap in self.pass_taps:
                    tap(id, ended.spans, hops)
                if spans is not None and ended.traceparent:
                    spans.parts_of_pass(ended.traceparent, [*ended.spans, *hops], ended.name_of)
            finally:  # a user's span processor may raise
                on_end(ended)
                if end_span is not None:
                    end_span(ended.error)

        late = partial(self._answer_late, context, id)
        hops: list[list[Any]] | None = [] if self.pass_taps or spans is not None else None
        options = options or PassOptions()
        made = BackwardPass(self.agent, context, id, make_part, remove, late, root_gradients, options, hops)
        made.traceparent = traceparent
        self._passes[id] = made
        return made

    def _check(self, made: BackwardPass) -> None:
        if made.context.is_released:  # by another thread, whose search for passes may have missed this one
            made.fail(_released(made.context))

    # ------------------------------------------------------------ contexts

    def release(self, context_id: int, told_by: int | None = None) -> Context | None:
        """Ends a context on this worker, and on all participating workers; any thread.

        `told_by` is the neighbour that has ended it, if any. Returns the context, whose graph the caller must drop;
        None if the context has ended or is unknown.
        """
        context = self.contexts.release(context_id)
        if context is None or not context.end():
            return None
        # A worker where a pass has failed does not read, nor return, what comes later.
        for loan in [loan for loans in context.gpu_loans for loan in loans]:
            self.agent.gpus.doubt(loan)
        for current in list(self._passes.values()):
            if current.context is context and not current.is_finishing:
                current.fail(_released(context))
        at_once = told_by is not None or context.is_heavy or not context.is_spent
        self._releases.tell(context.neighbours() - {told_by, self.id}, context_id, at_once)
        return context

    def _released_by(self, worker_id: int, context_id: int) -> None:
        """Ends a context that a neighbour has ended; on the I/O loop.

        The I/O loop must not run the finalizers of user objects in the graph, so a pool thread drops the context: at
        once if it holds much memory, else after `CONTEXT_DROP_DELAY_S`, together with others.
        """
        known = self.contexts.look_up(context_id)
        if worker_of(context_id) != worker_id & 0xFFFF:  # only its creator or a neighbour may end a context
            if known is None:
                self.contexts.refuse(context_id, worker_id)
                return
            if worker_id not in known.neighbours():
                return
        context = self.release(context_id, worker_id)
        if context is None:
            return
        self._to_drop.append(context)
        if not context.is_light():
            self.agent.pool.submit(self._drop)
        elif self._drop_timer is None:
            self._drop_timer = self.agent.call_later(CONTEXT_DROP_DELAY_S, self._drop_soon)

    def _drop_soon(self) -> None:
        self._drop_timer = None
        if not self.agent.is_closed:
            self.agent.pool.submit(self._drop)

    def _drop(self) -> None:
        while self._to_drop:
            self._to_drop.popleft().drop()

    # ------------------------------------------------------------ called by the agent (`AutogradHooks`)

    def admit(self, context_id: int, sender: Identity) -> Context | None:
        return self.contexts.join(context_id, sender.id)

    def counts(self) -> dict[str, str]:
        return {"num_autograd_contexts": str(len(self.contexts)), "num_current_backward_passes": str(len(self._passes))}

    def facts(self, now: float, most: int) -> tuple[list[ContextFacts], list[PassFacts]]:
        name_of = self.agent.directory.name_of
        contexts = [
            ContextFacts(context.id, tuple(sorted(map(name_of, context.neighbours() - {self.id}))))
            for context in self.contexts.oldest(most)
        ]
        return contexts, [current.facts(now) for current in list(self._passes.values())[:most]]

    def worker_lost(self, identity: Identity, exc: Exception) -> None:
        for current in list(self._passes.values()):
            if current.involves(identity.id):
                self.agent.pool.submit(current.lost, identity.id, exc)

    def worker_dead(self, identity: Identity) -> None:
        for context in self.contexts.oldest():
            is_only_caller = context.brought_by == identity.id and context.neighbours() <= {identity.id}
            if worker_of(context.id) == identity.id or is_only_caller:
                self._released_by(identity.id, context.id)

    def flush(self) -> None:
        self._releases.flush()

    def close(self) -> None:
        for current in list(self._passes.values()):
            current.fail(RpcdistError("RPC was shut down in this process during the backward pass"))
        for context in self.contexts.oldest():
            self.contexts.release(context.id)
            context.end()
            context.drop()
        self._drop()

    # ------------------------------------------------------------ messages (I/O loop, or a thread that reads for it)

    def on_pass(
        self, session: AnySession, part: CompactPass, buffers: Sequence[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        self._take(session.peer, part, buffers, session, jobs)

    def announced_gradients(self, sender: Identity, part: CompactPass) -> value_pb2.Value | None:
        context = self.contexts.look_up(part.context)
        if context is None:
            return None
        try:
            return pass_message.announced_gradients(part, sender.id, context.sends)
        except (ProtocolViolation, SerializationError, pass_message.UnknownMessages):  # `on_pass` refuses it
            return None

    def _take(
        self,
        sender: Identity,
        part: CompactPass,
        buffers: Sequence[ReceiveBuffer],
        via: AnySession | None,
        jobs: list[PoolJob],
    ) -> None:
        context = self.contexts.look_up(part.context)
        if pass_message.brings_work(part):
            if via is not None:
                work, weight = pass_message.read_work(part), CALL_BYTES + len(part.body)
                if (refusal := via.account.add(weight, "came with the step of an optimizer")) is not None:
                    self._refuse(sender.id, part.context, part.backward, Overloaded(refusal))
                    return
                jobs.append((do_work, (*work, part.context, part.backward, via, weight)))
            return
        if context is None or not context.takes_part(sender.id):
            asked = self._passes.get(part.backward)  # owners of parameters need not take part in the context
            if asked is None or asked.context is not context or not asked.involves(sender.id):
                context = self._context_of_stranger(sender, part, buffers)
            if context is None:
                return
        try:
            message = pass_message.read_message(part, buffers, sender.id, context.sends)
        except pass_message.UnknownMessages as exc:
            self._refuse(sender.id, part.context, part.backward, exc)
            return
        current = self._passes.get(part.backward)
        if current is None or current.context is not context:
            current = self._pass_of(context, part.backward)
        if current is not None:
            current.receive(sender.id, message, via, jobs)
        elif message.begins:
            self._answer_late(context, part.backward, sender.id)

    def _context_of_stranger(
        self, sender: Identity, part: CompactPass, buffers: Sequence[ReceiveBuffer]
    ) -> Context | None:
        """The context of a message from a worker that is not known to take part; None if it does not join now."""
        if not pass_message.begins(part, buffers):
            return None
        try:
            context = self.admit(part.context, sender)
        except CallRefused as exc:
            self._refuse(sender.id, part.context, part.backward, exc)
            return None
        if context is None:
            over = AutogradError(f"autograd context {part.context} is over there")
            self._refuse(sender.id, part.context, part.backward, over)
        return context

    def _pass_of(self, context: Context, backward: int) -> BackwardPass | None:
        """The pass of a message, made for its first message; None if the pass has ended."""
        with self._finding:  # messages of a pass may arrive on several threads at once, and make one pass
            current = self._passes.get(backward)
            if current is not None and current.context is context:
                return current
            if backward in context.ended_passes or worker_of(backward) == self.id & 0xFFFF:
                return None  # a pass that began here is known, or does not exist
            made = self._make_pass(context, backward)
        self._check(made)
        return made

    def _answer_late(self, context: Context, backward: int, sender: int) -> None:
        """Answers a begin that came after the pass has ended here: this worker received nothing from that neighbour."""
        error = context.ended_passes.get(backward)
        if error is not None:
            self._refuse(sender, context.id, backward, error)
        elif backward in context.ended_passes:
            answer = pass_message.PassMessage()
            answer.begins = True
            self.agent.router.send_if_alive(sender, answer.encode(context.id, backward)[0])

    def on_message(
        self, sender: Identity, message: autograd_pb2.AutogradMessage, buffers: Sequence[ReceiveBuffer]
    ) -> None:
        kind = message.WhichOneof("body")
        if kind == "release":
            if len(message.release.others) > MAX_PUT_OFF:
                raise ProtocolViolation(f"the end of {len(message.release.others)} contexts arrived at once")
            for context_id in (message.context, *message.release.others):
                self._released_by(sender.id, context_id)
        elif kind == "aborted":
            self._aborted_by(sender, message)
        elif kind == "part":
            jobs: list[PoolJob] = []
            self._take(sender, CompactPass(message.context, message.backward, message.part), buffers, None, jobs)
            for function, arguments in jobs:
                self.agent.pool.submit(function, *arguments)

    def _aborted_by(self, sender: Identity, message: autograd_pb2.AutogradMessage) -> None:
        """A pass failed on another worker. Any worker that a pass has reached may report that where the pass began."""
        context = self.contexts.look_up(message.context)
        is_ours = worker_of(message.backward) == self.id & 0xFFFF
        if context is None or not (is_ours or context.takes_part(sender.id)):
            return
        error = pass_message.decode_error(message.aborted)
        with self._finding:
            current = self._passes.get(message.backward)
            if current is None or current.context is not context:
                context.ended_passes.setdefault(message.backward, error)
                return
        self.agent.pool.submit(current.abort, error)

    def _refuse(self, sender: int, context: int, backward: int, error: BaseException) -> None:
        answer = autograd_pb2.AutogradMessage(context=context, backward=backward)
        pass_message.encode_error(error, self.id, self.agent.identity.name, answer.aborted)
        self.agent.router.send_if_alive(sender, rpc_pb2.Message(autograd=answer))


def _released(context: Context) -> AutogradError:
    return AutogradError(f"autograd context {context.id} was released during its backward pass")


def _checked_roots(roots: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """The edges of the roots; raises torch's errors for unusable roots."""
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise AutogradError("requires_grad not set on root")
        if root.numel() != 1:
            raise AutogradError(f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise AutogradError(f"a root of shape {tuple(root.shape)} does not have a valid gradient function.")
    return [new_edge((root.grad_fn, root.output_nr, None)) for root in roots]
