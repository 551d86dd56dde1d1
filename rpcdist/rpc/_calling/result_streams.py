"""Results that are streams: a generator at the callee, an iterator at the caller, credits between them.

The producer sends an item only for a credit. The consumer grants `window` credits at first, and returns them in halves
of the window as it takes items, so that a slow consumer slows down its producer and a fast one does not wait for a
round trip per item.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2
from rpcdist.at_exit import AtEnd
from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import Cancelled, DeadlineExceeded, ProtocolViolation, RpcdistError, WorkerLost
from rpcdist.inspection import StreamFacts
from rpcdist.profile_ranges import span_taps
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._calling.call_table import PendingCall
from rpcdist.rpc._executors.blocking import check_off_loop
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._marshal.arrived_value import ArrivedFailure, ArrivedValue
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc.future import Future
from rpcdist.waiters import RareWaits, running_loop, wake_threadsafe

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 16
T = TypeVar("T")

_END = object()


@dataclass(eq=False, repr=False)
class StreamState:
    """The receiving end, without the object that the user holds. The agent's table keeps this, and the user's object
    may be dropped at any time.

    Attributes:
        autograd: the autograd context of the call, or None.
        on_ended: called with the outcome when the consumer has reached the end, or has closed the stream; for traces.
    """

    id: int
    what: str
    _window: int
    _grant: Callable[[int], None]
    _cancel: Callable[[], None]
    autograd: CallContext | None = None
    on_ended: Callable[[str], object] | None = None
    _taken: int = 0
    _items: deque[ArrivedValue] = field(default_factory=deque)
    _ended: bool = False
    _exhausted: bool = False  # the consumer knows that the stream has ended
    _failure: BaseException | ArrivedFailure | None = None
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _async_waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _readers: int = 0
    _last_read: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._half = max(1, self._window // 2)

    def __repr__(self) -> str:
        return f"<stream {self.id} of {self.what} [{len(self._items)} waiting{', ended' if self._ended else ''}]>"

    # On the I/O loop.

    def arrived(self, item: ArrivedValue) -> None:
        """Raises `ProtocolViolation` for an item that the producer was not granted."""
        with self._condition:
            if self._ended:
                item.discard()
                return
            if len(self._items) + self._taken >= self._window:
                item.discard()
                raise ProtocolViolation(f"more than {self._window} unread items of the stream of {self.what} arrived")
            self._items.append(item)
            self._notify()

    def end(self, failure: BaseException | ArrivedFailure | None) -> None:
        """Records that no more items come. Idempotent; any thread."""
        with self._condition:
            if not self._ended:
                self._ended = True
                self._failure = failure
                self._notify()
                return
        if isinstance(failure, ArrivedFailure):
            failure.discard()

    def _notify(self) -> None:
        self._condition.notify_all()
        waiters, self._async_waiters = self._async_waiters, []
        for waiter in waiters:
            wake_threadsafe(waiter)

    # On the consumer's thread or loop.

    def take(self, timeout_s: float | None) -> object:
        """The next item, or `_END`; blocks."""
        deadline = Deadline.after(timeout_s)
        slice_s = longest_sleep_s()
        with self._condition:
            self._readers += 1
            try:
                while not self._items and not self._ended:
                    if deadline.expired():
                        raise self._late(timeout_s)
                    self._condition.wait(min(slice_s, deadline.remaining_s()))
                return self._next_locked()
            finally:
                self._readers -= 1

    async def take_async(self, timeout_s: float | None) -> object:
        """The next item, or `_END`. Cancellation takes no item."""
        loop = running_loop()
        limit = None if timeout_s is None else loop.time() + timeout_s
        while True:
            with self._condition:
                if self._items or self._ended:
                    return self._next_locked()
                future: asyncio.Future[None] = loop.create_future()
                self._async_waiters.append(future)
                self._readers += 1
            try:
                async with asyncio.timeout_at(limit):
                    await future
            except TimeoutError:
                raise self._late(timeout_s) from None
            finally:
                with self._condition:
                    self._readers -= 1

    def _late(self, timeout_s: float | None) -> DeadlineExceeded:
        return DeadlineExceeded(f"no item of the stream of {self.what} arrived within {timeout_s} s")

    def unread_s(self) -> float:
        """Seconds since an item was last read; 0 while a thread or task waits for one."""
        return 0.0 if self._readers else time.monotonic() - self._last_read

    def facts(self, session: str, peer: str) -> StreamFacts:
        return StreamFacts(self.id, session, self.what, peer, "reads", len(self._items), self.unread_s() or None)

    def _next_locked(self) -> object:
        self._last_read = time.monotonic()
        if not self._items:
            self._exhausted = True
            return _END
        item = self._items.popleft()
        if not self._ended:
            self._taken += 1
            if self._taken >= self._half:
                self._grant(self._taken)
                self._taken = 0
        return item

    def check_not_exhausted(self) -> None:
        if self._exhausted:
            raise RpcdistError(
                f"the stream of {self.what} has been read to its end, and its items are not kept: store them in a list "
                "the first time (items = list(stream)), or call the function again"
            )

    def take_failure(self) -> BaseException | None:
        """The error that ended the stream; None for a regular end, and from the second call on.

        It is not kept: once raised, its traceback holds the stream's object, whose finalizer holds this state.
        """
        failure, self._failure = self._failure, None
        return failure.exception() if isinstance(failure, ArrivedFailure) else failure

    def report_end(self, outcome: str) -> None:
        """Reports once that the consumer has reached the end, or has closed the stream."""
        on_ended, self.on_ended = self.on_ended, None
        if on_ended is not None:
            on_ended(outcome)

    def cancel(self) -> None:
        """Ends the stream from this side; the producer's generator is closed. Idempotent."""
        try:
            if not self._ended:
                self._cancel()
        finally:
            self.report_end("Cancelled")
        closed = Cancelled(f"the stream of {self.what} was closed by its consumer")
        self.end(closed)
        with self._condition:
            items, failure = list(self._items), self._failure
            self._items.clear()
            if items:  # the end may have arrived, but a consumer that reads on would miss these items
                self._failure = closed
        for item in items:
            item.discard()
        if isinstance(failure, ArrivedFailure):
            failure.discard()


