"""One backward pass on one worker: its messages, its end, and the thread that handles its events.

On the worker where the pass began, that thread is the one that waits for the pass; elsewhere it is a pool thread. In a
*turn* it works until nothing is left to do. Then it sends the results, one message to each other worker, and reads the
connection on which the next message will probably come, unless another thread reads it: so the thread that reads a
message handles it, and wakes no other thread. It claims the connection before it sends: the answer may arrive before
the sending thread returns from its system call, and would wake the I/O loop.

The *part* of a worker does its work in a pass: `_direct_part` if the order of all steps is known, and
`_general_part` otherwise. Any thread, even the I/O loop, may call `post`, `receive` and `wake`; none of them waits.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2, rpc_pb2
from rpcdist.autograd._context import Context, SpanKind, worker_of
from rpcdist.autograd._pass_message import PassMessage, encode_error
from rpcdist.autograd._step_part import StepPart, do_work
from rpcdist.deadline import Deadline
from rpcdist.errors import BackwardError, DeadlineExceeded, RpcdistError, TransportError, WorkerLost, text_of
from rpcdist.inspection import PassFacts
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._executors.blocking import blocking, hooks
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._peers.network import AnySession, PoolJob
from rpcdist.rpc._values.exceptions import set_cause, traceback_of
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import CompactPass

T = TypeVar("T")
Job = Callable[[], object]
Packed = tuple[int, CompactPass, Sequence[LargeBuffer], Sequence[int]]
"""An encoded message: its receiver, the message, its large buffers, and its loans of GPU memory."""


class PassOptions(NamedTuple):
    """The options of a backward pass, equal on all its workers: `fast` counts every send as used, without verdicts."""

    fast: bool = False
    retain_graph: bool = False
    deadline: Deadline = Deadline.after(None)


class PassPart:
    """A worker's part in a pass; only on the thread that handles the events of the pass.

    Attributes:
        ready: the runs that became ready, for `run_ready`.
    """

    ready: Sequence[Any] = ()

    def take_part(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        """Begins, with the messages that arrived earlier; `neighbours` are all workers to begin with."""
        raise NotImplementedError

    def take(self, sender: int, message: PassMessage) -> None:
        """Handles a neighbour's message."""
        raise NotImplementedError

    def run_ready(self) -> None:
        """Executes the ready runs after all arrived messages are handled."""

    def waits_for(self) -> Mapping[int, str]:
        """The reasons why the pass has not ended on this worker, by the worker that it waits for; any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all waits, because the pass has ended. Any thread."""


