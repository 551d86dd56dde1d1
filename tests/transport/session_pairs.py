"""Two sessions in one process, over queues in memory or over the local channel, and what they need around them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import TransportError
from rpcdist.ids import Identity
from rpcdist.testing.limits import eventually_async
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.session import NullHandler, Session
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage

__all__ = [
    "LIMIT_S",
    "Borrowed",
    "ChannelPair",
    "Handler",
    "Io",
    "MemoryPair",
    "Pair",
    "announced",
    "call",
    "for_loop",
    "lose_turn_once",
    "num_unsent",
    "pretend_awake",
    "turn_of",
    "wake_writer",
]

LIMIT_S = 20.0


def call(id: int, body: bytes = b"") -> CallMessage:
    return CallMessage(id, "", value=value_pb2.Value(body=body))


def for_loop(id: int) -> ReplyMessage:
    """A message that only the loop may dispatch."""
    return ReplyMessage(id, is_stream=True)


def announced(transfer: int, *sizes: int, wrapped: bool = False) -> rpc_pb2.Message:
    return rpc_pb2.Message(transfer=transfer, large=sizes, wrapped=wrapped)


class MemoryStream:
    """One end of a channel made of two queues."""

    def __init__(self, inbox: asyncio.Queue[Any], outbox: asyncio.Queue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self.num_written = 0
        self.aborted: str | None = None

    async def read(self) -> bytes | None:
        data: bytes | None = await self._inbox.get()
        if self.aborted is not None:
            raise TransportError(self.aborted)
        return data

    async def write(self, data: bytes) -> None:
        if self.aborted is not None:
            raise TransportError(self.aborted)
        self.num_written += 1
        self._outbox.put_nowait(bytes(data))
        await asyncio.sleep(0)

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self._inbox.put_nowait(None)
        self._outbox.put_nowait(None)


class WatchedLoop:
    """A loop that knows its timers, except those of heartbeats."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        self._timers.append(self._loop.call_later(delay_s, callback, *args))
        return self._timers[-1]

    @property
    def num_timers(self) -> int:
        """The number of timers that have not fired."""
        return sum(not timer.cancelled() and timer.when() >= self._loop.time() for timer in self._timers)


class Io:
    """The I/O loop, on the loop of the test.

    Attributes:
        num_wakes: how often other code than the loop's asked it to run something.
    """

    def __init__(self) -> None:
        self.loop = WatchedLoop(asyncio.get_running_loop())
        self.num_wakes = 0
        self._thread = threading.get_ident()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.num_wakes += 1
        self.loop.call_soon_threadsafe(callback, *args)

    async def at_rest(self) -> None:
        """Waits until no timer is left."""
        await eventually_async(lambda: not self.loop.num_timers, "no timer is left", LIMIT_S)

    def on_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.loop.create_task(coroutine, name=name)
        return task


class Borrowed:
    """A buffer that was not copied."""

    def __init__(self, view: memoryview) -> None:
        self.view = view


class Handler(NullHandler):
    """Remembers what a session tells its owner."""

    limit_bytes = None

    def __init__(self, shares_payloads: bool) -> None:
        self.shares_payloads = shares_payloads
        self._loop = asyncio.get_running_loop()
        self.received: asyncio.Queue[tuple[CallMessage, list[Any]]] = asyncio.Queue()
        self.opened = 0
        self.closed: list[str] = []
        self.failing = False
        self.handed_on: list[tuple[int, threading.Thread]] = []  # which calls, and by whom

    def on_opened(self, session: Session) -> None:
        self.opened += 1

    def on_messages(self, session: Session, messages: list[tuple[CallMessage, list[Any]]]) -> None:
        if self.failing:
            raise ValueError("the handler fails")
        for message in messages:
            self.handed_on.append((message[0].id, threading.current_thread()))
            self._loop.call_soon_threadsafe(self.received.put_nowait, message)

    def on_closed(self, session: Session, reason: str) -> None:
        self.closed.append(reason)

    def borrow(self, view: memoryview) -> Any:
        assert self.shares_payloads
        return Borrowed(view)

    async def next(self) -> tuple[int, list[bytes]]:
        async with asyncio.timeout(LIMIT_S):
            message, buffers = await self.received.get()
        return message.id, [bytes(buffer.view) for buffer in buffers]


class Pair:
    """Two sessions that are connected; the first one opened the connection.

    Args:
        streams: the two ends of a channel.
        silence_limit_s: of both sessions.
        shares: which of them may use shared memory.
    """

    def __init__(
        self, streams: Sequence[Any], silence_limit_s: float = 60.0, shares: tuple[bool, bool] = (False, False)
    ) -> None:
        io: Any = Io()
        self.io: Io = io
        self.streams = streams
        self.handlers = [Handler(shares[0]), Handler(shares[1])]
        self.sessions = [
            Session(
                io,
                streams[side],
                Identity("ab"[1 - side], 1 - side, 7),
                role="rpc",
                id=b"1",
                handler=self.handlers[side],
                silence_limit_s=silence_limit_s,
                opened_by_me=side == 0,
            )
            for side in (0, 1)
        ]
        self.tasks = [io.spawn(session.run(), "session") for session in self.sessions]

    async def end(self) -> None:
        for session in self.sessions:
            session.close("the test is over")
        await asyncio.wait(self.tasks, timeout=LIMIT_S)
        await asyncio.sleep(0)  # the writers were cancelled; they end in the next step


class MemoryPair(Pair):
    """Sessions over two queues.

    Attributes:
        queues: what each end reads from.
    """

    def __init__(self, silence_limit_s: float = 60.0) -> None:
        self.queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
        there, back = self.queues
        super().__init__([MemoryStream(there, back), MemoryStream(back, there)], silence_limit_s)


class ChannelPair(Pair):
    """Sessions over the local channel, on a pair of Unix sockets.

    Attributes:
        sockets: of the two ends.
    """

    def __init__(self, silence_limit_s: float = 60.0, shares: tuple[bool, bool] = (False, False)) -> None:
        self.sockets = socket.socketpair()
        names = ("the server", "the client")
        ends = [SocketChannel(*end) for end in zip(self.sockets, names, strict=True)]
        super().__init__(ends, silence_limit_s, shares)


def num_unsent(session: Session) -> int:
    """The number of messages that wait in its queue, or have buffers that were not written yet."""
    facts = session.facts(0.0)
    return facts.num_queued + facts.num_transfers


# No interface shows the state that sending threads and the writer's task share. The tests of these races reach it by
# way of the following functions only.


def writer_of(session: Session) -> Any:
    return session._writer


def turn_of(session: Session) -> threading.Lock:
    """Its holder writes the queue."""
    turn: threading.Lock = writer_of(session)._turn
    return turn


def lose_turn_once(session: Session, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """Lets the next attempt to take the turn fail, as if a thread held it, which calls `meanwhile` and gives it back.

    Returns:
        A list, which has an entry when that has happened.
    """
    turn, losses = turn_of(session), list[str]()

    def acquire(blocking: bool = True) -> bool:
        if losses:
            return turn.acquire(blocking=blocking)
        losses.append("lost")
        meanwhile()
        return False

    writer_of(session)._turn = SimpleNamespace(acquire=acquire, release=turn.release, locked=turn.locked)
    return losses


def wake_writer(session: Session) -> None:
    """Makes the writer's task look at the queue, which may be empty."""
    writer_of(session)._wake_task()


def pretend_awake(session: Session, is_awake: bool) -> None:
    """Sets what threads that send know of the writer's task: whether it will look at the queue by itself."""
    writer_of(session)._awake = is_awake
