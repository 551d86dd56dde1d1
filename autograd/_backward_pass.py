"""One backward pass on one worker: feeds events to the pure state machine `PassState`, and carries out its actions.

Threads: `post` may be called on any thread, also on the I/O loop, and never waits. Events are handled one after the
other: by the thread that waits for the pass on the worker where it began, and by a pool thread on the others. A run
that blocks has a pool thread of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._autograd_errors import BackwardError
from rpcdist.autograd._context import Context, worker_of
from rpcdist.autograd._graph_analysis import Analysis, analyse
from rpcdist.autograd._group_run import Captured, GroupRun
from rpcdist.autograd._message_nodes import Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._pass_events import (
    Finished,
    GradientArrived,
    GroupEnded,
    PassAction,
    PassEvent,
    Run,
    SendBegin,
    SendDone,
    SendVerdicts,
    Started,
    Verdicts,
)
from rpcdist.autograd._pass_sender import PassSender
from rpcdist.autograd._verdicts import PassState
from rpcdist.autograd._wire_format import encode_error, encode_verdicts
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._values.failures import text_of, traceback_of

__all__ = ["BackwardPass", "PassOptions"]

logger = logging.getLogger(__name__)

Job = Callable[[], object]


class PassOptions(NamedTuple):
    """The options of a backward pass, equal on all its workers.

    Attributes:
        fast: whether every send counts as used, without verdicts.
        retain_graph: whether saved tensors are kept for a second pass.
        deadline: when the pass must have ended.
    """

    fast: bool = False
    retain_graph: bool = False
    deadline: Deadline = Deadline.after(None)


class BackwardPass:
    """One backward pass on one worker.

    The first message of a pass may overtake the one that begins it, so a pass exists before its options are known:
    `prepare` sets them, and `start` follows.

    Args:
        sender: sends the messages of the pass.
        context: the context whose gradients are computed.
        id: of the pass, the same on all workers; its high bits are the worker where it began.
        on_end: called once, when the pass has ended on this worker; on any thread.
        root_gradients: the gradients of the roots, on the worker where the pass began.

    Attributes:
        error: the error that ended the pass; None while it runs, and if it succeeded.
        is_over: whether the pass has ended on this worker.
    """

    def __init__(
        self,
        sender: PassSender,
        context: Context,
        id: int,
        on_end: Callable[[BackwardPass], object],
        root_gradients: Sequence[torch.Tensor] = (),
    ) -> None:
        self.context = context
        self.id = id
        self.root_gradients = root_gradients
        self.error: BaseException | None = None
        self.is_over = False
        self._on_end = on_end
        self._sender = sender
        self._state = PassState(sender.id)
        self._analysis: Analysis | None = None
        self._counts: dict[int, int] = {}
        self._options = PassOptions()
        self._gradients: dict[int, Gradients] = {}
        self._involved: set[int] = set()
        self._changed = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._ready: list[Run] = []  # executed by the thread that handles events
        self._is_draining = False
        self._has_waiter = False

    def __repr__(self) -> str:
        return f"<BackwardPass {self.id:#x} of {self.context!r}: {self._state!r}>"

    # ------------------------------------------------------------ beginning

    def prepare(self, options: PassOptions) -> None:
        """Sets the options, once, before `start`."""
        self._state.fast = options.fast
        self._options = options

    @property
    def is_started(self) -> bool:
        return self._state.is_started

    def start(self, roots: Sequence[GradientEdge], neighbours: frozenset[int], parent: int | None) -> None:
        """Analyses the graph, and sends the begin messages. Takes time: not on the I/O loop."""
        analysis = self._analysis = analyse(self.context.id, roots, *self.context.snapshot())
        self._counts = {recv.id: recv.count for recv in analysis.recvs.values()}
        self._involved |= neighbours
        self.handle(Started(analysis.local, neighbours, parent))

    # ------------------------------------------------------------ events

    def post(self, job: Job, lazily: bool = False) -> None:
        """Calls `job` on the thread that handles the events of this pass; `lazily`: not before the next event."""
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
        self._sender.submit(self._drain)

    def can_wait(self, sender: int, begin: autograd_pb2.BackwardBegin) -> bool:
        """Whether a neighbour's begin has no consequences yet, because all its verdicts are open."""
        analysis = self._analysis
        if analysis is None or not self.is_started:
            return False
        received = begin.received
        num_sends = sum(send.to == sender for send in analysis.local.sends)
        is_open = not (received.used or received.unused or received.partly)
        return is_open and 0 < num_sends == len(received.open)

    def handle_soon(self, event: PassEvent) -> None:
        self.post(lambda: self.handle(event))

    def gradients_arrived(self, messages: Sequence[int], decode: Callable[[], object]) -> None:
        """Takes the gradients of sends; any thread. `decode` returns a list of tensors and None for each message."""
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
        self._has_waiter = True  # no other thread knows the pass yet
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
        """The next event, or, when all events are handled, the runs that they made ready; None if there is neither."""
        with self._changed:
            if self._inbox:
                return self._inbox.popleft()
        return self._execute_ready if self._ready and not self.is_over else None

    def _wait(self) -> None:
        with self._changed, blocking():
            in_time = self._changed.wait_for(lambda: self._inbox or self.is_over, self._options.deadline.wait_s())
        if not in_time:
            self.fail(self._late())

    def expire(self) -> None:
        """Fails the pass because its deadline is over; for a pass without a thread that waits for it."""
        self.post(lambda: self.fail(self._late()))

    def _late(self) -> DeadlineExceeded:
        names = self._sender.name_of
        waits = [f"worker {names(peer)!r} {why}" for peer, why in sorted(self._state.waits_for().items())]
        return DeadlineExceeded(
            "RPC ran for more than set timeout and will now be marked with an error: backward of autograd context "
            f"{self.context.id} on worker {names(self._sender.id)!r} ({'; '.join(waits) or 'a gate waits'})"
        )

    def _guarded(self, job: Job) -> None:
        if self.is_over:
            return
        try:
            job()
        except BaseException as exc:
            self.fail(exc)  # also for a `sys.exit` in a hook: the other workers wait for this one
            if not isinstance(exc, Exception):
                raise

    # ------------------------------------------------------------ the state machine

    def handle(self, event: PassEvent) -> None:
        """Handles an event; only on the thread that handles the events of the pass."""
        for action in self._state.handle(event):
            if not isinstance(action, Run):
                self._carry_out(action)
            elif action.pending:
                self._sender.submit(self._guarded, lambda run=action: self._execute_blocking(run))
            else:
                self._ready.append(action)

    def _carry_out(self, action: PassAction) -> None:
        match action:
            case SendBegin(to, child, received):
                self._send_begin(to, child, received)
            case SendVerdicts(to, verdicts):
                message = self._message()
                message.verdicts.SetInParent()
                encode_verdicts(verdicts, self._counts, message.verdicts)
                self._sender.send(to, message, self)
            case SendDone(to):
                message = self._message()
                message.done.SetInParent()
                self._sender.send(to, message, self)
                self._end(None)
            case Finished():
                self._end(None)

    def _send_begin(self, to: int, child: bool, received: Verdicts) -> None:
        message = self._message()
        begin = message.begin
        begin.fast = self._options.fast
        begin.retain_graph = self._options.retain_graph
        begin.child = child
        if self._options.deadline.is_finite:
            begin.timeout_us = max(1, int(self._options.deadline.remaining_s() * 1e6))
        encode_verdicts(received, self._counts, begin.received)
        self._involved.add(to)
        self._sender.send(to, message, self)

    def _message(self) -> autograd_pb2.AutogradMessage:
        return autograd_pb2.AutogradMessage(context=self.context.id, backward=self.id)

    def _execute_ready(self) -> None:
        """Runs all ready groups in one engine call: a hundred small groups would cost a hundred calls."""
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
        GroupRun(self, self._analysis, run).execute(self._options.retain_graph)

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
        """The gradient of a send that has arrived."""
        return self._gradients[message]

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        """The gradient of a send; blocks until it has arrived. Raises when the pass fails or its deadline is over."""
        with self._changed, blocking():
            self._changed.wait_for(lambda: send.id in self._gradients or self.is_over, self._options.deadline.wait_s())
            if send.id in self._gradients:
                return self._gradients[send.id]
        if self.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from self.error
        raise DeadlineExceeded(
            f"the gradient of what was sent to worker {self._sender.name_of(send.to)!r} did not come in time"
        )

    def collect(self, captured: Captured) -> None:
        """Adds the gradients of leaves to the context."""
        self.context.gradients.add(captured.items())

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]]) -> None:
        """Sends the gradients of recvs to the senders of their messages."""
        by_sender: dict[int, tuple[list[int], list[Gradients]]] = {}
        for recv, gradients in answers:
            messages, values = by_sender.setdefault(recv.sender, ([], []))
            messages.append(recv.id)
            values.append([None if gradient is None else gradient.detach() for gradient in gradients])
        for sender, (messages, values) in by_sender.items():
            if sender == self._sender.id:
                self.gradients_arrived(messages, lambda values=values: values)  # type: ignore[misc]
            else:
                body = self._message()
                body.gradients.messages.extend(messages)
                self._sender.send_gradients(sender, body, values, self)

    # ------------------------------------------------------------ the end

    def involves(self, worker_id: int) -> bool:
        """Whether the pass fails if that worker is lost."""
        return worker_id in self._involved or worker_id in (self._state.parent, worker_of(self.id))

    def fail(self, exc: BaseException) -> None:
        """Ends the pass on all workers, because of an error on this one; any thread."""
        if self.is_over:
            return
        error = exc
        if not issubclass(type(exc), BackwardError | DeadlineExceeded):  # a user's exception may break `isinstance`
            me = self._sender.id
            error = BackwardError(me, self._sender.name_of(me), type(exc).__qualname__, text_of(exc))
            error.__cause__ = exc
        self.abort(error, traceback_of(exc))

    def abort(self, error: BaseException, text: str = "") -> None:
        """Ends the pass with an error, and sends it to the other workers; any thread."""
        if not self._end(error):
            return
        message = self._message()
        encode_error(error, self._sender.id, self._sender.name_of(self._sender.id), message.aborted, text)
        self._sender.spread(self._involved | {worker_of(self.id)}, message)

    def _end(self, error: BaseException | None) -> bool:
        with self._changed:
            if self.is_over:
                return False
            self.is_over = True
            self.error = error
            self._changed.notify_all()
        self.context.ended_passes[self.id] = error
        self.context.is_spent = error is None and not self._options.retain_graph
        self._on_end(self)
        return True
