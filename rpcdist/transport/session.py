"""A session: one authenticated two-way stream of envelopes between two processes.

Any thread may send. The I/O loop reads, or for a while a waiting thread; everything else runs on the loop. The session
does not reconnect: it ends once, with a reason, and its owner decides what to do next.

[Note: order] One thread at a time reads the session's connection: the loop or a waiting thread. Such a thread calls the
handler itself, and leaves messages that are `is_for_loop` to the loop. Until the loop has handled those, all later
messages also go through the loop. So the handler gets all messages in order. The readers of payload connections deliver
messages outside that order; a lock ensures that the handler gets one message at a time.

[Note: heartbeats] A dead host closes no connection, so only silence distinguishes it from an idle host. Both sides
therefore send regularly, and each treats the other as lost after too long a silence. A loop that was delayed itself may
have unread data in its socket: it reads that first, and judges no peer in that round.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, TransportError, described_error
from rpcdist.ids import Identity
from rpcdist.inspection import ChannelFacts, LentMemory
from rpcdist.time_limits import HEARTBEATS_PER_PEER_TIMEOUT, LEAVE_LIMIT_S, READ_TURN_S
from rpcdist.transport._channels.channel import ReadChannel
from rpcdist.transport._channels.polling_and_signals import SignalShield, may_raise_here
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.socket_reader import Send, Sleep, Waits
from rpcdist.transport._framing.frames import CHUNK_HEAD_BYTES, CHUNK_WINDOW_BYTES, Chunk, ReturnedSegments, parse
from rpcdist.transport._framing.incoming import (
    Delivery,
    Incoming,
    IncomingBuffer,
    StagedBuffer,
    heap_buffer,
)
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session_writer import SessionWriter
from rpcdist.transport.shared_payloads import SharedPayloads
from rpcdist.transport.striping import OpenConnections, Striping
from rpcdist.transport.wire_messages import WireMessage
from rpcdist.waiters import ends_within

logger = logging.getLogger(__name__)

_OWN_KINDS = {"heartbeat", "chunk_credit", "transfer_aborted", "segment_news", "segment_answer", "segment_offer"}


TURNS_TO_READ: Final = 3
"""Turns that a delayed I/O loop takes before it checks its peers: it reads arrived data in the first turn, and handles
connections that ended in the next."""


FRAMES_LEFT: Final = 100  # that sending and reading messages may need


def check_stack() -> None:
    """Raises `RecursionError` if this thread has fewer than `FRAMES_LEFT` frames left; takes 0.3 microseconds."""
    limit = sys.getrecursionlimit()
    try:
        sys._getframe(limit - min(FRAMES_LEFT, limit // 2))
    except ValueError:
        return  # there are fewer frames on the stack
    raise RecursionError(
        f"maximum recursion depth exceeded: a remote call needs {FRAMES_LEFT} frames, and this thread has fewer left. "
        "Call it from fewer nested functions, or raise the limit (sys.setrecursionlimit)"
    )


def is_for_loop(message: WireMessage) -> bool:
    """Whether the handler must get this message on the I/O loop, in order; any reader may deliver the others."""
    if not isinstance(message, rpc_pb2.Message):
        return message.is_stream
    if message.HasField("autograd"):
        return bool(message.control_seq) or message.autograd.HasField("release")
    return not message.HasField("gpu_release")


class SessionHandler(Protocol):
    """The owner of a session. It must not block or run user code.

    Its methods are called on the I/O loop, except `on_messages`: a waiting thread may call it with messages
    that are not `is_for_loop`. `on_messages` is called on one thread at a time, in the order of the messages.
    """

    def on_opened(self, session: Any) -> None:
        """Called when a peer has opened this session; not called for sessions that this process opens."""

    def on_messages(self, session: Any, messages: list[tuple[Any, list[Any]]]) -> None:
        """Complete messages (`WireMessage`) arrived, in the order in which they became complete.

        Their buffers were made by `allocate`, `borrow` or `stage`.
        """

    def on_closed(self, session: Any, reason: str) -> None:
        """Called once, when the session has ended. Queued messages that were not written are lost."""

    def allocate(self, size_bytes: int) -> IncomingBuffer:
        """Allocates memory for an announced large buffer."""

    def borrow(self, view: memoryview) -> IncomingBuffer:
        """Makes a buffer on memory that the peer lends; `view` is writable and keeps the memory alive."""

    def stage(self, session: Any, message: Any) -> Mapping[int, StagedBuffer]:
        """Makes those buffers of an announced message that are handled while they arrive, by index; on any thread."""

    @property
    def shares_payloads(self) -> bool:
        """Whether large buffers may use shared memory, in both directions."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """The counter of the bytes that this peer has announced on all its sessions and not sent."""


class NullHandler:
    """The handler of connections that only make unary calls: only heartbeats may arrive. It is also a base for handlers
    that receive all large buffers on the heap.

    Args:
        refusal: the reason for closing a session that receives anything else, or an announcement of it.

    Attributes:
        limit_bytes: limit on the bytes that a peer may announce; None for the memory of the machine.
    """

    shares_payloads = False
    limit_bytes: int | None = 0

    def __init__(self, refusal: str = "") -> None:
        self._refusal = refusal

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        return AnnouncedBytes(self.limit_bytes, "" if self.limit_bytes is None else self._reason(peer))

    def allocate(self, size_bytes: int) -> IncomingBuffer:
        return heap_buffer(size_bytes)

    def borrow(self, view: memoryview) -> IncomingBuffer:
        raise ProtocolViolation("this connection accepts no lent memory")

    def stage(self, session: Session, message: Any) -> Mapping[int, StagedBuffer]:
        return {}

    def on_opened(self, session: Session) -> None:
        logger.debug("%s opened a session for %s", session.peer.name, session.role)

    def on_messages(self, session: Session, messages: list[tuple[Any, list[Any]]]) -> None:
        session.close(self._reason(session.peer))

    def _reason(self, peer: Identity) -> str:
        return self._refusal or f"unexpected message from {peer.name}"

    def on_closed(self, session: Session, reason: str) -> None:
        logger.debug("session with %s closed: %s", session.peer.name, reason)


@dataclass(eq=False, repr=False)
class Session:
    """Messages in both directions over one channel whose handshake is done.

    Attributes:
        peer: the identity of the other process, proven by the handshake.
        striping: its payload connections; None if it has none.
        account: counts the bytes that the peer makes this process reserve, on all its sessions together.
        id: the session's number on both sides.
        last_received: when the last bytes arrived, heartbeats included, in monotonic seconds.
        closed_reason: why the session ended; None while it is open.

    Args:
        channel: carries its envelopes; the session closes it.
        silence_limit_s: silence after which the peer counts as lost, in seconds.
        by_me: whether this process opened the connection.
        open_connections: opens the payload connections of a session over TCP; None if the peer opens them.
    """

    _io: IoLoop
    _channel: ReadChannel | SocketChannel
    peer: Identity
    _: KW_ONLY
    role: str
    id: bytes
    handler: SessionHandler
    silence_limit_s: float
    opened_by_me: bool
    open_connections: InitVar[OpenConnections | None] = None
    last_received: float = field(default_factory=time.monotonic)
    closed_reason: str | None = None
    _names: list[str] = field(default_factory=list)  # names of the functions that the peer has numbered
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)  # around calls of the handler
    _left_to_loop: deque[list[Delivery]] = field(default_factory=deque)
    _has_failed: bool = False  # the handler, on the loop
    _has_ended: bool = False
    _shield: SignalShield = field(default_factory=SignalShield)
    striping: Striping | None = None
    _num_read: int = 0  # bytes, if a task reads
    _ungranted_bytes: int = 0  # bytes of arrived chunks for which the peer has no new credit yet
    _heartbeat_due: float = 0.0
    _next_heartbeat: asyncio.Handle | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self, open_connections: OpenConnections | None) -> None:
        self._direct = self._channel if isinstance(self._channel, SocketChannel) else None
        self.account = account = self.handler.announced_by(self.peer)
        # On a connection that this process opened, the queue has its own calls, and no answers.
        self._outgoing = Outgoing(None if self.opened_by_me else account)
        self._writer = SessionWriter(self._io, self._channel, self._outgoing, self._close, self.peer.name)
        self._shared = self._new_shared_payloads(account)
        self._incoming = Incoming(self.handler.allocate, self._borrow, account, partial(self.handler.stage, self))
        self.place = self._incoming.place  # see `FrameReceiver`
        self._main = threading.main_thread().ident
        if self.channel_kind == "tcp":
            self.striping = self._outgoing.striper = Striping(
                self._io,
                self._incoming,
                self.peer.name,
                self._on_striped,
                self._on_written,
                self.close,
                open_connections,
                self.silence_limit_s,
                None if self._direct is None else self._direct.shortest_round_trip_s,
            )
        self.want_value = self._outgoing.want_value
        self.transfer_progress = self._outgoing.progress
        self.flush = self._writer.flush
        self.hold_back = self._writer.hold_back
        self.drain = self._writer.drain
        self._heartbeat_s = self.silence_limit_s / HEARTBEATS_PER_PEER_TIMEOUT

    def _new_shared_payloads(self, counted: AnnouncedBytes) -> SharedPayloads | None:
        """The shared memory of the session; None if the channel cannot pass segments."""
        if self._direct is None or not self._direct.passes_descriptors:
            return None
        return SharedPayloads(
            self.handler.shares_payloads,
            counted,
            None if self.opened_by_me else counted,
            self._io.loop,
            self._direct,
            self._outgoing,
            self.send,
            self._writer.flush,
            self.handler.borrow,
        )

    def facts(self, now: float) -> ChannelFacts:
        """The facts about its channel and queue at a time, in monotonic seconds."""
        shared = self._shared
        sent, received = self._num_bytes()
        return replace(
            self._channel.facts,
            bytes_sent=sent,
            bytes_received=received,
            session=self.id.hex(),
            peer=self.peer.name,
            opened_here=self.opened_by_me,
            num_queued=self._outgoing.num_frames,
            num_transfers=self._outgoing.num_transfers,
            silent_s=max(0.0, now - self.last_received),
            shared_sent=0 if shared is None else shared.num_lent,
            shared_received=0 if shared is None else shared.num_borrowed,
        )

    @property
    def lent_memory(self) -> LentMemory | None:
        """The memory that it lends to the peer; None if it never lent any."""
        if self._shared is None or not self._shared.is_used:
            return None
        return LentMemory(self.peer.name, *self._shared.usage)

    def __repr__(self) -> str:
        state = "open" if self.closed_reason is None else f"closed: {self.closed_reason}"
        return f"<Session {self.role} with {self.peer.name} [{state}], {self._outgoing!r}, {self._incoming!r}>"

    @property
    def channel_kind(self) -> str:
        """The kind of its channel: "local", "tcp" or "grpc"."""
        if self._direct is None:
            return "grpc"
        return "local" if self._direct.passes_descriptors else "tcp"

    def traffic(self) -> Counter[tuple[str, str]]:
        """The bytes so far, by channel (including "shared memory") and direction; any thread."""
        sent, received = self._num_bytes()
        kind = self.channel_kind
        found = Counter({(kind, "transmit"): sent, (kind, "receive"): received})
        if self._shared is not None:
            found["shared memory", "transmit"] = self._shared.num_lent
            found["shared memory", "receive"] = self._shared.num_borrowed
        return found

    def _num_bytes(self) -> tuple[int, int]:
        """The bytes sent and received so far, without those in shared memory."""
        if self._direct is None:
            return self._writer.num_written, self._num_read
        sent, received = self._direct.traffic
        if self.striping is not None:
            of_stripes = self.striping.traffic
            sent, received = sent + of_stripes[0], received + of_stripes[1]
        return sent, received

    @property
    def last_sent(self) -> float:
        """The time of the last write, in monotonic seconds."""
        return self._writer.last_sent

    @property
    def num_queued(self) -> int:
        """The number of messages in the queue."""
        return self._outgoing.num_frames

    # ---------------------------------------------------------------- any thread

    def send(self, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        """Queues a message; any thread may call it, and it never blocks.

        Args:
            message: it is serialized here; the caller may reuse it.
            buffers: large buffers, which are read while they are written.

        Returns:
            The transfer's number for `abort_transfer`; 0 if the message travels in one envelope with others.

        It raises nothing after the session has ended: the handler gets `on_closed`.
        """
        shared = self._shared
        has_news = shared is not None and shared.is_used and shared.is_news_due
        if not (buffers or has_news) and self._outgoing.add_quickly(message):
            self._writer.on_queued(message, 0)
            return 0
        shield = self._shield if get_ident() == self._main and may_raise_here() else None
        if shield is not None:
            shield.enter()
        try:
            if self._shared is not None and (buffers or self._shared.is_used):
                buffers = self._shared.lend(message, buffers)
            number = self._outgoing.add(message, buffers)
            if self._outgoing.is_overdrawn:
                self.close(f"worker {self.peer.name!r} does not read the messages that are sent to it")
            self._writer.on_queued(message, number)
            return number
        finally:
            if shield is not None:
                shield.leave()

    def abort_transfer(self, number: int, reason: str) -> None:
        """Stops sending the buffers of a message; any thread."""
        self._io.call_soon(self._abort_transfer, number, reason)

    def close(self, reason: str) -> None:
        """Ends the session at once; any thread; idempotent."""
        self._io.call_soon(self._close, reason)

    # ---------------------------------------------------------------- I/O loop

    def _abort_transfer(self, number: int, reason: str) -> None:
        unread = self._outgoing.abort(number)
        if unread is not None:
            if self._shared is not None:
                self._shared.take_back(unread)
            aborted = rpc_pb2.TransferAborted(transfer=number, reason=reason)
            self.send(rpc_pb2.Message(transfer_aborted=aborted))

    def _close(self, reason: str) -> None:
        if self.closed_reason is None:
            self.closed_reason = reason
            self._writer.is_closed = True
            self._channel.abort(reason)

    async def run(self) -> None:
        """Reads and writes until the session ends; then calls `on_closed` once.

        Cancellation ends the session like `close`.
        """
        # The writer starts first, so that `on_opened` and arriving messages can be answered at once.
        writer = self._io.spawn(self._writer.run(), f"rpcdist session writer to {self.peer.name}")
        self._schedule_heartbeat()
        if not self.opened_by_me:
            self.handler.on_opened(self)
        reason = "connection closed by the peer"
        try:
            if self._direct is not None:
                await self._direct.deliver(self)
            else:
                await self._read_loop()
        except TransportError as exc:
            reason = str(exc)
            if self.striping is not None and self.closed_reason is None:
                await self.striping.read_out()
        except asyncio.CancelledError:
            reason = "connection closed at this end"
            raise
        except Exception as exc:
            # The handler failed on a message, and later messages would be handled out of order.
            logger.exception("a message from %s could not be handled", self.peer.name)
            reason = f"a message could not be handled: {described_error(exc)}"
        finally:
            self._finish(writer, self.closed_reason or reason)

    def _finish(self, writer: asyncio.Task[None], reason: str) -> None:
        self._close(reason)  # first, so that code that is notified of the end finds the session closed
        writer.cancel()
        self._stop_heartbeats()
        self._writer.end()
        self._ended.set()
        self._incoming.close()
        self._outgoing.close()
        if self.striping is not None:
            self.striping.close()
        if self._shared is not None:
            self._shared.close()
        self._stop_dispatching()
        self.handler.on_closed(self, reason)

    async def ended(self, timeout_s: float) -> bool:
        """Waits until `on_closed` has been called; False on timeout."""
        return await ends_within(self._ended.wait(), timeout_s)

    # ---------------------------------------------------------------- reading: the I/O loop, or a thread that waits

    def read_while_waiting(
        self, is_waiting: Waits, timeout_s: float | None, sleep: Sleep | None = None, send_first: Send = None
    ) -> bool:
        """Reads on this thread while it waits, if the channel supports that and no thread reads; see `SocketReader`.

        Raises:
            RecursionError: this thread is so deep in calls that it would fail amid a message, which ends the session.
        """
        check_stack()
        if self._direct is not None:
            send_first = partial(self._writer.write_after, send_first)
            return self._direct.read_while_waiting(is_waiting, timeout_s, sleep, send_first)
        self._writer.write_after(send_first)
        return False

    def request_and_wait(
        self,
        message: WireMessage,
        buffers: Sequence[LargeBuffer],
        on_sent: Callable[[Session, int], object],
        is_waiting: Waits,
        timeout_s: float | None,
    ) -> bool:
        """Sends a message, and reads on this thread while it waits; see `SocketReader.read_while_waiting`.

        Args:
            on_sent: called with this session and the number of the transfer when the message is in the queue.
        """
        send = partial(self._send_request, message, buffers, on_sent)
        return self.read_while_waiting(is_waiting, timeout_s, None, send)

    def _send_request(
        self, message: WireMessage, buffers: Sequence[LargeBuffer], on_sent: Callable[[Session, int], object]
    ) -> None:
        on_sent(self, self.send(message, buffers))

    def read_along_with(self, other: object) -> None:
        """Makes this thread also read this session while it reads the other one; see `SocketReader.read_along`."""
        if self._direct is not None and isinstance(other, Session) and other._direct is not None:
            other._direct.read_along(self._direct)

    def interrupt(self) -> None:
        """Makes the reading thread call `is_waiting` again; any thread."""
        if self._direct is not None:
            self._direct.interrupt()

    async def _read_loop(self) -> None:
        assert not isinstance(self._channel, SocketChannel)
        while (data := await self._channel.read()) is not None:
            self._num_read += len(data)
            began = time.monotonic()
            self.receive(data)
            if time.monotonic() - began > READ_TURN_S:
                await asyncio.sleep(0)  # the next envelope may be here already

    def receive(self, data: bytes | bytearray) -> None:
        """Takes an envelope that arrived."""
        self.last_received = time.monotonic()
        messages: list[Delivery] = []
        for message in parse(data, self._names):
            if isinstance(message, rpc_pb2.Message):
                kind = message.WhichOneof("body")
                if kind in _OWN_KINDS:
                    self._handle(kind, message)
                    continue
            elif isinstance(message, Chunk):
                self._grant(CHUNK_HEAD_BYTES + len(message.data))  # even if aborted: the peer has counted it
                delivery = self._incoming.chunk(message)
                if delivery is not None:
                    messages.append(delivery)
                continue
            elif isinstance(message, ReturnedSegments):
                if self._shared is not None:
                    self._shared.returned(message.numbers)
                continue
            if message.large and messages and self.striping is not None:
                # Earlier messages first: from here on, a reader of a payload connection may deliver this message.
                self._dispatch(messages)
                messages = []
            delivery = self._announce(message) if message.large else (message, [])
            if delivery is not None:
                messages.append(delivery)
        if messages:  # all of an envelope together, so that its calls wake the pool once
            self._dispatch(messages)

    def _announce(self, message: WireMessage) -> Delivery | None:
        if self.striping is not None:
            self.striping.note(sum(message.large))
        return self._incoming.announce(message)

    def _on_striped(self, delivery: Delivery | None) -> None:
        self.last_received = time.monotonic()
        self._deliver(delivery)

    def _on_written(self, owed_bytes: int, is_last: bool) -> None:
        self._outgoing.paid(owed_bytes)
        if is_last:
            self._io.call_soon(self._writer.wake)

    def _dispatch(self, messages: list[Delivery]) -> None:
        """Gives messages to the handler, on the thread that read them or on the loop. [Note: order]"""
        if not self._left_to_loop:
            for message, _ in messages:
                if is_for_loop(message):
                    may_be_here = self._io.on_thread()
                    break
            else:
                may_be_here = True
            if may_be_here:
                with self._one_at_a_time:
                    if not self._has_ended:
                        self.handler.on_messages(self, messages)
                return
        self._left_to_loop.append(messages)
        # In a new context: this thread's context may be a user's, with a deadline.
        Context().run(self._io.call_soon, self._dispatch_rest)

    def _dispatch_rest(self) -> None:
        """Handles one entry of the queue, on the loop."""
        try:
            if not (self._has_failed or self._has_ended):
                with self._one_at_a_time:
                    self.handler.on_messages(self, self._left_to_loop[0])
        except Exception as exc:
            self._has_failed = True  # later messages would be handled out of order, so none is handled
            assert self._direct is not None  # only a waiting thread leaves messages to the loop
            self._direct.fail(exc)
        self._left_to_loop.popleft()  # after the call: messages read meanwhile must queue behind it

    def _handle(self, kind: str, message: rpc_pb2.Message) -> None:
        """Handles a message that only the two sessions use."""
        if kind == "chunk_credit":
            if self._outgoing.grant(message.chunk_credit.bytes):
                self._io.call_soon(self._writer.wake)
        elif kind == "transfer_aborted":
            self._incoming.abort(message.transfer_aborted.transfer)
        elif self._shared is not None:
            self._shared.handle(kind, message)

    def _borrow(self, message: WireMessage) -> dict[int, IncomingBuffer]:
        if self._shared is None:
            raise ProtocolViolation("a message refers to lent memory on a channel that cannot lend any")
        return self._shared.borrow(message)

    def placed(self, transfer: int, buffer: int, size: int) -> None:
        """See `FrameReceiver`."""
        self.last_received = time.monotonic()
        self._grant(CHUNK_HEAD_BYTES + size)
        self._deliver(self._incoming.placed(transfer, buffer, size))

    def _deliver(self, delivery: Delivery | None) -> None:
        if delivery is not None:
            self._dispatch([delivery])

    def _grant(self, num_bytes: int) -> None:
        """Lets the peer send more chunks, in quarters of the window.

        A message per chunk would be too many; one per window would leave the peer without credit while it travels.
        """
        self._ungranted_bytes += num_bytes
        if self._ungranted_bytes >= CHUNK_WINDOW_BYTES // 4:
            credit = rpc_pb2.ChunkCredit(bytes=self._ungranted_bytes)
            self._ungranted_bytes = 0
            self.send(rpc_pb2.Message(chunk_credit=credit))

    def _stop_dispatching(self) -> None:
        """Stops calling the handler; waits, bounded, for the reader of a payload connection that is in it."""
        self._has_ended = True
        if self._one_at_a_time.acquire(timeout=LEAVE_LIMIT_S):
            self._one_at_a_time.release()

    # ---------------------------------------------------------------- heartbeats, on the I/O loop

    def _schedule_heartbeat(self) -> None:
        loop = self._io.loop
        self._heartbeat_due = loop.time() + self._heartbeat_s
        self._next_heartbeat = loop.call_at(self._heartbeat_due, self._heartbeat)

    def _heartbeat(self, num_turns: int = 0) -> None:
        """Closes the session if the peer was silent too long; sends a heartbeat if this side was. [Note: heartbeats]"""
        loop, now = self._io.loop, time.monotonic()
        late = loop.time() - self._heartbeat_due
        if late >= self._heartbeat_s and num_turns < TURNS_TO_READ:
            # First the loop reads the data that arrived meanwhile: a peer that has closed the connection must not look
            # alive.
            self._next_heartbeat = loop.call_soon(self._heartbeat, num_turns + 1)
            return
        silence = now - self.last_received
        if silence > self.silence_limit_s and late < self._heartbeat_s and not self._has_unread():
            self.close(f"no sign of life for {silence:.1f} s")
            return
        if self._shared is not None:
            self._shared.trim(now)
        # Not 1.0: a message sent just after the last tick would delay the heartbeat by nearly a whole interval.
        if now - self._writer.last_sent >= self._heartbeat_s * 0.9:
            self.send(rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()))
        self._schedule_heartbeat()

    def _stop_heartbeats(self) -> None:
        if self._next_heartbeat is not None:
            self._next_heartbeat.cancel()

    def _has_unread(self) -> bool:
        """Whether bytes have arrived that were not read yet: the reader may be delayed."""
        return self._direct is not None and self._direct.has_unread
