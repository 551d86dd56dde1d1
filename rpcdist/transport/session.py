"""A session: one authenticated two-way stream of envelopes between two processes.

Any thread may send. The I/O loop reads, or a thread that leads for a while; all else runs on the loop. The session does
not reconnect: it ends once, says why, and whoever owns it decides what comes next.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.ids import Identity
from rpcdist.inspection import ChannelFacts, LentMemory
from rpcdist.transport._channels.channel import DirectChannel, ReadChannel
from rpcdist.transport._channels.leading import Sleep
from rpcdist.transport._channels.signal_shield import SignalShield, may_raise_here
from rpcdist.transport._framing.frames import (
    CHUNK_HEAD_BYTES,
    CHUNK_WINDOW_BYTES,
    Chunk,
    ChunkHead,
    ReturnedSegments,
    parse,
)
from rpcdist.transport._framing.incoming import Delivery, Incoming, IncomingBuffer, heap_buffer
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport._striping.striping import OpenConnections, Striping
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.handing_on import HandingOn
from rpcdist.transport.heartbeats import Heartbeats
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.outgoing_buffer import OutgoingBuffer
from rpcdist.transport.session_writer import SessionWriter
from rpcdist.transport.shared_payloads import SharedPayloads
from rpcdist.transport.wire_messages import WireMessage

logger = logging.getLogger(__name__)

_OWN_KINDS = frozenset(
    ("heartbeat", "chunk_credit", "transfer_aborted", "segment_news", "segment_answer", "segment_offer")
)


class SessionHandler(Protocol):
    """What the owner of a session brings. It must not block or run user code.

    All of it is called on the I/O loop, except that `on_messages` may be called on a thread that leads, for compact
    messages and those that it `takes_anywhere`; never on two threads at once, and in the order of the messages.
    """

    def on_opened(self, session: Session) -> None:
        """A peer opened this session; not called for sessions that this process opens itself."""

    def on_messages(self, session: Session, messages: list[tuple[Any, list[IncomingBuffer]]]) -> None:
        """Messages (`WireMessage`) arrived whole, in the order in which they became complete."""

    def takes_anywhere(self, message: WireMessage) -> bool:
        """Whether `on_messages` may be called with this message on a thread other than the I/O loop's."""

    def on_closed(self, session: Session, reason: str) -> None:
        """The session ended; called once. Messages that were queued and not written are lost."""

    def allocate(self, size_bytes: int) -> IncomingBuffer:
        """Memory for a large buffer that was announced."""

    def borrow(self, view: memoryview) -> IncomingBuffer:
        """A large buffer that lies in memory of the peer, writable; `view` keeps it."""

    @property
    def shares_payloads(self) -> bool:
        """Whether large buffers may lie in shared memory, in both directions."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """Counts what a peer has announced, on all its sessions together, and not sent."""


class HeapPayloads:
    """The part of a `SessionHandler` that says where large buffers arrive, all of them on the heap, and messages."""

    shares_payloads = False

    def takes_anywhere(self, message: WireMessage) -> bool:
        return False

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        return AnnouncedBytes()

    def allocate(self, size_bytes: int) -> IncomingBuffer:
        return heap_buffer(size_bytes)

    def borrow(self, view: memoryview) -> IncomingBuffer:
        raise ProtocolViolation("nothing may be lent on this connection")


class NullHandler(HeapPayloads):
    """For connections that only make unary calls: nothing but heartbeats may arrive."""

    def on_opened(self, session: Session) -> None:
        logger.debug("%s opened a session for %s", session.peer.name, session.role)

    def on_messages(self, session: Session, messages: list[tuple[WireMessage, list[IncomingBuffer]]]) -> None:
        session.close(f"unexpected message from {session.peer.name}")

    def on_closed(self, session: Session, reason: str) -> None:
        logger.debug("session with %s closed: %s", session.peer.name, reason)


class Session:
    """Messages in both directions over one channel whose handshake is done.

    Attributes:
        peer: who is at the other end; proven by the handshake.
        striping: its further connections, for payloads; None where it has none.
        role: what the connection is for.
        account: counts what the peer makes this process set aside, by all its sessions together.
        id: the session's number on both sides.
        opened_by_me: whether this process opened the connection.
        last_received: when something arrived last, heartbeats included, in monotonic seconds.
        closed_reason: why the session ended; None while it is open.

    Args:
        io: the I/O loop that it runs on.
        channel: carries its envelopes; the session closes it.
        handler: gets what arrives.
        silence_limit_s: the peer counts as lost after so many seconds without a sign of life.
        by_me: whether this process opened the connection.
        has_payload_connections: whether further connections may carry its large messages.
        open_connections: opens those; None where the peer opens them.
    """

    def __init__(
        self,
        io: IoLoop,
        channel: ReadChannel | DirectChannel,
        peer: Identity,
        *,
        role: str,
        id: bytes,
        handler: SessionHandler,
        silence_limit_s: float,
        by_me: bool,
        has_payload_connections: bool = False,
        open_connections: OpenConnections | None = None,
    ) -> None:
        self.peer = peer
        self.role = role
        self.id = id
        self.opened_by_me = by_me
        self.last_received = time.monotonic()
        self.closed_reason: str | None = None
        self._io = io
        self._channel = channel
        self._direct = channel if isinstance(channel, DirectChannel) else None  # asked once: the check is slow
        self._handler = handler
        self._outgoing = Outgoing()
        self._writer = SessionWriter(io, channel, self._outgoing, self._close, peer.name)
        self.account = account = handler.announced_by(peer)
        self._shared = self._new_shared_payloads(account)
        self._incoming = Incoming(handler.allocate, self._borrow, account)
        self._names: list[str] = []  # of the functions that the peer has numbered
        self._handing_on = HandingOn(io, self, handler, self._left_to_loop_failed)
        self._main = threading.main_thread().ident
        self._shield = SignalShield()
        self.striping: Striping | None = None
        if has_payload_connections:
            self.striping = self._outgoing.striper = Striping(
                io,
                self,
                self._incoming,
                peer.name,
                open=open_connections,
                silence_limit_s=silence_limit_s,
                round_trip_s=None if self._direct is None else self._direct.shortest_round_trip_s,
            )
        self._num_read = 0  # bytes, where a task reads
        self._ungranted_bytes = 0  # of chunks that arrived and that the peer has no new credit for
        self.flush = self._writer.flush
        self.hold_back = self._writer.hold_back
        self.drain = self._writer.drain
        self._heartbeats = Heartbeats(self, silence_limit_s)
        self._ended: asyncio.Event = asyncio.Event()

    def _new_shared_payloads(self, counted: AnnouncedBytes) -> SharedPayloads | None:
        """None for channels that cannot pass segments of memory."""
        if self._direct is None or not self._direct.passes_descriptors:
            return None
        handler, loop, outgoing = self._handler, self._io.loop, self._outgoing
        return SharedPayloads(
            handler.shares_payloads,
            counted,
            loop,
            self._direct,
            outgoing,
            self.send,
            self._writer.flush,
            handler.borrow,
        )

    def facts(self, now: float) -> ChannelFacts:
        """What it is and does, at a moment of the monotonic clock."""
        return replace(
            self._channel.facts,
            session=self.id.hex(),
            peer=self.peer.name,
            opened_here=self.opened_by_me,
            num_queued=self._outgoing.num_frames,
            num_transfers=self._outgoing.num_transfers,
            silent_s=max(0.0, now - self.last_received),
        )

    @property
    def lent_memory(self) -> LentMemory | None:
        """What it lends to the peer; None where nothing was ever lent."""
        if self._shared is None or not self._shared.is_used:
            return None
        return LentMemory(self.peer.name, *self._shared.lent.usage)

    def __repr__(self) -> str:
        state = "open" if self.closed_reason is None else f"closed: {self.closed_reason}"
        return f"<Session {self.role} with {self.peer.name} [{state}], {self._outgoing!r}, {self._incoming!r}>"

    @property
    def channel_kind(self) -> str:
        """What carries it: "local", "tcp" or "grpc"."""
        if self._direct is None:
            return "grpc"
        return "local" if self._direct.passes_descriptors else "tcp"

    def traffic(self) -> Counter[tuple[str, str]]:
        """The bytes that went so far, by channel, "shared memory" among them, and direction; any thread."""
        if self._direct is None:
            sent, received = self._writer.num_written, self._num_read
        else:
            sent, received = self._direct.traffic
        if self.striping is not None:
            of_stripes = self.striping.traffic
            sent, received = sent + of_stripes[0], received + of_stripes[1]
        kind = self.channel_kind
        found = Counter({(kind, "transmit"): sent, (kind, "receive"): received})
        if self._shared is not None:
            found["shared memory", "transmit"] = self._shared.num_lent
            found["shared memory", "receive"] = self._shared.num_borrowed
        return found

    @property
    def num_queued(self) -> int:
        """The messages that wait to be written."""
        return self._outgoing.num_frames

    # ---------------------------------------------------------------- any thread

    def send(self, message: WireMessage, buffers: Sequence[OutgoingBuffer] = ()) -> int:
        """Queues a message; any thread may call it, and it never blocks.

        Args:
            message: it is serialized here; the caller may reuse it.
            buffers: large buffers, read while they are being written.

        Returns:
            The transfer's number for `abort_transfer`; 0 if the message travels in one envelope with others.

        Nothing is raised when the session has ended: its owner hears of that through `on_closed`.
        """
        shared = self._shared
        has_news = shared is not None and shared.is_used and shared.lent.is_news_due
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
            self._writer.on_queued(message, number)
            return number
        finally:
            if shield is not None:
                shield.leave()

    def want_value(self, call: int) -> bool:
        """See `MessageSink`; any thread."""
        return self._outgoing.want_value(call)

    def abort_transfer(self, number: int, reason: str) -> None:
        """Stops sending the buffers of a message; any thread."""
        self._io.call_soon(self._abort_transfer, number, reason)

    def transfer_progress(self, number: int) -> tuple[int, int] | None:
        """See `MessageSink`; any thread."""
        return self._outgoing.progress(number)

    def close(self, reason: str) -> None:
        """Ends the session at once; any thread; idempotent."""
        self._io.call_soon(self._close, reason)

    # ---------------------------------------------------------------- I/O loop

    def _abort_transfer(self, number: int, reason: str) -> None:
        unread = self._outgoing.abort(number)
        if unread is not None:
            if self._shared is not None:
                self._shared.lent.take_back(unread)
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
        # The writer first: `on_opened` and what arrives may be answered at once.
        writer = self._io.spawn(self._writer.run(), f"rpcdist session writer to {self.peer.name}")
        self._heartbeats.start(self._io.loop)
        if not self.opened_by_me:
            self._handler.on_opened(self)
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
            # The handler choked on a message: what came after it would be handled out of order.
            logger.exception("a message from %s could not be handled", self.peer.name)
            reason = f"a message could not be handled: {exc!r}"
        finally:
            self._finish(writer, self.closed_reason or reason)

    def _finish(self, writer: asyncio.Task[None], reason: str) -> None:
        self._close(reason)  # first, so that nobody is told of an end and still finds the session open
        writer.cancel()
        self._heartbeats.stop()
        self._writer.end()
        self._ended.set()
        self._incoming.close()
        if self.striping is not None:
            self.striping.close()
        if self._shared is not None:
            self._shared.close()
        self._handing_on.end()
        self._handler.on_closed(self, reason)

    async def ended(self, timeout_s: float) -> bool:
        """Waits until `on_closed` has been called; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    # ---------------------------------------------------------------- reading: the I/O loop, or a thread that leads

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: Sleep | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        """Has this thread read while it waits, if the channel can do that and nobody else reads; see `Lead.lead`."""
        if self._direct is not None:
            return self._direct.lead(is_waiting, timeout_s, sleep, partial(self._writer.send_first, first))
        self._writer.send_first(first)
        return False

    def ring(self) -> None:
        """Has a thread that leads ask `is_waiting` again; any thread."""
        if self._direct is not None:
            self._direct.ring()

    async def _read_loop(self) -> None:
        assert not isinstance(self._channel, DirectChannel)
        while (data := await self._channel.read()) is not None:
            self._num_read += len(data)
            self.receive(data)

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
                self._grant(CHUNK_HEAD_BYTES + len(message.data))  # also of an aborted transfer: the peer counts it
                delivery = self._incoming.chunk(message)
                if delivery is not None:
                    messages.append(delivery)
                continue
            elif isinstance(message, ReturnedSegments):
                if self._shared is not None:
                    self._shared.lent.returned(message.numbers)
                continue
            if message.large and messages and self.striping is not None:
                # First what came before it: from here on, a reader of a payload connection may hand it on.
                self._handing_on.hand_on(messages)
                messages = []
            delivery = self._announce(message) if message.large else (message, [])
            if delivery is not None:
                messages.append(delivery)
        if messages:  # all of an envelope at once: calls go to the pool with one wake-up
            self._handing_on.hand_on(messages)

    def _announce(self, message: WireMessage) -> Delivery | None:
        if self.striping is not None:
            self.striping.note(sum(message.large))
        return self._incoming.announce(message)

    def on_striped(self, delivery: Delivery | None) -> None:
        """See `StripedSession`."""
        self.last_received = time.monotonic()
        self._deliver(delivery)

    def on_all_written(self) -> None:
        """See `StripedSession`."""
        self._io.call_soon(self._writer.wake)

    def _left_to_loop_failed(self, error: Exception) -> None:
        assert self._direct is not None
        self._direct.fail(error)

    def _handle(self, kind: str, message: rpc_pb2.Message) -> None:
        """Takes a message between the two sessions; nobody else hears of it."""
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

    def place(self, head: ChunkHead) -> memoryview | None:
        """See `FrameReceiver`."""
        return self._incoming.place(head.transfer, head.buffer, head.offset, head.size)

    def placed(self, head: ChunkHead, num_bytes: int) -> None:
        """See `FrameReceiver`."""
        self.last_received = time.monotonic()
        self._grant(num_bytes)
        self._deliver(self._incoming.placed(head.transfer, head.buffer, head.size))

    def _deliver(self, delivery: Delivery | None) -> None:
        if delivery is not None:
            self._handing_on.hand_on([delivery])

    def _grant(self, num_bytes: int) -> None:
        """Lets the peer send more chunks, in quarters of the window: a message per chunk would be too many, and one per
        window would leave the peer without credit while it travels.
        """
        self._ungranted_bytes += num_bytes
        if self._ungranted_bytes >= CHUNK_WINDOW_BYTES // 4:
            credit = rpc_pb2.ChunkCredit(bytes=self._ungranted_bytes)
            self._ungranted_bytes = 0
            self.send(rpc_pb2.Message(chunk_credit=credit))

    # ---------------------------------------------------------------- for `Heartbeats`

    @property
    def last_sent(self) -> float:
        """When something was written last, in monotonic seconds."""
        return self._writer.last_sent

    def has_unread(self) -> bool:
        """See `WatchedSession`."""
        return self._direct is not None and self._direct.has_unread

    def trim(self, now: float) -> None:
        """See `WatchedSession`."""
        if self._shared is not None:
            self._shared.trim(now)
