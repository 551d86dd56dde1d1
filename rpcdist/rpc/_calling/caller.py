"""The caller's side of an agent: makes calls, sends them, and handles their replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

from torch.autograd import profiler as torch_profiler

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import BlockingInLoop, Overloaded, RpcdistError, TransportError
from rpcdist.profile_ranges import record_function
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._calling.call_table import INFINITE, CallTable, PendingCall, Submit
from rpcdist.rpc._calling.creations import NOT_INCLUDED, Creation
from rpcdist.rpc._calling.in_flight import COUNTED_FROM_BYTES, InFlightBytes
from rpcdist.rpc._calling.new_calls import CallFuture, Invocation, NewCall, NewCalls, SyncReplySink
from rpcdist.rpc._calling.result_streams import StreamTable
from rpcdist.rpc._executors.blocking import check_off_loop, hooks
from rpcdist.rpc._inspection.call_records import CallRecorder
from rpcdist.rpc._marshal.arrived_value import Arrived
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import AnySession, Lifetime, PoolJob
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._values.buffers import ReceiveBuffer, takes_long
from rpcdist.rpc.future import Future
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.transport.common_buffers import CommonBuffers, FreeMemory, free_memory
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import check_stack
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage

Destination = str | int | WorkerInfo


@dataclass(kw_only=True, eq=False, repr=False)
class Caller:
    """Makes the calls of one agent. Any thread may use it, except for the `on_*` methods.

    Args:
        max_in_flight_bytes: limit on the arguments of unfinished calls to one worker.
        on_handler_loop: whether the current thread runs the loop of handlers' coroutines.
    """

    directory: Directory
    router: Router
    marshal: Marshal
    streams: StreamTable
    submit: Submit
    io: IoLoop
    lifetime: Lifetime
    rpc_timeout_s: InitVar[float]
    max_in_flight_bytes: InitVar[int]
    on_handler_loop: Callable[[], bool]
    recorder: InitVar[CallRecorder | None] = None
    _common_memory: FreeMemory = field(default_factory=free_memory)

    def __post_init__(self, rpc_timeout_s: float, max_in_flight_bytes: int, recorder: CallRecorder | None) -> None:
        self.in_flight = in_flight = InFlightBytes(max_in_flight_bytes)
        give_back, send_again = self.marshal.give_back, self.router.send_again
        self.calls = CallTable(self.io, in_flight, self.directory.name_of, self.submit, give_back, send_again, recorder)
        self.new_calls = NewCalls(self.calls, self.marshal, rpc_timeout_s)
        self.timeout_of = self.new_calls.timeout_of

    # ------------------------------------------------------------ making calls

    def sync(self, to: Destination, what: Invocation) -> Any:
        """Calls a function, and waits for its result."""
        if asyncio._get_running_loop() is not None:
            raise BlockingInLoop("rpc_sync", "await rpc.rpc_async(...)")
        reply_sink = SyncReplySink()
        to = self._resolve(to, what.timeout_s)
        call, message, large = self.new_calls.of_function(to, what, reply_sink)
        if torch_profiler._is_profiler_enabled:
            with record_function(call.what()):
                return self._send_and_wait(call, message, large, reply_sink)
        return self._send_and_wait(call, message, large, reply_sink)

    def _send_and_wait(
        self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer], reply_sink: SyncReplySink
    ) -> Any:
        if large or message.value is not None or len(message.body) >= COUNTED_FROM_BYTES:
            self._wait_for_room(call, message, large)
        session = self.router.session_for_call(call.peer)
        if session is None or (large and takes_long(large)):  # then others must be able to read while this thread sends
            return reply_sink.wait(call, partial(self._send, call, message, large, session))
        try:
            self._enter(call, message, large, session)
            read = partial(session.request_and_wait, message, large, call.on_sent)
            return reply_sink.wait(call, session=session, read=read)
        except BaseException:
            if call.session is None:  # it was not sent
                self._withdraw(call)
            raise

    def begin(self, to: int, what: Invocation) -> Callable[[], Any]:
        """Makes and sends a call; returns a function that waits for the result, for a thread that will call it."""
        reply_sink = SyncReplySink()
        call, message, large = self.new_calls.of_function(to, what, reply_sink)
        self._start_in_turn(call, message, large)
        return lambda: reply_sink.wait(call)

    def start_call(self, to: Destination, what: Invocation) -> Future[Any]:
        """Calls a function; cancelling the future cancels the call."""
        future = CallFuture()
        to = self._resolve(to, what.timeout_s)
        call, message, large = self.new_calls.of_function(to, what, future)
        future.expect(call)
        self._start_in_turn(call, message, large)
        return future

    def start_each(
        self, workers: Sequence[Destination], what: Invocation, unsent: list[NewCall] | None = None
    ) -> list[Future[Any]]:
        """`start_call` for several workers; common parts of the calls are encoded once.

        Args:
            workers: their names, ranks or descriptions.
            unsent: gets the short calls, which `send_each` must send; None sends them now.
        """
        futures: list[Future[Any]] = []
        made: NewCall | None = None
        receivers = [self._resolve(worker, what.timeout_s) for worker in workers]
        for to in receivers:
            future = CallFuture()
            again = None if made is None else self.new_calls.for_another(made, to, future)
            made = again or self.new_calls.of_function(to, what, future)
            if made[2] and again is None and len(workers) > 1 and self.new_calls.is_for_all(made):
                made = (made[0], made[1], CommonBuffers(made[2], self._common_memory, frozenset(receivers)))
            future.expect(made[0])
            futures.append(future)
            is_short = not made[2] and made[1].value is None and len(made[1].body) < COUNTED_FROM_BYTES
            can_wait = is_short and self.new_calls.is_for_all(made) and not torch_profiler._is_profiler_enabled
            if unsent is not None and can_wait and len(unsent) == len(futures) - 1:
                unsent.append(made)
            else:
                self._start_in_turn(*made)
        return futures

    def send_each(
        self, calls: Sequence[NewCall], wait: Callable[[AnySession | None, Callable[[], None]], list[Any]]
    ) -> list[Any]:
        """Sends calls within a wait for their replies.

        Args:
            calls: from `start_each`.
            wait: called with the first session, or None, and a function that it must call once while it reads that
                session; this function makes the thread read all sessions, and sends the calls.
        """
        sessions = [self.router.session_for_call(call.peer) for call, _, _ in calls]
        first = next((session for session in sessions if session is not None), None)

        def send() -> None:
            for session in sessions:
                if session is not None and session is not first:
                    session.read_along_with(first)
            for (call, message, large), session in zip(calls, sessions, strict=True):
                self._send(call, message, large, session)

        return wait(first, send)

    def remote(
        self, to: int, what: Invocation, share: ReferenceShare, listener: RRefShell, is_serial: bool = False
    ) -> Creation:
        """Asks a worker to run a function and keep its result under the ids of `share`."""
        creation = Creation(share, listener, self.submit)
        call, message, large = self.new_calls.of_function(to, what, creation, share, is_serial)
        self._send_in_turn(call, message, large)
        creation.began(call)
        return creation

    def fetch_created(self, creation: Creation) -> Any:
        """Waits for the value of a `remote()` if its message can still ask for it; else `NOT_INCLUDED`."""
        if asyncio._get_running_loop() is not None or current_autograd.get() is not None:
            return NOT_INCLUDED
        value_sink = SyncReplySink()
        try:
            call = creation.want_value(value_sink, self.new_calls.rpc_timeout_s or INFINITE)
        except BaseException:  # Ctrl-C
            creation.forget(value_sink)
            raise
        # The call continues when this thread no longer waits.
        forget = partial(creation.forget, value_sink)
        return NOT_INCLUDED if call is None else value_sink.wait(call, session=call.session, forget=forget)

    def fetch(self, owner: int, share: ReferenceShare, timeout_s: float) -> Any:
        check_off_loop("to_here()", "await rref")
        if not self.directory.knows(owner):  # the reference may come from a worker that knows it already
            self.directory.resolve(owner, self.deadline_of(timeout_s).remaining_s())
        reply_sink = SyncReplySink()
        return self._send_and_wait(*self.new_calls.of_fetch(owner, share, timeout_s, reply_sink), reply_sink)

    def start_fetch(self, owner: int, share: ReferenceShare, timeout_s: float) -> Future[Any]:
        future = CallFuture()
        call, message, large = self.new_calls.of_fetch(owner, share, timeout_s, future)
        future.expect(call)
        self._send(call, message, large, self.router.session_for_call(owner))
        return future

    def gather(self, to: int, name: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """Calls a function that every worker serves under this name, and that waits for other workers; blocks."""
        reply_sink = SyncReplySink()
        call, message, large = self.new_calls.of_gathering(to, name, args, timeout_s, reply_sink)
        return reply_sink.wait(call, partial(self._send, call, message, large))

    def start_gathering(self, to: int, name: str, args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        future = CallFuture()
        call, message, large = self.new_calls.of_gathering(to, name, args, timeout_s, future)
        future.expect(call)
        self._send(call, message, large)
        return future

    def _start_in_turn(self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer]) -> None:
        if torch_profiler._is_profiler_enabled:
            # The range ends when the call is sent. When the result arrives, on any thread, the profiler may have ended
            # and freed its memory, to which the end of the range would write.
            with record_function(call.what()):
                self._send_in_turn(call, message, large)
        else:
            self._send_in_turn(call, message, large)

    def _send_in_turn(self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer]) -> None:
        """Sends a call when there is room for its bytes; see `in_flight`. Waits for that, except on an event loop."""
        later: Callable[[], None] | None = None
        if large or message.value is not None or len(message.body) >= COUNTED_FROM_BYTES:
            if asyncio._get_running_loop() is None:
                self._wait_for_room(call, message, large)
            else:
                later = partial(self._send_later, call, message, large)
        try:
            session = self.router.session_for_call(call.peer)
        except BaseException:  # Ctrl-C
            self._withdraw(call)
            raise
        self._send(call, message, large, session, later)

    def _wait_for_room(self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer]) -> None:
        """Waits until a call may be sent, unless a handler makes it; not on an event loop.

        Raises:
            Overloaded: there was no room until the deadline.
        """
        num_bytes = _num_bytes(message, large)
        if num_bytes < COUNTED_FROM_BYTES:
            return
        if hooks.enter is not None:  # a pool thread
            self.in_flight.take_anyway(call.peer, call.id, num_bytes)
            return
        try:
            if not self.in_flight.wait(call.peer, call.id, num_bytes, call.deadline):
                raise Overloaded(
                    f"{call.what()} was not sent: until its deadline, the arguments of unfinished calls to that worker "
                    f"filled the {self.in_flight.limit_bytes} bytes of RpcOptions(max_in_flight_bytes=...). Wait for "
                    "some results before you make more calls, or raise the limit"
                )
        except BaseException:
            self.marshal.give_back(call.forks)
            raise

    def _has_room(self, call: PendingCall, num_bytes: int, later: Callable[[], None]) -> bool:
        """Whether a call may be sent now; if not, `later` is called on the I/O loop when it may. On an event loop."""
        if num_bytes < COUNTED_FROM_BYTES:
            return True
        if self.on_handler_loop():
            self.in_flight.take_anyway(call.peer, call.id, num_bytes)
            return True
        return self.in_flight.defer(call.peer, call.id, num_bytes, lambda: self.io.call_soon(later))

    def _send_later(self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer]) -> None:
        """Sends a call that had to wait, unless it has ended; on the I/O loop."""
        if call.ended:
            self.in_flight.end(call.peer, call.id)
            return
        try:
            message.timeout_us = max(1, int(call.deadline.remaining_s() * 1e6)) if call.deadline.is_finite else 0
            self._route(call, message, large)
        except Exception as exc:
            self.calls.end(call, exc)

    def deadline_of(self, timeout_s: float) -> Deadline:
        """The deadline of a call that begins now: that of its timeout, or of the call that is handled here."""
        return Deadline.after(self.timeout_of(timeout_s)).earlier(current_deadline.get())

    def _resolve(self, to: Destination, timeout_s: float) -> int:
        """The id of a destination. If the coordinator may be lost, or have returned, looks for it first; bounded."""
        worker_id = self.directory.find(to)
        if worker_id is None:
            worker_id = self.directory.resolve(to, self.deadline_of(timeout_s).remaining_s())
        if worker_id == self.directory.coordinator and self.router.coordinator_may_be_lost():
            self.router.find_coordinator(self.deadline_of(timeout_s))
        return worker_id

    def _send(
        self,
        call: PendingCall,
        message: CallMessage,
        large: Sequence[LargeBuffer],
        session: AnySession | None = None,
        later: Callable[[], None] | None = None,
    ) -> None:
        """Enters a call into the table, and passes its message to its session, or to the router if there is none.

        The table comes first, since the reply may arrive before this returns. If there is no room for the call's bytes
        and `later` is given, `later` is called when there is room; meanwhile the deadline applies.
        """
        try:
            check_stack()  # a message that is sent in part would end the session
            self._enter(call, message, large, session)
            if later is not None and not self._has_room(call, _num_bytes(message, large), later):
                return
            if session is None:
                self._route(call, message, large)
            else:
                call.on_sent(session, session.send(message, large))
        except BaseException:
            self._withdraw(call)
            raise

    def _enter(
        self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer], session: AnySession | None
    ) -> None:
        """Enters a call into the table before it is sent, and completes its message."""
        if self.lifetime.is_closed:
            self.in_flight.end(call.peer, call.id)
            raise RpcdistError("RPC is shutting down in this process")
        if call.is_repeatable and not large and not call.forks:
            call.repeat = message
        self.calls.add(call)
        at = call.deadline.at
        message.timeout_us = 0 if at == INFINITE else max(1, int((at - time.monotonic()) * 1e6))
        if session is not None and self.marshal.gpu_news:
            self.marshal.send_gpu_news(session)

    def _withdraw(self, call: PendingCall) -> None:
        """Ends a call that could not be sent, or was interrupted by Ctrl-C: its caller will not get its outcome."""
        if not self.calls.cancel(call, None):
            self.marshal.give_back(call.forks)

    def _route(self, call: PendingCall, message: CallMessage, large: Sequence[LargeBuffer]) -> None:
        try:
            self.router.send_call(call.peer, message, large, call)
        except TransportError as exc:
            call.on_not_sent(self.router.silence_s(call.peer), str(exc))

    # ------------------------------------------------------------ replies

    def on_reply(
        self, session: AnySession, reply: ReplyMessage, buffers: list[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        """Handles a reply; on the thread that has read it: the I/O loop, or a waiting thread."""
        failure = None
        payload = self.marshal.arrived_with(reply, buffers, session.peer)
        if payload is None and reply.has_value:
            payload = Arrived()
        elif reply.failure is not None:
            failure = self.marshal.arrived_failure(reply.failure, buffers, session.peer)
        outcome = OK if failure is None else failure.type_name
        call = self.calls.take_answered(reply.id, session, outcome, reply.is_stream)
        if call is None:  # it timed out or was cancelled here, or was sent to another worker
            if payload is not None:
                payload.discard()
            elif failure is not None:
                failure.discard()
            elif reply.is_stream:
                session.send(rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=reply.id)))
            return
        if reply.is_stream:
            stream = self.streams.open(call, session, None if call.timeout_s == INFINITE else call.timeout_s)
            call.reply_sink.replied(None, stream, jobs)
            return
        if payload is not None:
            payload.autograd = call.autograd
        call.reply_sink.replied(failure, payload, jobs)


def _num_bytes(message: CallMessage, large: Sequence[LargeBuffer]) -> int:
    """The bytes of a call with its large buffers, for its share of the memory in flight."""
    return message.size_bytes + sum(buffer.size for buffer in large)
