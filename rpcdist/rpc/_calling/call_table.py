"""Calls that wait for their reply, and how they end.

A call ends exactly once: the event that removes it from the table (reply, deadline, cancellation, loss of the peer,
shutdown) completes it. Removing it is one `dict.pop`, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Protocol

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, TransportError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.inspection import CallMade
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._calling.in_flight import InFlightBytes
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import CallRecorder, EndedCalls
from rpcdist.rpc._marshal.arrived_value import ArrivedFailure
from rpcdist.rpc._peers.network import AnySession, PoolJob
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.time_limits import CALL_QUESTION_LEAD_S
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.wire_messages import WireMessage
from rpcdist.waiters import RareWaits

CallState = rpc_pb2.CallState
INFINITE: Final = float("inf")
FETCH: Final = "to_here()"
MAX_NAME: Final = 500  # characters of a function's name in reports


class ReplySink(Protocol):
    """Gets the outcome of a call."""

    def replied(self, failure: ArrivedFailure | None, payload: object, jobs: list[PoolJob]) -> None:
        """Called with the reply, on the thread that has read it or called its own worker; must not run user code.

        Args:
            failure: the callee's exception, or None.
            payload: an `Arrived` value, a `Stream`, or None.
            jobs: gets the remaining work for the pool.
        """

    def failed(self, exc: BaseException) -> None:
        """Called if the call ended in another way; any thread."""


@dataclass(slots=True, eq=False, repr=False)
class PendingCall:
    """One call in flight; it observes how its own message is sent (`SendObserver`).

    Attributes:
        called: the name of the function, or the reference whose value is wanted.
        is_repeatable: whether it may run twice, so that it is sent again if its connection breaks, until the worker is
            declared lost. Only for calls with plain arguments: a share of a reference cannot be made twice.
        counts_as_work: whether a worker that shuts down waits for it, on both sides. Calls that wait for other workers
            do not count: these workers would wait for each other.
        timeout_s: the user's timeout; the deadline of the call that is being handled here may be earlier.
        made: when it was made, in monotonic seconds.
        state: the callee's last report about it, and when it arrived; requested when the deadline is near.
        was_asked: whether that report was requested.
        transfer: number of the transfer that carries its large arguments, 0 for none.
        forks: the shares that the callee gets with the arguments; returned if the arguments may not have arrived.
        repeat: the message, if it may be sent again.
        was_sent: whether it was sent on a connection that broke, and waits until it is sent again.
        is_bound: whether it names values, references or a context that only one process has.
        autograd: the autograd context in which it was made, or None.
        target_ref: the reference whose method is called, held until the reply; None for other calls.
        span: the span of OpenTelemetry, if the program uses spans.
    """

    table: CallTable
    id: int
    peer: int
    called: str | ReferenceShare
    deadline: Deadline
    timeout_s: float
    made: float
    reply_sink: ReplySink
    is_repeatable: bool = False
    counts_as_work: bool = True
    transfer: int = 0
    session: AnySession | None = None
    repeat: WireMessage | None = None
    was_sent: bool = False
    forks: Sequence[value_pb2.RRefFork | int] | None = None
    autograd: CallContext | None = None
    target_ref: Handle | None = None
    is_bound: bool = True
    span: Any = None
    was_asked: bool = False
    state: tuple[rpc_pb2.CallState, float] | None = None

    def __repr__(self) -> str:
        return f"<call {self.id}: {self.what()}, {self.deadline!r}>"

    def what(self) -> str:
        """For messages, e.g. "rpc to 'w1' of torch.add"."""
        if isinstance(self.called, str):
            return f"rpc to {self.table.name_of(self.peer)!r} of {self.called}"
        return f"to_here() of {self.called.rref}"

    @property
    def ended(self) -> bool:
        return self.id not in self.table

    @property
    def retry_until(self) -> Deadline | None:
        return None if self.is_bound or self.forks else self.deadline

    def on_sent(self, session: AnySession, transfer: int) -> None:
        """Called when the message was passed to a session; if that session has ended, so has the call."""
        self.session = session
        self.transfer = transfer
        if session.closed_reason is not None:
            self.table.on_session_lost(self, session, session.closed_reason)

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        if is_lost:
            name = self.table.name_of(self.peer)
            self.table.end(self, WorkerLost(name, self.what(), silence_s, reason, self.was_sent))
        else:
            again = " again" if self.was_sent else ""
            self.table.end(self, TransportError(f"{self.what()} was not sent{again}: {reason}"))

    def cancel(self) -> bool:
        """Ends it, and notifies the callee; its caller completes its own side. False if it has ended already."""
        return self.table.cancel(self, None)

    def deadline_error(self) -> DeadlineExceeded:
        limit = f"set timeout ({round(self.timeout_s * 1000)} ms)"
        if self.deadline.at < self.made + self.timeout_s:
            left_ms = round((self.deadline.at - self.made) * 1000)
            limit = f"set timeout ({left_ms} ms, the remaining time of the call that made it)"
        text = f"RPC ran for more than {limit} and will now be marked with an error: {self.what()}"
        return DeadlineExceeded(f"{text}. {how_far}" if (how_far := self._how_far()) else text)

    @property
    def ask_at(self) -> float:
        """The time at which the caller asks the callee for the progress of the call, in monotonic seconds."""
        return self.deadline.at - min(CALL_QUESTION_LEAD_S, self.timeout_s / 5)

    def unsent(self) -> tuple[int, int] | None:
        """The bytes of large arguments that were sent, and their total; None if none are left to send."""
        return self.session.transfer_progress(self.transfer) if self.session is not None and self.transfer else None

    def end_span(self, outcome: str) -> None:
        if self.span is not None and (spans := call_records.exporter) is not None:
            called = self.called if isinstance(self.called, str) else FETCH
            spans.end(self.span, called, self.table.name_of(self.peer), outcome)

    def facts(self, now: float) -> CallMade:
        session, unsent = self.session, self.unsent()
        phase = "unsent" if session is None else "sending" if unsent is not None else "waiting"
        done, total = unsent or (0, 0)
        called = self.called if isinstance(self.called, str) else f"to_here() of {self.called.rref}"
        return CallMade(
            id=self.id,
            session="" if session is None else session.id.hex(),
            function=called[:MAX_NAME],
            to=self.table.name_of(self.peer),
            phase=phase,
            age_s=now - self.made,
            remaining_s=self.deadline.at - now if self.deadline.is_finite else None,
            bytes_done=done,
            bytes_total=total,
            counts_as_work=self.counts_as_work,
        )

    def _how_far(self) -> str:
        """A sentence on the progress of the call; empty if there was no time to ask."""
        if (unsent := self.unsent()) is not None:
            sent, size = (num_bytes / (1 << 20) for num_bytes in unsent)
            return f"Only {sent:.1f} of {size:.1f} MiB of its arguments were sent."
        if self.session is None:
            why = own_shortage() or "there was no connection, or its arguments were still being written to it"
            return f"It was not sent{' again after its connection broke' if self.was_sent else ''}: {why}."
        if not self.was_asked:
            return ""
        name, now = self.session.peer.name, time.monotonic()
        if self.state is None:
            return (
                f"{name!r} did not report its progress; its last message arrived "
                f"{now - self.session.last_received:.1f} s ago."
            )
        state, at = self.state
        running_s = state.running_us / 1e6 + now - at
        return {
            CallState.QUEUED: f"It was waiting for a thread on {name!r}, and had not begun.",
            CallState.RUNNING: f"It had been running on {name!r} for {running_s:.2f} s.",
            CallState.WAITING: f"On {name!r} it was waiting for a value, or for the future that its function returned.",
            CallState.IN_LINE: f"It was waiting for its turn at an actor on {name!r}, and had not begun.",
            CallState.STREAMING: f"It had been producing items on {name!r} for {running_s:.2f} s.",
        }.get(state.phase, f"It had ended on {name!r}, and its reply was on the way.")


Submit = Callable[..., None]
"""Runs a function with its arguments on the pool."""


@dataclass(eq=False, repr=False)
class CallTable:
    """The calls of an agent that are in flight, and how they end. Any thread may use it, except for methods that run on
    the I/O loop.

    Args:
        give_back: returns the shares that the callee would have got with a call.
        send_again: sends the message of a call to the same process again; raises `TransportError`.

    Attributes:
        num_work: the number of calls made so far that count as work.
    """

    _io: IoLoop
    _in_flight: InFlightBytes
    name_of: Callable[[int], str]
    submit: Submit
    _give_back: Callable[[Sequence[value_pb2.RRefFork | int] | None], object]
    _send_again: Callable[[Identity, WireMessage, PendingCall], object]
    recorder: InitVar[CallRecorder | None] = None
    _calls: dict[int, PendingCall] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None
    _timer_at: float = 0.0  # kept here: for a time that has passed, uvloop returns a handle that does not know it
    _idle: RareWaits = field(default_factory=RareWaits)
    num_work: int = 0

    def __post_init__(self, recorder: CallRecorder | None) -> None:
        self.ended = EndedCalls(None if recorder is None else recorder.made)
        self._numbers = itertools.count(1)
        self.next_id: Callable[[], int] = self._numbers.__next__
        self._earliest = INFINITE

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: object) -> bool:
        return id in self._calls

    @property
    def num_made(self) -> int:
        return int(repr(self._numbers)[len("count(") : -1]) - 1  # uses up no number; copies end with Python 3.14

    def add(self, call: PendingCall) -> None:
        """Registers a call before it is sent, and sets the timer for its deadline."""
        self._calls[call.id] = call
        if call.counts_as_work:
            self.num_work += 1
        if call.deadline.at - CALL_QUESTION_LEAD_S < self._earliest and (at := call.ask_at) < self._earliest:
            self._earliest = at
            self._io.call_soon(self._set_timer, at)

    def take(self, id: int, outcome: str = OK, is_stream: bool = False) -> PendingCall | None:
        """Removes a call; None if it has ended. `outcome` is for the recorder; the span of a stream continues."""
        call = self._calls.pop(id, None)
        if call is not None:
            if (note := self.ended.note) is not None:
                note((id, call.peer, call.called, call.made, time.monotonic(), outcome, 0.0))
            if call.span is not None and not is_stream:
                call.end_span(outcome)
            if id in self._in_flight.admitted:
                self._in_flight.end(call.peer, id)
            if self._idle.num and not self._calls:
                self._idle.recheck()
        return call

    def take_answered(
        self, id: int, session: AnySession, outcome: str = OK, is_stream: bool = False
    ) -> PendingCall | None:
        """`take` for a reply. Only the session that carried the call may answer it; otherwise a peer could answer any
        call by guessing its number. While the call is being sent, its session is not set yet, but its worker is.
        """
        call = self._calls.get(id)
        if call is None or call.session is session:
            return None if call is None else self.take(id, outcome, is_stream)
        return self.take(id, outcome, is_stream) if call.session is None and call.peer == session.peer.id else None

    def on_state(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        """Records a callee's report on a call. Only the session on which the call was sent may bring it."""
        call = self._calls.get(message.call_state.id)
        if call is not None and call.session is session:
            call.state = message.call_state, time.monotonic()

    def by_age(self) -> Iterator[PendingCall]:
        """The calls, the oldest first; on the I/O loop. It may end early if another thread changes the table."""
        try:
            yield from self._calls.values()
        except RuntimeError:
            return

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._calls.values()))

    def wait_empty(self, timeout_s: float | None) -> bool:
        return self._idle.wait_for(lambda: not self._calls, timeout_s)

    # ------------------------------------------------------------ how calls end, other than by a reply

    def end(self, call: PendingCall, exc: BaseException) -> None:
        if self.take(call.id, type(exc).__name__) is not None:
            self._give_back(call.forks)
            call.reply_sink.failed(exc)

    def cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        """Ends a call and notifies the callee; False if it has ended already.

        Args:
            exc: the error with which it fails; None if the caller completes its own side.
        """
        if self.take(call.id, "Cancelled") is None:
            self._in_flight.end(call.peer, call.id)  # it may have been admitted, and not sent yet
            return False
        session = call.session
        if session is not None:
            if call.transfer:
                session.abort_transfer(call.transfer, "the call was cancelled")
            session.send(rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=call.id)))
        forks, call.forks = call.forks, None  # returned once, even if the caller then withdraws the call
        self._give_back(forks)
        if exc is not None:
            call.reply_sink.failed(exc)
        return True

    def fail_all(self, exc: BaseException) -> None:
        for call in self:
            if self.take(call.id, "abandoned by shutdown") is not None:
                call.reply_sink.failed(exc)

    def on_broken(self, session: AnySession, reason: str) -> None:
        """Ends the calls of a session that has ended, since they will not be answered. On the I/O loop."""
        for call in self:
            if call.session is session:
                self.on_session_lost(call, session, reason)

    def on_session_lost(self, call: PendingCall, session: AnySession, reason: str) -> None:
        """Fails a call whose session has ended, unless it may be repeated."""
        if call.repeat is None:
            self.end(call, _lost(session, reason, call.what()))
        else:
            self._io.call_soon(self._repeat, call, session, reason)

    def _repeat(self, call: PendingCall, session: AnySession, reason: str) -> None:
        if call.ended or call.session is not session or call.repeat is None:
            return
        call.session = None
        call.was_sent = True
        try:
            self._send_again(session.peer, call.repeat, call)
        except TransportError as exc:
            self.end(call, _lost(session, f"{reason}; {exc}", call.what()))

    # ------------------------------------------------------------ deadlines, on the I/O loop

    def _set_timer(self, at: float) -> None:
        """Sets the timer for the deadlines to a time in monotonic seconds, unless it is set to an earlier time."""
        loop = self._io.loop
        when = loop.time() + at - time.monotonic()
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer_at <= when:
            return
        self.stop_timer()
        self._timer, self._timer_at = loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        """Ends calls whose deadline has passed, and asks once for the progress of those whose deadline is near."""
        self._timer = None
        now = time.monotonic()
        expired, to_ask = [], []
        earliest = self._earliest = INFINITE
        for call in self:
            if call.deadline.at <= now:
                if self.take(call.id, "DeadlineExceeded") is not None:
                    expired.append(call)
                continue
            if not call.was_asked and call.ask_at <= now:
                call.was_asked = True
                to_ask.append(call)
            earliest = min(earliest, call.deadline.at if call.was_asked else call.ask_at)
        self._earliest = min(self._earliest, earliest)  # other threads add calls meanwhile
        if self._earliest != INFINITE:
            self._set_timer(self._earliest)
        for call in expired:
            error = call.deadline_error()
            if call.session is not None and call.transfer:
                call.session.abort_transfer(call.transfer, "the deadline of the call has passed")
            self._give_back(call.forks)
            call.reply_sink.failed(error)
        for call in to_ask:
            if call.session is not None and call.unsent() is None:
                call.session.send(rpc_pb2.Message(call_question=rpc_pb2.CallQuestion(id=call.id)))
                call.session.flush()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _lost(session: AnySession, reason: str, what: str) -> WorkerLost:
    return WorkerLost(session.peer.name, what, time.monotonic() - session.last_received, reason, was_sent=True)
