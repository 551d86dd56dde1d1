"""A session: one authenticated two-way stream of envelopes between two processes.

Any thread may send; everything else runs on the I/O loop. The session does not reconnect: it ends once, says why, and
whoever owns it decides what comes next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.ids import Identity
from rpcdist.transport._frames import PIECE_WINDOW_BYTES, Piece, parse
from rpcdist.transport._incoming import Incoming, ReceiveBuffer, heap_buffer
from rpcdist.transport._loop import IoLoop
from rpcdist.transport._outgoing import LargeBuffer, Outgoing

__all__ = ["ByteStream", "LargeBuffer", "ReceiveBuffer", "Session", "SessionHandler"]

logger = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 4
MAX_HANDSHAKE_BYTES = 4096


class ByteStream(Protocol):
    """A lane: whole envelopes in both directions, in order."""

    async def read(self) -> bytes | bytearray | None:
        """The next envelope; None when the peer closed the stream. Raises `TransportError` when it broke."""

    async def write(self, data: bytes) -> None:
        """Returns when the lane can take more; raises `TransportError` when it broke."""

    def abort(self, reason: str) -> None:
        """Ends the stream at once; pending reads and writes fail. Idempotent."""


class SessionHandler(Protocol):
    """What the owner of a session brings. All of it is called on the I/O loop and must not block or run user code."""

    def on_opened(self, session: Session) -> None:
        """A peer opened this session; not called for sessions that this process opens itself."""

    def on_messages(self, session: Session, messages: list[tuple[rpc_pb2.Message, list[ReceiveBuffer]]]) -> None:
        """Messages arrived whole, in the order in which they became complete."""

    def on_closed(self, session: Session, reason: str) -> None:
        """The session ended; called once. What was queued and not written is lost."""

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        """Memory for a large buffer that was announced."""


class NullHandler:
    """For connections that only make unary calls: nothing but heartbeats may arrive."""

    def on_opened(self, session: Session) -> None:
        logger.debug("%s opened a session for %s", session.peer.name, session.role)

    def on_messages(self, session: Session, messages: list[tuple[rpc_pb2.Message, list[ReceiveBuffer]]]) -> None:
        session.close(f"unexpected message from {session.peer.name}")

    def on_closed(self, session: Session, reason: str) -> None:
        logger.debug("session with %s closed: %s", session.peer.name, reason)

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        return heap_buffer(size_bytes)


class Session:
    """One live stream.

    Attributes:
        peer: who is at the other end; proven by the handshake.
        role: what the connection is for.
        id: the session's number on both sides.
    """

    def __init__(
        self,
        io: IoLoop,
        stream: ByteStream,
        peer: Identity,
        *,
        role: str,
        id: bytes,
        handler: SessionHandler,
        silence_limit_s: float,
        by_me: bool,
    ) -> None:
        self.peer = peer
        self.role = role
        self.id = id
        self.opened_by_me = by_me
        self.last_received = time.monotonic()
        self.closed_reason: str | None = None
        self._io = io
        self._stream = stream
        self._handler = handler
        self._silence_limit_s = silence_limit_s
        self._outgoing = Outgoing()
        self._incoming = Incoming(handler.allocate)
        self._ungranted_bytes = 0
        self._awake = False  # the writer runs, or has been told to
        self._wake: asyncio.Future[None] | None = None
        self._last_sent = self.last_received
        self._tick_due = 0.0
        self._tick_handle: asyncio.TimerHandle | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._ended: asyncio.Event = asyncio.Event()

    def __repr__(self) -> str:
        state = "open" if self.closed_reason is None else f"closed: {self.closed_reason}"
        return f"<Session {self.role} with {self.peer.name} [{state}], {self._outgoing!r}, {self._incoming!r}>"

    # ---------------------------------------------------------------- any thread

    def send(self, message: rpc_pb2.Message, buffers: Sequence[LargeBuffer] = ()) -> int:
        """Queues a message; any thread may call it, and it never blocks.

        Args:
            message: it is serialized here; the caller may reuse it.
            buffers: large buffers, read while they are being written.

        Returns:
            The transfer's number for `abort_transfer`; 0 if the message travels in one envelope with others.

        Nothing is raised when the session has ended: its owner hears of that through `on_closed`.
        """
        number = self._outgoing.add(message, buffers)
        if not self._awake:
            self._awake = True
            self._io.call_soon(self._wake_writer)
        return number

    def abort_transfer(self, number: int, reason: str) -> None:
        """Stops sending the buffers of a message; any thread."""
        self._io.call_soon(self._abort_transfer, number, reason)

    def close(self, reason: str) -> None:
        """Ends the session at once; any thread; idempotent."""
        self._io.call_soon(self._close, reason)

    # ---------------------------------------------------------------- I/O loop

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _abort_transfer(self, number: int, reason: str) -> None:
        if self._outgoing.abort(number):
            aborted = rpc_pb2.TransferAborted(transfer=number, reason=reason)
            self.send(rpc_pb2.Message(transfer_aborted=aborted))

    def _close(self, reason: str) -> None:
        if self.closed_reason is None:
            self.closed_reason = reason
            self._stream.abort(reason)

    async def run(self) -> None:
        """Reads and writes until the session ends; then calls `on_closed` once.

        Cancellation ends the session like `close`.
        """
        writer = self._io.spawn(self._write_loop(), f"rpcdist session writer to {self.peer.name}")
        self._schedule_tick()
        if not self.opened_by_me:
            self._handler.on_opened(self)
        reason = "connection closed by the peer"
        try:
            await self._read_loop()
        except TransportError as exc:
            reason = str(exc)
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
        self._close(reason)
        writer.cancel()
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self._drained.set()
        self._ended.set()
        self._handler.on_closed(self, reason)

    async def drain(self, timeout_s: float) -> bool:
        """Waits until everything queued so far has been handed to the lane; False when the time is over."""
        self._drained.clear()
        if self._outgoing.is_empty and not self._awake:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return self.closed_reason is None

    async def ended(self, timeout_s: float) -> bool:
        """Waits until `on_closed` has been called; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _read_loop(self) -> None:
        while (data := await self._stream.read()) is not None:
            self.last_received = time.monotonic()
            parsed = parse(data)
            if isinstance(parsed, Piece):
                self._grant(len(data))
                delivery = self._incoming.piece(parsed)
                if delivery is not None:
                    self._handler.on_messages(self, [delivery])
                continue
            messages = []
            for message in parsed.messages:
                if message.HasField("heartbeat"):
                    continue
                if message.HasField("piece_credit"):
                    self._outgoing.grant(message.piece_credit.bytes)
                    self._wake_writer()
                    continue
                if message.HasField("transfer_aborted"):
                    self._incoming.abort(message.transfer_aborted.transfer)
                    continue
                delivery = self._incoming.announce(message)
                if delivery is not None:
                    messages.append(delivery)
            if messages:
                self._handler.on_messages(self, messages)
            if parsed.HasField("handshake"):
                raise ProtocolViolation("a handshake message arrived after the handshake was finished")

    def _grant(self, num_bytes: int) -> None:
        """Lets the peer send more pieces, in quarters of the window."""
        self._ungranted_bytes += num_bytes
        if self._ungranted_bytes >= PIECE_WINDOW_BYTES // 4:
            credit = rpc_pb2.PieceCredit(bytes=self._ungranted_bytes)
            self._ungranted_bytes = 0
            self.send(rpc_pb2.Message(piece_credit=credit))

    async def _write_loop(self) -> None:
        outgoing = self._outgoing
        try:
            while True:
                data = outgoing.next_envelope()
                if data is not None:
                    await self._stream.write(data)
                    self._last_sent = time.monotonic()
                    continue
                if outgoing.is_empty:
                    self._drained.set()
                self._wake = self._io.loop.create_future()
                self._awake = False
                if outgoing:  # somebody queued between the look and the flag
                    self._awake = True
                    continue
                await self._wake
        except TransportError as exc:
            self._close(str(exc))
        except Exception as exc:
            # A buffer that cannot be read any more (its memory was released) must not leave the peer waiting.
            logger.exception("writing to %s failed", self.peer.name)
            self._close(f"writing failed: {exc!r}")

    # Heartbeats: silence is how a dead host is told from an idle one.

    def _schedule_tick(self) -> None:
        interval = self._silence_limit_s / HEARTBEATS_PER_TIMEOUT
        self._tick_due = self._io.loop.time() + interval
        self._tick_handle = self._io.loop.call_at(self._tick_due, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        interval = self._silence_limit_s / HEARTBEATS_PER_TIMEOUT
        late = self._io.loop.time() - self._tick_due
        silence = now - self.last_received
        # A loop that was itself held up has not read what may lie in its socket; it judges nobody in this round.
        if silence > self._silence_limit_s and late < interval:
            self._close(f"no sign of life for {silence:.1f} s")
            return
        if now - self._last_sent >= interval * 0.9:
            self.send(rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()))
        self._schedule_tick()


def expect_handshake(data: bytes | bytearray | None) -> rpc_pb2.Envelope:
    """The envelope if it is a handshake step, else `ProtocolViolation`; used before anything is proven.

    A peer that goes away (None) raises `TransportError`: it may have been cancelled, and has done nothing wrong.
    """
    if data is None:
        raise TransportError("the connection was closed during the handshake")
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolViolation(f"{len(data)} bytes arrived before the handshake was finished")
    envelope = parse(data)
    if isinstance(envelope, Piece) or envelope.messages or not envelope.HasField("handshake"):
        raise ProtocolViolation("a message arrived before the handshake was finished")
    return envelope
