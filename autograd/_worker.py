"""Distributed autograd of one worker: its contexts, its passes, and what arrives for them.

Each message has one handler, `on_message`; the sessions' envelopes and the gRPC service `Autograd` both feed it.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._autograd_errors import AutogradError, BackwardError
from rpcdist.autograd._context import Context, ContextTable, make_id, worker_of
from rpcdist.autograd._message_nodes import Gradients
from rpcdist.autograd._pass_events import ChildDone, Decided, PeerBegan
from rpcdist.autograd._passes import BackwardPass
from rpcdist.autograd._wire_format import decode_verdicts
from rpcdist.deadline import Deadline
from rpcdist.errors import RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import AutogradHost
from rpcdist.rpc._executors.timers import Timer
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values import LargeBuffer, ReceiveBuffer, decode, encode_into
from rpcdist.rpc._values.failures import text_of
from rpcdist.rpc.future import Future
from rpcdist.time_limits import CONTEXT_DROP_DELAY_S

__all__ = ["AutogradWorker"]

logger = logging.getLogger(__name__)


class AutogradWorker:
    """One per agent; see `rpcdist.rpc._autograd_hooks.AutogradHooks`."""

    def __init__(self, host: AutogradHost) -> None:
        self.id = host.identity.id
        self.contexts = ContextTable(self.id, host.identity.incarnation)
        self.host = host
        self._passes = itertools.count(1)
        self._to_drop: deque[Context] = deque()
        self._drop_timer: Timer | None = None  # I/O loop

    def __repr__(self) -> str:
        return f"<AutogradWorker of {self.host.identity.name} [{len(self.contexts)} contexts]>"

    # ------------------------------------------------------------ what passes need

    def name_of(self, worker_id: int) -> str:
        return self.host.worker_name_of(worker_id)

    def origin_of(self, pass_id: int) -> int:
        return worker_of(pass_id)

    def submit(self, function: Callable[..., object], *arguments: object) -> None:
        self.host.submit(function, *arguments)

    def send(
        self,
        to: int,
        body: autograd_pb2.AutogradMessage,
        owner: BackwardPass | None = None,
        large: Sequence[LargeBuffer] = (),
    ) -> None:
        """Sends a message of a pass; any thread. If it cannot be sent, the pass fails."""
        observer = None if owner is None else _PassObserver(self, owner, to)
        try:
            self.host.send(to, body, large, observer)
        except RpcdistError as exc:
            if owner is not None:
                owner.fail(self._lost(to, str(exc)))
            else:
                logger.debug("not sent to worker %s: %s", to, exc)

    def send_gradients(
        self, to: int, body: autograd_pb2.AutogradMessage, gradients: list[Gradients], owner: BackwardPass
    ) -> None:
        large = encode_into(body.gradients.value, gradients, None, map_device=self.host.device_map(to))
        self.send(to, body, owner, large)

    def spread(self, workers: Iterable[int], body: autograd_pb2.AutogradMessage) -> None:
        """Sends a message to everybody who is there."""
        for worker in set(workers) - {self.id}:
            self.send(worker, body)

    def _lost(self, worker_id: int, reason: str) -> WorkerLost:
        silence_s = self.host.silence_s(worker_id)
        return WorkerLost(self.name_of(worker_id), "a backward pass", silence_s, reason)

    # ------------------------------------------------------------ backward

    def backward(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> None:
        """Runs a pass on this thread and everywhere; blocks."""
        begun, first = self._begin(context_id, roots, retain_graph, mode, deadline)
        begun.run_here(first)

    def backward_async(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> Future[None]:
        """The same, on pool threads. Cancelling the future ends the pass."""
        begun, first = self._begin(context_id, roots, retain_graph, mode, deadline)
        future: Future[None] = Future()
        timer: list[Timer] = []

        def ended() -> None:
            for started in timer:
                started.cancel()
            if begun.error is None:
                future._complete(None)
            else:
                future._fail(begun.error)

        begun.on_end = lambda: self.submit(ended)
        future._on_cancel = lambda: begun.fail(AutogradError("the backward pass was cancelled by its caller"))
        if deadline.is_finite:
            timer.append(self.host.call_later(deadline.remaining_s(), begun.expire))
        begun.post(first)
        return future

    def _begin(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> tuple[BackwardPass, Callable[[], object]]:
        context = self.contexts.find(context_id)
        edges = _checked_roots(roots)
        begun = BackwardPass(self, context, make_id(self.id, next(self._passes)))
        begun.prepare(mode == "fast", retain_graph, deadline)
        begun.root_gradients = [torch.ones_like(root, requires_grad=False) for root in roots]
        context.passes[begun.id] = begun
        return begun, partial(begun.start, edges, context.neighbours(), None)

    # ------------------------------------------------------------ contexts

    def release(self, context_id: int, told_by: int | None = None) -> Context | None:
        """Ends a context here, and on all workers that took part; any thread.

        Returns:
            The context, whose graph still has to be dropped; None if it is not there.
        """
        context = self.contexts.release(context_id)
        if context is None or not context.end():
            return None
        for current in list(context.passes.values()):
            current.fail(AutogradError(f"autograd context {context_id} was released during its backward pass"))
        body = autograd_pb2.AutogradMessage(context=context_id)
        body.release.SetInParent()
        for worker in context.neighbours() - {told_by, self.id}:
            if not self.host.is_closed:
                self.host.send_control(worker, body)
        return context

    def _released_by(self, worker_id: int, context_id: int) -> None:
        """A neighbour says that a context is over; on the I/O loop, which must not drop what users put into a graph.

        A thread is woken for that at once if much memory is held; else, after a moment, for all contexts that ended.
        """
        context = self.release(context_id, worker_id)
        if context is None:
            return
        self._to_drop.append(context)
        if not context.is_light():
            self.submit(self._drop)
        elif self._drop_timer is None:
            self._drop_timer = self.host.call_later(CONTEXT_DROP_DELAY_S, self._drop_soon)

    def _drop_soon(self) -> None:
        self._drop_timer = None
        if not self.host.is_closed:
            self.submit(self._drop)

    def _drop(self) -> None:
        while self._to_drop:
            self._to_drop.popleft().drop()

    # ------------------------------------------------------------ hooks of calls

    def admit(self, context_id: int, sender: Identity) -> Context | None:
        context = self.contexts.join(context_id)
        if context is not None:
            context.called_by(sender.id)
        return context

    def counts(self) -> dict[str, str]:
        passes = sum(len(context.passes) for context in self.contexts.all())
        return {"num_autograd_contexts": str(len(self.contexts)), "num_current_backward_passes": str(passes)}

    def worker_lost(self, identity: Identity, exc: Exception) -> None:
        for context in self.contexts.all():
            for current in list(context.passes.values()):
                if current.involves(identity.id) or worker_of(current.id) == identity.id:
                    self.submit(current.fail, exc)

    def worker_dead(self, identity: Identity) -> None:
        for context in self.contexts.all():
            if worker_of(context.id) == identity.id:
                self._released_by(identity.id, context.id)

    def close(self) -> None:
        for context in self.contexts.all():
            for current in list(context.passes.values()):
                current.fail(RpcdistError("RPC was shut down in this process during the backward pass"))
            self.contexts.release(context.id)
            context.end()
            context.drop()
        self._drop()

    # ------------------------------------------------------------ what arrives (I/O loop)

    def on_message(
        self, sender: Identity, message: autograd_pb2.AutogradMessage, buffers: Sequence[ReceiveBuffer]
    ) -> None:
        kind = message.WhichOneof("body")
        if kind == "release":
            self._released_by(sender.id, message.context)
            return
        context = self.contexts.join(message.context) if kind == "begin" else self.contexts.look_up(message.context)
        if context is None:
            if kind == "begin":
                self._refuse(sender, message, AutogradError(f"autograd context {message.context} is over there"))
            return
        current = self._pass_of(context, message, sender)
        if current is None:
            return
        if kind == "begin":
            current.post(
                lambda: _begin_with(current, sender.id, message.begin), current.can_wait(sender.id, message.begin)
            )
        elif kind == "verdicts":
            current.handle_soon(Decided(sender.id, decode_verdicts(message.verdicts)))
        elif kind == "gradients":
            plain_only = not self.host.allow_pickle
            read = partial(decode, message.gradients.value, buffers, None, plain_only=plain_only)
            current.gradients_arrived(list(message.gradients.messages), read)
        elif kind == "done":
            current.handle_soon(ChildDone(sender.id))
        elif kind == "aborted":
            self.submit(current.abort, _error_of(message.aborted))

    def _pass_of(
        self, context: Context, message: autograd_pb2.AutogradMessage, sender: Identity
    ) -> BackwardPass | None:
        """The pass of a message, made for the first one; None if it is over."""
        current = context.passes.get(message.backward)
        if current is not None:
            return current
        if message.backward in context.ended_passes:
            if message.WhichOneof("body") == "begin":
                self._answer_late(context, sender, message)
            return None
        if message.WhichOneof("body") == "aborted":
            context.ended_passes[message.backward] = _error_of(message.aborted)
            return None
        current = context.passes[message.backward] = BackwardPass(self, context, message.backward)
        return current

    def _answer_late(self, context: Context, sender: Identity, message: autograd_pb2.AutogradMessage) -> None:
        """A neighbour that this worker did not know begins after the pass ended here: nothing came from it."""
        error = context.ended_passes[message.backward]
        if error is not None:
            self._refuse(sender, message, error)
            return
        answer = autograd_pb2.AutogradMessage(context=message.context, backward=message.backward)
        answer.begin.received.SetInParent()
        self.send(sender.id, answer)

    def _refuse(self, sender: Identity, message: autograd_pb2.AutogradMessage, error: BaseException) -> None:
        answer = autograd_pb2.AutogradMessage(context=message.context, backward=message.backward)
        answer.aborted.worker, answer.aborted.worker_name = self.id, self.host.identity.name
        answer.aborted.type_name, answer.aborted.text = type(error).__qualname__, text_of(error)
        self.send(sender.id, answer)


class _PassObserver:
    """Hears when a message of a pass could not be sent (`SendObserver`)."""

    __slots__ = ("_owner", "_to", "_worker")

    def __init__(self, worker: AutogradWorker, owner: BackwardPass, to: int) -> None:
        self._worker = worker
        self._owner = owner
        self._to = to

    @property
    def ended(self) -> bool:
        # A pass that is done here still owes the others what it has sent last.
        return self._owner.error is not None

    def on_sent(self, session: MessageSink, transfer: int) -> None:
        if session.closed_reason is not None:
            self._worker.submit(self._owner.fail, self._worker._lost(self._to, session.closed_reason))

    def on_not_sent(self, silence_s: float, reason: str) -> None:
        lost = WorkerLost(self._worker.name_of(self._to), "a backward pass", silence_s, reason)
        self._worker.submit(self._owner.fail, lost)


def _begin_with(current: BackwardPass, sender: int, begin: autograd_pb2.BackwardBegin) -> None:
    event = PeerBegan(sender, begin.child, decode_verdicts(begin.received))
    if current.is_started:
        current.handle(event)
        return
    deadline = Deadline.after(begin.timeout_us / 1e6 if begin.timeout_us else None)
    current.prepare(begin.fast, begin.retain_graph, deadline)
    current.handle(event)  # kept until the start, whose messages can thus tell what follows from it
    current.start((), current.context.neighbours() | {sender}, sender)


def _error_of(aborted: autograd_pb2.BackwardAborted) -> BackwardError:
    return BackwardError(aborted.worker, aborted.worker_name, aborted.type_name, aborted.text, aborted.traceback)


def _checked_roots(roots: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """The edges of the roots; raises what torch raises for unusable ones."""
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise AutogradError("requires_grad not set on root")
        if root.numel() != 1:
            raise AutogradError(f"a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise AutogradError(f"a root of shape {tuple(root.shape)} does not have a valid gradient function.")
    return [torch.autograd.graph.get_gradient_edge(root) for root in roots]