@dataclass(eq=False, repr=False)
class BackwardPass:
    """One backward pass on one worker.

    A message may overtake the one that begins the pass, so a pass exists before its options are known.

    Args:
        id: the id of the pass, the same on all workers; its high bits are the worker where it began.
        make_part: makes the part of this worker from the edges of the roots. Takes time.
        on_end: called once, when the pass has ended on this worker; on any thread.
        on_late: answers a neighbour that begins when the pass has ended here.
        root_gradients, options: the roots' gradients and the options of the pass, on the worker where the pass began.

    Attributes:
        then: the step that follows when all workers have done their parts, on the worker where the pass began.
        parent: the neighbour that began with this worker; None on the worker where the pass began, and before that.
        lock: protects the messages to send, and the state of the thread.
        spans: the times of its parts: kind, peer or -1, start, end.
        hops: the times of the messages: "to" or "from", peer, start, end; None unless they are recorded.
        traceparent: for OpenTelemetry, the header of the pass's span; empty if there is none.
        error: the error that ended the pass; None while it runs, and if it succeeded.
        is_finishing: whether nothing is left to do here, except for sending the last messages.
    """

    _agent: Agent
    context: Context
    id: int
    _make_part: Callable[[BackwardPass, Sequence[GradientEdge]], PassPart]
    _on_end: Callable[[BackwardPass], object]
    _on_late: Callable[[int], object]
    root_gradients: Sequence[torch.Tensor] = ()
    options: PassOptions = field(default_factory=PassOptions)
    hops: list[list[Any]] | None = None
    parent: int | None = None
    then: StepPart | None = None
    lock: RLock = field(default_factory=RLock)
    error: BaseException | None = None
    is_over: bool = False
    is_finishing: bool = False
    spans: list[tuple[SpanKind, int, float, float]] = field(default_factory=list)
    traceparent: str = ""
    _part: PassPart | None = None
    _early: list[tuple[int, PassMessage]] = field(default_factory=list)  # arrived before the pass began here
    _out: dict[int, PassMessage] = field(default_factory=dict)
    _follow_up: bytes | None = None  # work for the parent when the part of this worker is done
    _involved: set[int] = field(default_factory=set)
    _links: dict[int, AnySession] = field(default_factory=dict)  # by neighbour: it carries the messages of both
    _idle_since: float = 0.0
    _inbox: deque[Job | tuple[int, PassMessage, AnySession | None]] = field(default_factory=deque)
    _is_draining: bool = False
    _has_waiter: bool = False
    _changed: threading.Condition | None = None  # made at the first sleep: most passes read instead
    _source: AnySession | None = None  # where the next message will probably come
    _reading: AnySession | None = None  # read by the thread that waits

    def __post_init__(self) -> None:
        self.me = self._agent.identity.id
        self.submit = self._agent.pool.submit
        self.name_of = self._agent.directory.name_of

    # ------------------------------------------------------------ beginning

    def start_part(self, roots: Sequence[GradientEdge], neighbours: Collection[int], parent: int | None) -> None:
        """Analyses the graph, and begins with the known neighbours. Takes time: not on the I/O loop."""
        began_s = time.time()
        self.parent = parent
        self._involved.update(neighbours)
        if parent is None:
            self._find_links(neighbours)
        part = self._part = self._make_part(self, roots)
        self.spans.append(("analysis", -1, began_s, time.time()))
        early, self._early = self._early, []
        part.take_part(neighbours, early)

    def start_step(self) -> None:
        """Requests steps from the owners of parameters, and does the share of this process at the same time."""
        then = self.then
        assert then is not None
        then.is_begun, self._part = True, None
        self._find_links(then.work)
        timeout_us = self.timeout_us()
        for to, work in then.work.items():
            if to != then.handed or not then.is_stepping:
                message = self.message_to(to)
                message.work, message.timeout_us = work, timeout_us
        self.flush()
        then.own()

    def _find_links(self, neighbours: Iterable[int]) -> None:
        for to in neighbours:
            session = self._agent.router.standing_session(to)
            if session is not None:
                self._links[to] = self._source = session

    # ------------------------------------------------------------ for the parts

    def message_to(self, to: int) -> PassMessage:
        """The message that a neighbour gets when this turn ends, or at `flush`."""
        message = self._out.get(to)
        if message is None:
            message = self._out[to] = PassMessage()
            self._involved.add(to)
        return message

    def finish(self) -> None:
        """Nothing is left to do here, and the children are done."""
        if self.then is not None:
            if self.options.deadline.expired():
                self.expire()  # no worker steps
            elif not self.then.is_begun:
                self.context.is_spent = not self.options.retain_graph
                self.start_step()
        elif not self.is_finishing:
            self.is_finishing = True
            if self.parent is not None:
                message = self.message_to(self.parent)
                message.is_done = True
                if self._follow_up is not None and self._involved == {self.parent} and self.parent in self._links:
                    message.follows = not self.options.deadline.expired()
                if not message.follows:
                    self._follow_up = None

    def timeout_us(self) -> int:
        """The remaining time until the deadline, for a message."""
        deadline = self.options.deadline
        return 0 if deadline.at == inf else max(1, int(deadline.remaining_s() * 1e6))

    def flush(self) -> None:
        """Sends the pending messages to other workers; any thread."""
        send = self._pack()
        if send is not None:
            send()

    # ------------------------------------------------------------ what comes

    def receive(self, sender: int, message: PassMessage, via: AnySession | None, jobs: list[PoolJob]) -> None:
        """Takes a neighbour's message, which came by a session; adds work for pool threads to `jobs`."""
        if self.is_over:
            if message.begins:
                self._on_late(sender)
        elif self._add((sender, message, via)):
            jobs.append((self._drain, ()))

    def post(self, job: Job) -> None:
        """Calls `job` on the thread that handles the events."""
        if self._add(job):
            self.submit(self._drain)

    def _add(self, item: Job | tuple[int, PassMessage, AnySession | None]) -> bool:
        """Adds an event; True if a pool thread must handle it."""
        with self.lock:
            self._inbox.append(item)
            if self.is_over and type(item) is tuple and item[1].begins:  # it ended just now
                self._on_late(item[0])
            if not self._has_waiter:
                if self._is_draining:
                    return False
                self._is_draining = True
                return True
        self.wake()
        return False

    def wake(self) -> None:
        """Makes the waiting thread check for events."""
        if self._changed is not None:
            with self.lock:
                self._changed.notify_all()
        reading = self._reading
        if reading is not None:
            reading.interrupt()

    def _take(self, sender: int, message: PassMessage, via: AnySession | None) -> None:
        if self.hops is None:
            self._take_in(sender, message, via)
            return
        began_s = time.time()
        hop = ["from", sender, began_s, began_s]
        self.hops.append(hop)  # before handling, which may end the pass; other threads append, too
        try:
            self._take_in(sender, message, via)
        finally:
            hop[3] = time.time()

    def _take_in(self, sender: int, message: PassMessage, via: AnySession | None) -> None:
        if via is not None:
            self._links[sender] = self._source = via
        if self._idle_since:
            self.spans.append(("wait", sender, self._idle_since, time.time()))
            self._idle_since = 0.0
        if message.is_heavy:
            self.context.is_heavy_elsewhere = True
        if message.messages:
            gpus = self._agent.gpus
            lender = gpus.identity_of(sender) if via is None else via.peer
            message.read_gradients(not self._agent.options.allow_pickle, lambda value: gpus.arriving(value, lender))
        if self.then is not None:
            self.then.take(sender, message)
            if self.then.is_begun:
                return
        if self._part is not None:
            self._part.take(sender, message)
            return
        if self.is_over:
            return
        self._early.append((sender, message))
        if message.begins:
            timeout_s = message.timeout_us / 1e6 if message.timeout_us else None
            self.options = PassOptions(message.fast, message.retain_graph, Deadline.after(timeout_s))
            self._follow_up = message.follow_up
            self.traceparent = message.traceparent
            self.start_part((), self.context.partners() | {sender}, sender)

    # ------------------------------------------------------------ turns

    def run_here(self, first: Job) -> None:
        """Calls `first`, then handles events on this thread until the pass is over; raises the error that ended it.

        No other worker knows the pass yet. Ctrl-C and other exceptions of this thread end the pass everywhere.
        """
        self._has_waiter = True
        error = self._until_over(first)
        del self, first  # the traceback of the error refers to this frame
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _until_over(self, first: Job) -> BaseException | None:
        try:
            if not self.is_over:
                first()
            while not self.is_over:
                part = self._part  # another thread that ends the pass clears it
                if self._inbox or (part is not None and part.ready):
                    self._handle_all()
                if self.then is not None and self.then.is_begun:
                    self.is_finishing = self.then.is_done()
                send = self._pack()
                if self.is_finishing and send is not None:
                    send()
                elif not self.is_over and not self._wait(send):
                    self.expire()
        except BaseException as exc:
            self.fail(exc)
            if not issubclass(type(exc), Exception):
                raise
        return self.error

    def _drain(self) -> DeferredReply | None:
        """Handles events on a pool thread; returns a reply for that thread to send, or None."""
        while True:
            self.guarded(self._handle_all)
            send = self.guarded(self._pack)
            with self.lock:
                if not self._inbox or self.is_over:
                    self._idle_since = time.time()
                    self._is_draining = False
                    break
            if send is not None:
                send()
        if self._follow_up is not None and self.is_finishing and send is not None:
            send()
            if self.error is None and self.parent is not None:
                via = self._links[self.parent]
                return do_work(self._follow_up, self.options.deadline, self.context.id, self.id, via)
        elif hooks.enter is not None and self._source is not None:
            return DeferredReply([] if send is None else [send], self._source)
        elif send is not None:
            send()
        return None

    def _handle_all(self) -> None:
        inbox, part = self._inbox, self._part
        while not self.is_over:
            if inbox:  # no other thread takes any out
                item = inbox.popleft()
                if type(item) is tuple:
                    self._take(*item)
                else:
                    item()  # type: ignore[operator]
                part = self._part
            elif part is not None and part.ready:
                part.run_ready()
            else:
                return

    def guarded(self, job: Callable[[], T]) -> T | None:
        """The result of a job, which is not called after the pass has ended. The pass fails if the job does."""
        if self.is_over:
            return None
        try:
            return job()
        except BaseException as exc:
            self.fail(exc)  # also for a `sys.exit` in a hook: the other workers wait for this one
            if not issubclass(type(exc), Exception):
                raise
            return None

    def _pack(self) -> Job | None:
        """The job that sends all pending messages, already encoded. At the end of the pass, the job ends it.

        None if there is nothing to send. An error of the job ends the pass.
        """
        if self.is_over:
            return None
        with self.lock:
            out, self._out = self._out, {}
        if not out:
            return partial(self._end, None) if self.is_finishing else None
        packed: list[Packed] = []
        for to, message in out.items():
            if message.begins:
                message.fast, message.retain_graph, _ = self.options
                message.timeout_us = self.timeout_us()
                message.traceparent = self.traceparent
            if message.is_done:
                message.is_heavy = self.context.is_heavy
            packed.append((to, *message.encode(self.context.id, self.id, partial(self._new_route, to))))
        return partial(self._send_packed, packed, self.is_finishing)

    def _new_route(self, to: int) -> DeviceRoute:
        route = self._agent.gpus.route(to, self._links.get(to), back=True)
        self.context.gpu_loans.append(route.loans)  # the loans are made later
        return route

    def _send_packed(self, packed: Sequence[Packed], ends: bool) -> None:
        try:
            for to, message, large, loans in packed:
                if self.error is not None:  # `abort` has told the others
                    for loan in loans:
                        self._agent.gpus.doubt(loan)
                    continue
                if self.hops is not None:
                    began_s = time.time()
                    self.hops.append(["to", to, began_s, began_s])  # before it arrives there
                session = self._links.get(to)
                if session is None or session.closed_reason is not None:
                    try:
                        self._agent.router.send(to, message, large, _PassMessageObserver(self, to))
                    except RpcdistError as exc:
                        self.lost(to, self.lost_worker(to, str(exc)))
                    continue
                session.send(message, large)
                if session.closed_reason is not None:  # perhaps before the session knew that this pass uses it
                    self.lost(to, self.lost_worker(to, session.closed_reason))
        except BaseException as exc:
            self.fail(exc)
            if not issubclass(type(exc), Exception):
                raise
        if ends:
            self._end(None)

    def _wait(self, send: Job | None) -> bool:
        """Sends, then waits for an event or for the end of the pass; False when the deadline has passed."""
        self._idle_since = time.time()
        if hooks.enter is None:  # a thread of the user
            return self._sleep(send)
        with blocking():
            return self._sleep(send)

    def _sleep(self, send: Job | None) -> bool:
        deadline = self.options.deadline
        source = self._reading = self._source  # set before `_is_waiting` is checked: a later `post` then rings
        if source is None and send is not None:
            send()
            send, source = None, self._source
            self._reading = source
        try:
            if source is not None and source.read_while_waiting(self._is_waiting, deadline.wait_s(), None, send):
                return True
        finally:
            self._reading = None
        with self.lock:
            if self._changed is None:
                self._changed = threading.Condition(self.lock)
            return self._changed.wait_for(lambda: not self._is_waiting(), deadline.wait_s())

    def _is_waiting(self) -> bool:
        return not self._inbox and not self.is_over

    def facts(self, now: float) -> PassFacts:
        """The workers that it waits for, at a time of the monotonic clock; any thread."""
        deadline = self.options.deadline
        try:
            waits = dict(self._waits_for())
        except RuntimeError:  # a table has changed meanwhile
            waits = {}
        return PassFacts(
            id=self.id,
            context=self.context.id,
            parent="" if self.parent is None else self.name_of(self.parent),
            waits_for=tuple(sorted((self.name_of(peer), why) for peer, why in waits.items())),
            remaining_s=deadline.at - now if deadline.is_finite else None,
        )

    def _waits_for(self) -> Mapping[int, str]:
        then, part = self.then, self._part
        if then is not None and then.is_begun:
            return {to: "has not said that its step is done" for to in then.work if to not in then.outcomes}
        return {} if part is None else part.waits_for()

    # ------------------------------------------------------------ the end

    def expire(self) -> None:
        """Fails the pass because its deadline has passed; on its thread."""
        texts = "; ".join([f"worker {self.name_of(peer)!r} {why}" for peer, why in sorted(self._waits_for().items())])
        what = "step" if self.then is not None and self.then.is_begun else "backward"
        self.fail(
            DeadlineExceeded(
                f"RPC ran for more than set timeout and will now be marked with an error: {what} of autograd context "
                f"{self.context.id} on worker {self.name_of(self.me)!r} ({texts or 'a gate waits'})"
            )
        )

    def involves(self, worker_id: int) -> bool:
        """Whether the pass fails if that worker is lost."""
        return worker_id in self._involved or worker_id in (self.parent, worker_of(self.id))

    def lost(self, worker_id: int, exc: Exception) -> None:
        """A worker or a message to it is lost; any thread that may run user code."""
        then = self.then
        if then is not None and then.is_begun:
            self.post(partial(then.outcomes.setdefault, worker_id, exc))
        else:
            self.fail(exc)

    def lost_worker(self, worker_id: int, reason: str, silence_s: float | None = None) -> WorkerLost:
        """The error for a message that did not reach a worker."""
        if silence_s is None:
            silence_s = self._agent.router.silence_s(worker_id)
        return WorkerLost(self.name_of(worker_id), "a backward pass", silence_s, reason)

    def fail(self, exc: BaseException) -> None:
        """Ends the pass on all workers, because of an error on this one; any thread."""
        if self.is_over:
            return
        error = exc
        if not issubclass(type(exc), BackwardError | DeadlineExceeded):  # a user's exception may break `isinstance`
            error = BackwardError(self.me, self.name_of(self.me), type(exc).__qualname__, text_of(exc))
            if self.parent is None:  # elsewhere nobody sees it, and its traceback would keep the graph
                set_cause(error, exc)
        self.abort(error, traceback_of(exc))

    def abort(self, error: BaseException, text: str = "") -> None:
        """Ends the pass with an error, and sends it to the other workers; any thread."""
        if not self._end(error):
            return
        message = autograd_pb2.AutogradMessage(context=self.context.id, backward=self.id)
        encode_error(error, self.me, self.name_of(self.me), message.aborted, text)
        for worker in (self._involved | {worker_of(self.id)}) - {self.me}:
            self._agent.router.send_if_alive(worker, rpc_pb2.Message(autograd=message))

    def _end(self, error: BaseException | None) -> bool:
        with self.lock:
            if self.is_over:
                return False
            self.error = error
            self.is_over = True
            left = list(self._inbox)
        part, self._part, then = self._part, None, self.then  # the part refers to this pass, and to the graph
        if part is not None:
            part.close()
        self.wake()
        context = self.context
        context.ended_passes[self.id] = error
        context.spans.extend([(self.id, *span) for span in self.spans])
        if then is None or not then.is_begun:
            context.is_spent = error is None and not self.options.retain_graph
        self._on_end(self)
        for item in left:
            if type(item) is tuple and item[1].begins:
                self._on_late(item[0])
        return True


@dataclass(slots=True)
class _PassMessageObserver:
    """Fails a pass when one of its messages was not sent."""

    _pass: BackwardPass
    _to: int

    @property
    def ended(self) -> bool:
        # A pass that has succeeded on this worker still owes the other workers its last messages.
        return self._pass.error is not None

    @property
    def retry_until(self) -> None:
        """None: a process that replaces the receiver does not know the pass."""
        return None

    def on_sent(self, session: AnySession, transfer: int) -> None:
        self._pass._links[self._to] = self._pass._source = session  # the answers will come there
        if session.closed_reason is not None:
            self._fail(self._pass.lost_worker(self._to, session.closed_reason))

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        lost = self._pass.lost_worker(self._to, reason, silence_s)
        self._fail(lost if is_lost else TransportError(f"{lost.what} was not sent: {reason}"))

    def _fail(self, exc: TransportError) -> None:
        self._pass.submit(self._pass.lost, self._to, exc)  # observers are called on the I/O loop