class Stream(Generic[T]):
    """The items of a remote generator: use `for` in a thread, `async for` in a coroutine.

    It can be consumed once. Leaving it unfinished (`close`, `aclose`, or dropping it) closes the generator at the other
    end. An exception of the generator is raised after the items that preceded it.

    Args:
        timeout_s: limit of the wait for each item, in seconds; None for no limit.
        dropped: gets the receiving end when this object is freed.
    """

    def __init__(self, state: StreamState, timeout_s: float | None, dropped: deque[StreamState]) -> None:
        self._state = state
        self._timeout_s = timeout_s
        self._at_end = AtEnd(dropped.append, state)

    def __repr__(self) -> str:
        return f"Stream({self._state!r})"

    def __iter__(self) -> Iterator[T]:
        """Raises `RpcdistError` if the items have been taken: they are not kept."""
        self._state.check_not_exhausted()
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            StopIteration: the generator is exhausted.
            DeadlineExceeded: no item arrived in time.
            WorkerLost: the producer died.
            Exception: the generator raised it.
        """
        check_off_loop("iterating a stream with `for`", "async for item in stream")
        return self._result(self._state.take(self._timeout_s), StopIteration)

    def __aiter__(self) -> AsyncIterator[T]:
        """Like `__iter__`."""
        self._state.check_not_exhausted()
        return self

    async def __anext__(self) -> T:
        """The next item; raises the same errors as `__next__`. Cancellation loses no item."""
        return self._result(await self._state.take_async(self._timeout_s), StopAsyncIteration)

    def _result(self, item: object, exhausted: type[Exception]) -> T:
        if isinstance(item, ArrivedValue):
            return item.decode()  # type: ignore[return-value]  # the caller of the stream decides what T is
        failure = self._state.take_failure()
        self._state.report_end(OK if failure is None else type(failure).__name__)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame: a cycle
        raise exhausted

    def close(self) -> None:
        """Ends the stream; the generator at the other end is closed. Idempotent, does not block."""
        self._state.cancel()

    async def aclose(self) -> None:
        """Like `close`."""
        self._state.cancel()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


@dataclass(eq=False, repr=False)
class StreamTable:
    """The streams that this worker consumes.

    Args:
        send: sends a message about a call to a worker, unless the worker is gone.
    """

    _send: Callable[[int, rpc_pb2.Message], None]
    _marshal: Marshal
    _streams: dict[int, tuple[StreamState, AnySession]] = field(default_factory=dict)
    _dropped: deque[StreamState] = field(default_factory=deque)
    _idle: RareWaits = field(default_factory=RareWaits)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, call: PendingCall, session: AnySession, timeout_s: float | None) -> Stream[object]:
        """Registers the stream that a call returned; on the I/O loop, before its first item."""
        id, peer = call.id, call.peer

        def grant(items: int) -> None:
            self._send(peer, rpc_pb2.Message(stream_credit=rpc_pb2.StreamCredit(id=id, items=items)))

        def cancel() -> None:
            self._pop(id)
            self._send(peer, rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=id)))

        state = StreamState(id, call.what(), DEFAULT_WINDOW, grant, cancel)
        state.autograd = call.autograd
        if call.span is not None or span_taps:
            # Without the call, which holds the stream: a stream that is no longer used must be freed.
            called = call.called if isinstance(call.called, str) else call.what()
            state.on_ended = partial(_report_end, call.span, called, session.peer.name, time.monotonic())
        self._streams[id] = (state, session)
        return Stream(state, timeout_s, self._dropped)

    def on_item(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        """Handles an item. The shares of references in it are always received, so that they can be returned."""
        item = message.stream_item
        arrived = self._marshal.arrived(item.value, buffers, session.peer)
        entry = self._streams.get(item.id)
        if entry is None or entry[1] is not session:
            arrived.discard()  # cancelled at this end, or sent by a worker that does not produce this stream
        else:
            arrived.autograd = entry[0].autograd
            entry[0].arrived(arrived)

    def on_end(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        end = message.stream_end
        if (entry := self._streams.get(end.id)) is None or entry[1] is not session:
            return
        entry = self._pop(end.id)
        if entry is not None:
            failed = end.HasField("failure")
            entry[0].end(self._marshal.arrived_failure(end.failure, buffers, session.peer) if failed else None)

    def on_broken(self, session: AnySession, reason: str) -> None:
        silence_s = time.monotonic() - session.last_received
        self._fail(lambda on: on is session, lambda what: WorkerLost(session.peer.name, what, silence_s, reason))

    def fail_all(self, text: str) -> None:
        self._fail(lambda on: True, lambda what: RpcdistError(text))

    def _pop(self, id: int) -> tuple[StreamState, AnySession] | None:
        entry = self._streams.pop(id, None)
        if not self._streams and self._idle.num:
            self._idle.recheck()
        return entry

    def _fail(self, matches: Callable[[AnySession], bool], error: Callable[[str], BaseException]) -> None:
        for id, (state, session) in list(self._streams.items()):
            if matches(session) and self._pop(id) is not None:
                state.end(error(state.what))

    def close_unread(self, limit_s: float) -> None:
        """Closes the streams that were not read for this time, in seconds; logs each."""
        for state, _ in list(self._streams.values()):
            if (unread_s := state.unread_s()) >= limit_s:
                logger.warning(
                    "the stream of %s was closed by shutdown: it was not read for %.0f s. Close streams that are not "
                    "read to their end",
                    state.what,
                    unread_s,
                )
                state.cancel()

    def wait_empty(self, timeout_s: float) -> bool:
        return self._idle.wait_for(lambda: not self._streams, timeout_s)

    def facts(self, most: int) -> list[StreamFacts]:
        streams = list(islice(self._streams.values(), most))
        return [state.facts(session.id.hex(), session.peer.name) for state, session in streams]

    def describe(self) -> list[str]:
        return [repr(state) for state, _ in list(self._streams.values())]

    def drain(self) -> None:
        """Cancels the streams whose objects were dropped; never called from a finalizer."""
        while self._dropped:
            self._dropped.popleft().cancel()


class StartingStream(Stream[T]):
    """A stream whose call has not been answered yet; the first `async for` waits for the answer.

    Cancelling that first wait cancels the call, as with `await rpc.rpc_async(...)`.

    Args:
        start: its result is the stream.
        function: the called function, for messages.
    """

    def __init__(self, start: Future[Any], function: object) -> None:
        self._start = start
        self._function = function
        self._is_closed = False

    def __repr__(self) -> str:
        return repr(self._stream or self._start)

    @property
    def _stream(self) -> Stream[T] | None:
        if not self._start.done() or self._start.exception() is not None:
            return None
        result = self._start.value()
        return result if isinstance(result, Stream) else None

    def __iter__(self) -> Iterator[T]:
        if (stream := self._stream) is not None:
            iter(stream)  # raises if its items have been taken
        return self

    def __next__(self) -> T:
        check_off_loop("iterating a stream with `for`", "async for item in rpc.rpc_stream(...)")
        return next(self._started(self._start.wait()))  # in another thread

    def __aiter__(self) -> AsyncIterator[T]:
        if (stream := self._stream) is not None:
            aiter(stream)  # as above
        return self

    async def __anext__(self) -> T:
        return await anext(self._started(await self._start))

    def _started(self, result: object) -> Stream[T]:
        stream: Stream[T] = check_is_stream(result, self._function)
        if self._is_closed:
            stream.close()  # the consumer may see the answer before `_close_result` does
        return stream

    def close(self) -> None:
        self._is_closed = True
        if not self._start.cancel():  # answered already, but perhaps not decoded yet
            self._start._when_done(_close_result)

    async def aclose(self) -> None:
        self.close()


def _close_result(start: Future[Any]) -> None:
    if start.exception() is None and isinstance(stream := start.value(), Stream):
        stream.close()


def check_is_stream(result: object, function: object) -> Stream[Any]:
    """Raises `TypeError` if a function that should be a generator function returned something else."""
    if isinstance(result, Stream):
        return result
    raise TypeError(f"rpc_stream expects a generator function, but {function!r} returned {type(result).__name__}")


def _report_end(span: Any, called: str, peer: str, began_s: float, outcome: str) -> None:
    """Reports a stream that was read to tracing."""
    if span is not None and (spans := call_records.exporter) is not None:
        spans.end(span, called, peer, outcome)
    for tap in list(span_taps):
        tap("streams", f"{called} from {peer}", began_s, time.monotonic())
