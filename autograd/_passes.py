"""One backward pass on one worker: feeds events to the pure machine, and carries out its actions.

Threads: `post` may be called anywhere, also on the I/O loop, and never waits. Events are handled one after the other,
by the thread that waits for the pass (where it began) or by a pool thread. Runs that block have pool threads of their
own.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._autograd_errors import BackwardError
from rpcdist.autograd._context import Context
from rpcdist.autograd._engine_runs import GroupRun
from rpcdist.autograd._graph_analysis import Analysis, analyse
from rpcdist.autograd._message_nodes import Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._pass_events import (
    Action,
    Event,
    Finished,
    GradientArrived,
    GroupEnded,
    Run,
    SendBegin,
    SendDone,
    SendVerdicts,
    Started,
    Verdicts,
)
from rpcdist.autograd._verdicts import PassState
from rpcdist.autograd._wire_format import encode_verdicts
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._values.failures import text_of, traceback_of

if TYPE_CHECKING:
    from rpcdist.autograd._worker import AutogradWorker

__all__ = ["BackwardPass"]

logger = logging.getLogger(__name__)

Job = Callable[[], object]


class BackwardPass:
    """See the module.

    Args:
        worker: of this process.
        context: whose backward it is.
        id: of the pass; its high bits are the worker where it began.
    """

    def __init__(self, worker: AutogradWorker, context: Context, id: int) -> None:
        self.context = context
        self.id = id
        self.root_gradients: list[torch.Tensor] = []
        self.error: BaseException | None = None
        self.is_over = False
        self.on_end: Callable[[], object] | None = None
        self._worker = worker
        self._state = PassState(worker.id)
        self._analysis: Analysis | None = None
        self._counts: dict[int, int] = {}
        self._retain_graph = False
        self._deadline = Deadline.after(None)
        self._gradients: dict[int, Gradients] = {}
        self._involved: set[int] = set()
        self._changed = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._ready: list[Run] = []  # for the thread that handles events
        self._is_draining = False
        self._has_waiter = False

    def __repr__(self) -> str:
        return f"<BackwardPass {self.id:#x} of {self.context!r}: {self._state!r}>"

    # ------------------------------------------------------------ beginning

    def prepare(self, fast: bool, retain_graph: bool, deadline: Deadline) -> None:
        """Sets what all workers of the pass agree on."""
        self._state.fast = fast
        self._retain_graph = retain_graph
        self._deadline = deadline

    @property
    def is_started(self) -> bool:
        return self._state.is_started

    def start(self, roots: Sequence[GradientEdge], neighbours: frozenset[int], parent: int | None) -> None:
        """Looks at the graph, and tells the neighbours. Takes time: not on the I/O loop."""
        analysis = self._analysis = analyse(self.context.id, roots, *self.context.snapshot())
        self._counts = {recv.id: recv.count for recv in analysis.recvs.values()}
        self._involved |= neighbours
        self.handle(Started(analysis.local, neighbours, parent))

    # ------------------------------------------------------------ events

    def post(self, job: Job, lazily: bool = False) -> None:
        """Has `job` called by the thread that handles the events of this pass; `lazily`: with the next one."""
        with self._changed:
            self._inbox.append(job)
            if lazily:
                return
            if self._has_waiter:
                self._changed.notify_all()
                return
            if self._is_draining:
                return
            self._is_draining = True
        self._worker.submit(self._drain)

    def can_wait(self, sender: int, begin: autograd_pb2.BackwardBegin) -> bool:
        """Whether nothing follows from a neighbour's begin by itself: all that it received is still open there."""
        analysis = self._analysis
        if analysis is None or not self.is_started:
            return False
        received = begin.received
        num_sends = sum(send.to == sender for send in analysis.local.sends)
        is_open = not (received.used or received.unused or received.partly)
        return is_open and 0 < num_sends == len(received.open)

    def handle_soon(self, event: Event) -> None:
        self.post(lambda: self.handle(event))

    def gradients_arrived(self, messages: Sequence[int], decode: Callable[[], object]) -> None:
        """The gradients of sends are there; any thread. `decode` makes a list of tensors and None for each."""
        self.post(lambda: self._take_gradients(messages, decode))

    def _drain(self) -> None:
        while True:
            job = self._next_job()
            if job is not None:
                self._guarded(job)
                continue
            with self._changed:
                if not self._inbox:
                    self._is_draining = False
                    return

    def run_here(self, first: Job) -> None:
        """Calls `first`, then handles events on this thread until the pass is over; raises what ended it.

        Ctrl-C and other exceptions of this thread end the pass everywhere.
        """
        self._has_waiter = True  # nobody else knows the pass yet
        try:
            self._guarded(first)
            while not self.is_over:
                job = self._next_job()
                if job is not None:
                    self._guarded(job)
                else:
                    self._wait()
        except BaseException as exc:
            self.fail(exc)
            raise
        if self.error is not None:
            raise self.error

    def _next_job(self) -> Job | None:
        """An event, or, when all that came are handled, what they have made ready; None if there is neither."""
        with self._changed:
            if self._inbox:
                return self._inbox.popleft()
        return self._execute_ready if self._ready and not self.is_over else None

    def _wait(self) -> None:
        with self._changed, blocking():
            in_time = self._changed.wait_for(lambda: self._inbox or self.is_over, self._deadline.wait_s())
        if not in_time:
            self.fail(self._late())

    def expire(self) -> None:
        """The deadline is over; for passes that nobody waits for on a thread."""
        self.post(lambda: self.fail(self._late()))

    def _late(self) -> DeadlineExceeded:
        names = self._worker.name_of
        waits = [f"worker {names(peer)!r} {why}" for peer, why in sorted(self._state.waits_for().items())]
        return DeadlineExceeded(
            "RPC ran for more than set timeout and will now be marked with an error: backward of autograd context "
            f"{self.context.id} on worker {names(self._worker.id)!r} ({'; '.join(waits) or 'a gate waits'})"
        )

    def _guarded(self, job: Job) -> None:
        if self.is_over:
            return
        try:
            job()
        except BaseException as exc:
            self.fail(exc)  # also when a hook calls `sys.exit`: the other workers wait for this one
            if not isinstance(exc, Exception):
                raise

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event) -> None:
        """Only the thread that handles the events of the pass calls it."""
        for action in self._state.handle(event):
            if not isinstance(action, Run):
                self._carry_out(action)
            elif action.pending:
                self._worker.submit(self._guarded, lambda run=action: self._execute_blocking(run))
            else:
                self._ready.append(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendBegin(to, child, received):
                self._send_begin(to, child, received)
            case SendVerdicts(to, verdicts):
                message = self._message()
                message.verdicts.SetInParent()
                encode_verdicts(verdicts, self._counts, message.verdicts)
                self._worker.send(to, message, self)
            case SendDone(to):
                message = self._message()
                message.done.SetInParent()
                self._worker.send(to, message, self)
                self._end(None)
            case Finished():
                self._end(None)

    def _send_begin(self, to: int, child: bool, received: Verdicts) -> None:
        message = self._message()
        begin = message.begin
        begin.fast = self._state.fast
        begin.retain_graph = self._retain_graph
        begin.child = child
        if self._deadline.is_finite:
            begin.timeout_us = max(1, int(self._deadline.remaining_s() * 1e6))
        encode_verdicts(received, self._counts, begin.received)
        self._involved.add(to)
        self._worker.send(to, message, self)

    def _message(self) -> autograd_pb2.AutogradMessage:
        return autograd_pb2.AutogradMessage(context=self.context.id, backward=self.id)

    def _execute_ready(self) -> None:
        """Runs in one call what became ready since the last one: a hundred small groups cost a hundred calls."""
        run = functools.reduce(Run.with_, self._ready)
        self._ready.clear()
        self._execute(run)
        for group in run.groups:
            self.handle(GroupEnded(group))

    def _execute_blocking(self, run: Run) -> None:
        self._execute(run)
        for group in run.groups:
            self.handle_soon(GroupEnded(group))

    def _execute(self, run: Run) -> None:
        assert self._analysis is not None  # there are no runs before `start`
        GroupRun(self, self._analysis, run).execute(self._retain_graph)

    # ------------------------------------------------------------ gradients

    def _take_gradients(self, messages: Sequence[int], decode: Callable[[], object]) -> None:
        arrived = decode()
        assert isinstance(arrived, list)
        pairs = dict(zip(messages, arrived, strict=True))
        with self._changed:
            self._gradients.update(pairs)
            self._changed.notify_all()
        for message, gradients in pairs.items():
            used = sum(1 << index for index, gradient in enumerate(gradients) if gradient is not None)
            self.handle(GradientArrived(message, used))

    def gradient(self, message: int) -> Gradients:
        """A gradient that is there."""
        return self._gradients[message]

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        """Blocks until the gradient of a send is there; raises when the pass fails or its deadline is over."""
        with self._changed, blocking():
            self._changed.wait_for(lambda: send.id in self._gradients or self.is_over, self._deadline.wait_s())
            if send.id in self._gradients:
                return self._gradients[send.id]
        if self.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from self.error
        raise DeadlineExceeded(
            f"the gradient of what was sent to worker {self._worker.name_of(send.to)!r} did not come in time"
        )

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]]) -> None:
        """Sends the gradients of received messages to their senders."""
        by_sender: dict[int, tuple[list[int], list[Gradients]]] = {}
        for recv, gradients in answers:
            messages, values = by_sender.setdefault(recv.sender, ([], []))
            messages.append(recv.id)
            values.append([None if gradient is None else gradient.detach() for gradient in gradients])
        for sender, (messages, values) in by_sender.items():
            if sender == self._worker.id:
                self.gradients_arrived(messages, lambda values=values: values)  # type: ignore[misc]
            else:
                body = self._message()
                body.gradients.messages.extend(messages)
                self._worker.send_gradients(sender, body, values, self)

    # ------------------------------------------------------------ the end

    def involves(self, worker_id: int) -> bool:
        return worker_id in self._involved or worker_id == self._state.parent

    def fail(self, exc: BaseException) -> None:
        """Ends the pass everywhere, because of what went wrong here; any thread."""
        if self.is_over:
            return
        error = exc
        if not issubclass(type(exc), BackwardError | DeadlineExceeded):  # a user's exception may break `isinstance`
            error = BackwardError(
                self._worker.id, self._worker.name_of(self._worker.id), type(exc).__qualname__, text_of(exc)
            )
            error.__cause__ = exc
        self.abort(error, traceback_of(exc))

    def abort(self, error: BaseException, text: str = "") -> None:
        """Ends the pass with an error, and passes it on; any thread."""
        if not self._end(error):
            return
        message = self._message()
        aborted = message.aborted
        if isinstance(error, BackwardError):
            aborted.worker, aborted.worker_name = error.node, error.worker
            aborted.type_name, aborted.text, aborted.traceback = error.type_name, error.text, error.traceback or text
        else:
            aborted.worker, aborted.worker_name = self._worker.id, self._worker.name_of(self._worker.id)
            aborted.type_name, aborted.text, aborted.traceback = type(error).__qualname__, text_of(error), text
        self._worker.spread(self._involved | {self._worker.origin_of(self.id)}, message)

    def _end(self, error: BaseException | None) -> bool:
        with self._changed:
            if self.is_over:
                return False
            self.is_over = True
            self.error = error
            self._changed.notify_all()
        self.context.passes.pop(self.id, None)
        self.context.ended_passes[self.id] = error
        self.context.is_spent = error is None and not self._retain_graph
        if self.on_end is not None:
            self.on_end()
        return True
