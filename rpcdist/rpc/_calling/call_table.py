"""Calls that wait for their reply, and what takes it: a blocked thread, or a future.

A call ends exactly once: the event that takes it out of the table (reply, deadline, cancellation, loss of the peer,
shutdown) completes it. Taking it out is one `dict.pop`, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline, acquire, current_deadline
from rpcdist.errors import Cancelled, DeadlineExceeded
from rpcdist.inspection import CallMade
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._autograd_hooks import CallContext, current_autograd
from rpcdist.rpc._calling.in_flight import InFlightBytes
from rpcdist.rpc._executors.blocking import blocking, hooks
from rpcdist.rpc._executors.torch_state import is_default
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import CallRecorder, EndedCalls
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedFailure
from rpcdist.rpc._peers.network import AnySession, PoolJob
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc.future import Future
from rpcdist.time_limits import CALL_QUESTION_LEAD_S, THREAD_GRACE_S
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.wire_messages import WireMessage

logger = logging.getLogger(__name__)


CallState = rpc_pb2.CallState
INFINITE: Final = float("inf")
FETCH: Final = "to_here()"
MAX_NAME: Final = 500  # characters of the name of a function in reports


class ReplySink(Protocol):
    """Takes the outcome of a call."""

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        """The reply came; called on the thread that read it, or that made a call to oneself; it must not run user code.

        Args:
            failure: what the callee raised, or None.
            payload: an `Arrived` value, a `Stream`, or None.
            jobs: gets the remaining work for the pool.
        """

    def failed(self, exc: BaseException) -> None:
        """The call ended otherwise; any thread."""


class CallOwner(Protocol):
    """The `Caller`, as its calls see it; any thread."""

    def name_of(self, worker_id: int) -> str:
        """The name of a worker, for messages."""

    def submit(self, function: Callable[..., object], /, *arguments: object) -> None:
        """Gives a function to the pool."""

    def cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        """See `Caller.cancel`."""

    def is_pending(self, call: PendingCall) -> bool:
        """Whether it has not ended yet."""

    def on_unanswered(self, call: PendingCall, session: AnySession, reason: str) -> None:
        """The session on which it was sent has ended."""

    def on_undelivered(self, call: PendingCall, silence_s: float, reason: str, is_lost: bool) -> None:
        """See `SendObserver.on_not_sent`."""


class PendingCall:
    """One call in flight; it observes how its own message is sent (`SendObserver`).

    Attributes:
        id: its number on the wire.
        peer: the worker that it went to.
        called: the name of the function, or the reference whose value is wanted.
        deadline: when it ends at the latest.
        is_repeatable: it may run twice, so it is sent again when its connection breaks, until the worker is declared
            lost. Only where nothing but plain arguments travels: a share of a reference cannot be made twice.
        counts_as_work: a worker that shuts down waits for it, on both sides. A call that itself waits for other workers
            does not count: they would wait for each other.
        timeout_s: what the user asked for.
        state: what the callee has said about it, and when, once its deadline is near.
        was_asked: whether the callee was asked for that.
        inherited_s: what was left of the deadline, where it is that of the call that is being handled here; else None.
        reply_sink: takes the outcome.
        transfer: number of the transfer that carries its large arguments, 0 for none.
        forks: what the callee holds when the arguments have arrived, to be given back when they may not have.
        repeat: the message, if it may be sent again.
        is_bound: it names values, references or a context that only one process knows.
        autograd: the autograd context in which it was made, or None.
        on: the reference whose method is called, held until the reply; None for other calls.
        span: of OpenTelemetry, if the program wants spans.
    """

    __slots__ = (
        "_made",
        "autograd",
        "called",
        "counts_as_work",
        "deadline",
        "forks",
        "id",
        "inherited_s",
        "is_bound",
        "is_repeatable",
        "on",
        "owner",
        "peer",
        "repeat",
        "reply_sink",
        "session",
        "span",
        "state",
        "timeout_s",
        "transfer",
        "was_asked",
    )

    def __init__(
        self,
        owner: CallOwner,
        id: int,
        peer: int,
        called: str | ReferenceShare,
        deadline: Deadline,
        timeout_s: float,
        reply_sink: ReplySink,
        is_repeatable: bool = False,
        counts_as_work: bool = True,
    ) -> None:
        self.owner = owner
        self.id = id
        self.peer = peer
        self.called = called
        self.deadline = deadline
        self.timeout_s = timeout_s
        inherits = deadline.at != INFINITE and deadline is current_deadline.get()
        self.inherited_s = deadline.remaining_s() if inherits else None
        self._made = time.monotonic() if deadline.at == INFINITE else 0.0  # others can compute it
        self.reply_sink = reply_sink
        self.transfer = 0
        self.is_repeatable = is_repeatable
        self.counts_as_work = counts_as_work
        self.session: AnySession | None = None
        self.repeat: WireMessage | None = None
        self.forks: Sequence[value_pb2.RRefFork | int] | None = None
        self.autograd: CallContext | None = None
        self.on: Handle | None = None
        self.is_bound = True
        self.span: Any = None
        self.was_asked = False
        self.state: tuple[rpc_pb2.CallState, float] | None = None

    def __repr__(self) -> str:
        return f"<call {self.id}: {self.what()}, {self.deadline!r}>"

    def what(self) -> str:
        """For messages, e.g. "rpc to 'w1' of torch.add"."""
        if isinstance(self.called, str):
            return f"rpc to {self.owner.name_of(self.peer)!r} of {self.called}"
        return f"to_here() of {self.called.rref}"

    @property
    def ended(self) -> bool:
        return not self.owner.is_pending(self)

    @property
    def kept_until(self) -> Deadline | None:
        return None if self.is_bound or self.forks else self.deadline

    def on_sent(self, session: AnySession, transfer: int) -> None:
        """The message was given to a session; if that session has ended meanwhile, so has the call."""
        self.session = session
        self.transfer = transfer
        if session.closed_reason is not None:
            self.owner.on_unanswered(self, session, session.closed_reason)

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        self.owner.on_undelivered(self, silence_s, reason, is_lost)

    def cancel(self) -> bool:
        """Ends it, and tells the callee; its caller completes its own side. False if it has ended already."""
        return self.owner.cancel(self, None)

    def deadline_error(self) -> DeadlineExceeded:
        if self.inherited_s is None:
            limit = f"set timeout ({round(self.timeout_s * 1000)} ms)"
        else:
            limit = f"set timeout ({round(self.inherited_s * 1000)} ms, what was left for the call that made it)"
        text = f"RPC ran for more than {limit} and will now be marked with an error: {self.what()}"
        return DeadlineExceeded(f"{text}. {how_far}" if (how_far := self._how_far()) else text)

    @property
    def ask_at(self) -> float:
        """When the caller asks the callee how far the call is, in seconds of the monotonic clock."""
        return self.deadline.at - min(CALL_QUESTION_LEAD_S, self.timeout_s / 5)

    def unsent(self) -> tuple[int, int] | None:
        """The bytes of large arguments that were sent, and all of them; None if none are left to send."""
        return self.session.transfer_progress(self.transfer) if self.session is not None and self.transfer else None

    @property
    def made(self) -> float:
        """When it was made, in seconds of the monotonic clock."""
        if self._made:
            return self._made
        return self.deadline.at - (self.timeout_s if self.inherited_s is None else self.inherited_s)

    def end_span(self, outcome: str) -> None:
        """Ends its span, if there is one."""
        if self.span is not None and (spans := call_records.exporter) is not None:
            called = self.called if isinstance(self.called, str) else FETCH
            spans.end(self.span, called, self.owner.name_of(self.peer), outcome)

    def facts(self, now: float) -> CallMade:
        """Its state at a moment of the monotonic clock."""
        session, unsent = self.session, self.unsent()
        phase = "unsent" if session is None else "sending" if unsent is not None else "waiting"
        done, total = unsent or (0, 0)
        called = self.called if isinstance(self.called, str) else f"to_here() of {self.called.rref}"
        return CallMade(
            id=self.id,
            session="" if session is None else session.id.hex(),
            function=called[:MAX_NAME],
            to=self.owner.name_of(self.peer),
            phase=phase,
            age_s=now - self.made,
            remaining_s=self.deadline.at - now if self.deadline.is_finite else None,
            bytes_done=done,
            bytes_total=total,
            counts_as_work=self.counts_as_work,
        )

    def _how_far(self) -> str:
        """How far the call was, as a sentence; empty if there was no time to find out."""
        if (unsent := self.unsent()) is not None:
            sent, size = (num_bytes / (1 << 20) for num_bytes in unsent)
            return f"Its arguments were under way: {sent:.1f} of {size:.1f} MiB were sent."
        if self.session is None:
            why = own_shortage() or "there was no connection, or its arguments were still being written to it"
            return f"It was not sent: {why}."
        if not self.was_asked:
            return ""
        name, now = self.session.peer.name, time.monotonic()
        if self.state is None:
            return (
                f"{name!r} did not say how far it was; it was last heard {now - self.session.last_received:.1f} s ago."
            )
        state, at = self.state
        running_s = state.running_us / 1e6 + now - at
        return {
            CallState.QUEUED: f"It waited for a thread at {name!r}, and had not begun.",
            CallState.RUNNING: f"It had been running at {name!r} for {running_s:.2f} s.",
            CallState.WAITING: f"At {name!r} it waited for a value, or for the future that its function had returned.",
            CallState.IN_LINE: f"It waited for its turn at an actor on {name!r}, and had not begun.",
            CallState.STREAMING: f"It had been producing items at {name!r} for {running_s:.2f} s.",
        }.get(state.phase, f"{name!r} had ended it: its reply was under way.")


Submit = Callable[..., None]
"""Gives a function and its arguments to the pool."""


def result_of(failure: ArrivedFailure | None, payload: object) -> object:
    """The value of a reply; raises what the callee raised. Runs user code: never on the I/O loop."""
    if isinstance(payload, Arrived):
        return payload.decode()
    if failure is not None:
        raise failure.exception()
    return payload  # a stream, or None


def _is_made_here(payload: object) -> bool:
    """Whether the thread that has read a reply makes its value: that is quick, and runs no code of users.

    A thread of the user's makes no tensors of other calls in torch's modes, which could change them.
    """
    if isinstance(payload, Arrived):
        return payload.is_short and ((payload.is_simple and payload.autograd is None) or is_default())
    return payload is None  # of most functions


def _run_inside(context: CallContext | None, job: Callable[[], object]) -> None:
    """Callbacks of a call that was made in an autograd context run in it. Each job has a `contextvars` context."""
    if context is not None:
        current_autograd.set(context)
    job()


class SyncReplySink:
    """One blocked thread. The value is decoded on that thread, so a call costs no third one.

    The constructor takes the lock, and the end of the call releases it. Until then the thread reads from the
    connection of the call, or, if another thread does, sleeps on the lock.
    """

    __slots__ = ("_error", "_failure", "_lock", "_payload", "_session", "_thread")

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()
        self._failure: ArrivedFailure | None = None
        self._payload: object = None
        self._error: BaseException | None = None
        self._thread = 0  # the one that waits
        self._session: AnySession | None = None  # where the thread may be reading

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        self._failure = failure
        self._payload = payload
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.ring()

    def failed(self, exc: BaseException) -> None:
        self._error = exc
        self._lock.release()
        if self._session is not None and self._thread != get_ident():
            self._session.ring()

    def wait(
        self,
        call: PendingCall,
        send: Callable[[], object] | None = None,
        session: AnySession | None = None,
    ) -> object:
        """Waits for the call, and sends it before.

        Args:
            send: sends it; None if it was sent already.
            session: by which it will go, if there is one.

        Returns:
            The result; raises the call's failure, or `DeadlineExceeded`.
        """
        try:
            if hooks.enter is None:  # a thread of the user's
                ended = self._wait(call, send, session)
            else:
                with blocking():
                    ended = self._wait(call, send, session)
        except BaseException:  # Ctrl-C in the main thread
            self._cancel(call, Cancelled(f"{call.what()} was interrupted"))
            raise
        if not ended:
            overdue = call.deadline_error()
            if self._cancel(call, None):
                raise overdue
            self._lock.acquire(timeout=THREAD_GRACE_S)  # the outcome arrived in this very moment
        if (error := self._error) is not None:
            self._error = None
            try:
                raise error
            finally:
                del error  # it holds this frame, and with it the arguments: a cycle, in which references would live on
        return result_of(self._failure, self._payload)

    def _cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        """Ends a call that was interrupted, or whose deadline is over; False if it has ended already."""
        return call.owner.cancel(call, exc)

    def _wait(self, call: PendingCall, send: Callable[[], object] | None, session: AnySession | None) -> bool:
        if session is None and send is not None:
            send()
            send = None
        if (session := session or call.session) is not None:
            self._thread = get_ident()
            self._session = session  # before the lock is checked: a thread that releases it later then rings
            if session.lead(self._lock.locked, call.deadline.wait_s(), None, send):
                return True
        return acquire(self._lock, call.deadline.wait_s())


class CallFuture(Future[Any]):
    """The future of a call. The thread that reads the reply completes it if its value is plain and short. Another value
    is decoded by a thread that waits, or else by the pool, which runs callbacks, too.
    """

    __slots__ = ()

    def expect(self, call: PendingCall) -> None:
        """Says which call it is, before that is sent: a complete future lets go of its call, which holds it."""
        self._expected = call
        self._on_cancel = call.cancel

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        context = payload.autograd if isinstance(payload, Arrived) else None
        if failure is None and _is_made_here(payload):
            try:
                value = result_of(None, payload)
            except Exception as exc:  # it is damaged, or nested too deeply for the stack of this thread: see below
                logger.debug("a reply is left to the pool: %r", exc)
            else:
                if self._arrive(value):
                    jobs.append((_run_inside, (context, self._run_callbacks)))
                return
        if isinstance(payload, Arrived) and payload.is_on_gpus:
            payload.keep_gpu_tensors()
            self._arrived = payload
        if self._deliver(partial(result_of, failure, payload)):
            jobs.append((_run_inside, (context, self._settle)))
        elif self.cancelled() and isinstance(payload, Arrived):
            payload.discard()
        elif self.cancelled() and failure is not None:
            failure.discard()

    def failed(self, exc: BaseException) -> None:
        call = self._expected
        if isinstance(call, PendingCall):  # else it is complete
            call.owner.submit(self._fail, exc)


class CallTable:
    """The calls of an agent that are in flight. `add` and `take` may be called on any thread.

    Args:
        wake_at: asked to have `take_expired` called at a time, in seconds of the monotonic clock.
        recorder: remembers how calls ended; None for not at all.

    Attributes:
        next_id: numbers the calls.
        num_work: how many calls that count as work were ever made.
    """

    def __init__(
        self, wake_at: Callable[[float], None], in_flight: InFlightBytes, recorder: CallRecorder | None = None
    ) -> None:
        self._in_flight = in_flight
        self.ended = EndedCalls(None if recorder is None else recorder.made)
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self.next_id: Callable[[], int] = self._numbers.__next__
        self._earliest = float("inf")
        self._wake_at = wake_at
        self._empty = threading.Condition()
        self._waiters = 0
        self.num_work = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: object) -> bool:
        return id in self._calls

    @property
    def num_made(self) -> int:
        """How many calls were ever made."""
        return int(repr(self._numbers)[len("count(") : -1]) - 1  # uses up no number; copies end with Python 3.14

    def add(self, call: PendingCall) -> None:
        """Registers a call before it is sent; asks to be woken at its deadline."""
        self._calls[call.id] = call
        if call.counts_as_work:
            self.num_work += 1
        if call.deadline.at - CALL_QUESTION_LEAD_S < self._earliest and (at := call.ask_at) < self._earliest:
            self._earliest = at
            self._wake_at(at)

    def take(self, id: int, outcome: str = OK, is_stream: bool = False) -> PendingCall | None:
        """Removes a call; None if it has ended already. `outcome` is for the recorder; the span of a stream goes on."""
        call = self._calls.pop(id, None)
        if call is not None:
            if (note := self.ended.note) is not None:
                note((id, call.peer, call.called, call.made, time.monotonic(), outcome, 0.0))
            if call.span is not None and not is_stream:
                call.end_span(outcome)
            if id in self._in_flight.admitted:
                self._in_flight.end(call.peer, id)
            if self._waiters and not self._calls:
                with self._empty:
                    self._empty.notify_all()
        return call

    def take_answered(
        self, id: int, session: AnySession, outcome: str = OK, is_stream: bool = False
    ) -> PendingCall | None:
        """`take` for a reply. Only the session that carried the call may answer it; otherwise a peer could answer any
        call by guessing its number. While the call is being sent, its session is unknown yet, but its worker is known.
        """
        call = self._calls.get(id)
        if call is None or call.session is session:
            return None if call is None else self.take(id, outcome, is_stream)
        return self.take(id, outcome, is_stream) if call.session is None and call.peer == session.peer.id else None

    def note_state(self, session: AnySession, state: rpc_pb2.CallState) -> None:
        """Notes how far a call is, if its own callee says it: on the session by which the call was sent."""
        call = self._calls.get(state.id)
        if call is not None and call.session is session:
            call.state = state, time.monotonic()

    def take_expired(self) -> tuple[list[PendingCall], list[PendingCall]]:
        """Removes the calls whose deadline has passed, and asks to be woken at the next one.

        Returns:
            Those calls, and the ones about which the caller has to ask now how far they are, each once.
        """
        now = time.monotonic()
        expired, to_ask = [], []
        earliest = self._earliest = float("inf")
        for call in list(self._calls.values()):
            if call.deadline.at <= now:
                if self.take(call.id, "DeadlineExceeded") is not None:
                    expired.append(call)
                continue
            if not call.was_asked and call.ask_at <= now:
                call.was_asked = True
                to_ask.append(call)
            at = call.deadline.at if call.was_asked else call.ask_at
            if at < earliest:
                earliest = at
        if earliest < self._earliest:
            self._earliest = earliest
        if self._earliest != float("inf"):
            self._wake_at(self._earliest)
        return expired, to_ask

    def take_where(self, matches: Callable[[PendingCall], bool]) -> list[PendingCall]:
        """Removes the calls that match."""
        found = [call for call in list(self._calls.values()) if matches(call)]
        return [call for call in found if self.take(call.id, "given up by shutdown") is not None]

    def wait_empty(self, timeout_s: float | None) -> bool:
        """Waits until no call is in flight; False when the time is over."""
        with self._empty:
            self._waiters += 1
            try:
                return self._empty.wait_for(lambda: not self._calls, timeout_s)
            finally:
                self._waiters -= 1

    def by_age(self) -> Iterator[PendingCall]:
        """The calls, the oldest first; on the I/O loop, where another thread may end it early by changing the table."""
        try:
            yield from self._calls.values()
        except RuntimeError:
            return

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._calls.values()))


class CallTimer:
    """One per agent.

    Args:
        expire: called on it when a time has come; it asks for the next.
    """

    def __init__(self, io: IoLoop, expire: Callable[[], None]) -> None:
        self._io = io
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0  # kept here: for a time that has passed, uvloop returns a handle that does not know it

    def wake_at(self, at: float) -> None:
        """Asks to be woken at a time, in seconds of the monotonic clock; any thread."""
        self._io.call_soon(self._arm, at)

    def _arm(self, at: float) -> None:
        loop = self._io.loop
        when = loop.time() + at - time.monotonic()
        if self._handle is not None and not self._handle.cancelled() and loop.time() < self._at <= when:
            return
        self.stop()
        self._handle, self._at = loop.call_at(when, self._fire), when

    def _fire(self) -> None:
        self._handle = None
        self._expire()

    def stop(self) -> None:
        """On the I/O loop."""
        if self._handle is not None:
            self._handle.cancel()
