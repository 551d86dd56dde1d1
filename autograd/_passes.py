"""One backward pass on one worker: feeds events to the pure machine, and carries out its actions.

Threads: `post` may be called anywhere, also on the I/O loop, and never waits. Events are handled one after the other,
by the thread that waits for the pass (where it began) or by a pool thread. Runs that block have pool threads of their
own.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._context import Context
from rpcdist.autograd._errors import BackwardError
from rpcdist.autograd._events import (
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
from rpcdist.autograd._functions import Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._graphs import Analysis, analyse
from rpcdist.autograd._runs import GroupRun
from rpcdist.autograd._verdicts import PassState
from rpcdist.autograd._wire import encode_verdicts
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._pool import blocking

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

    def gradient_arrived(self, message: int, decode: Callable[[], object]) -> None:
        """The gradient of a send is there; any thread. `decode` makes a list of tensors and None."""
        self.post(lambda: self._take_gradient(message, decode))

    def _drain(self) -> None:
        while True:
            with self._changed:
                if not self._inbox:
                    self._is_draining = False
                    return
                job = self._inbox.popleft()
            self._guarded(job)

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
        except BaseException as exc:
            self.fail(exc)
            raise
        if self.error is not None:
            raise self.error

    def _next_job(self) -> Job | None:
        with self._changed, blocking():
            left_s = self._deadline.wait_s()
            if not self._changed.wait_for(lambda: self._inbox or self.is_over, left_s):
                self.fail(self._late())
            return self._inbox.popleft() if self._inbox else None

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
        except Exception as exc:
            self.fail(exc)

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event) -> None:
        actions = self._state.handle(event)
        runs = [action for action in actions if isinstance(action, Run)]
        for action in actions:
            if not isinstance(action, Run):
                self._carry_out(action)
        for run in runs:
            # The last that need not wait runs here; its result is what everybody waits for.
            if run.pending or run is not runs[-1]:
                self._worker.submit(self._guarded, lambda run=run: self._execute(run))
            else:
                self._execute(run)

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

    def _execute(self, run: Run) -> None:
        assert self._analysis is not None  # there are no runs before `start`
        GroupRun(self, self._analysis, run).execute(self._retain_graph)
        self.handle_soon(GroupEnded(run.group))

    # ------------------------------------------------------------ gradients

    def _take_gradient(self, message: int, decode: Callable[[], object]) -> None:
        gradients = decode()
        assert isinstance(gradients, list)
        with self._changed:
            self._gradients[message] = gradients
            self._changed.notify_all()
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

    def answer(self, recv: RecordedRecv, gradients: Gradients) -> None:
        """Sends the gradient of a received message to its sender."""
        if recv.sender == self._worker.id:
            local = list(gradients)
            self.gradient_arrived(recv.id, lambda: local)
            return
        message = self._message()
        message.gradient.message = recv.id
        self._worker.send_gradient(recv.sender, message, list(gradients), self)

    # ------------------------------------------------------------ the end

    def involves(self, worker_id: int) -> bool:
        return worker_id in self._involved or worker_id == self._state.parent

    def fail(self, exc: BaseException) -> None:
        """Ends the pass everywhere, because of what went wrong here; any thread."""
        if self.is_over:
            return
        error = exc
        if not isinstance(exc, BackwardError | DeadlineExceeded):
            error = BackwardError(
                self._worker.id, self._worker.name_of(self._worker.id), type(exc).__qualname__, str(exc)
            )
            error.__cause__ = exc
        text = "".join(traceback.format_exception(exc))
        self.abort(error, text)

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
            aborted.type_name, aborted.text, aborted.traceback = type(error).__qualname__, str(error), text
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
