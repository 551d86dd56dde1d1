"""The channel over a connected stream socket, Unix or TCP, which carries frames without copying large payloads.

A frame is four bytes of length, little endian, and the envelope. If the top bit of the length is set, the frame is the
last one, and its text is the sender's reason for closing.

The peer is proven before the channel is made (socket_pipe.py). `deliver` passes each frame to the session as it
arrives, and receives the payload of a chunk directly into its final memory. `put` sends from any thread, a chunk
directly from the memory of its tensor.

[Note: reading to the end] When a peer dies with unread bytes in its socket, its data and an error arrive here together.
uvloop calls the reader once for both and then never again. So the reader continues until the socket is empty or has
ended.

[Note: closing] The I/O loop closes the socket while another thread may be about to write to it, and the kernel may give
the descriptor's number to the next opened file. Therefore writes and the close exclude each other.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from contextvars import Context
from typing import Any, Final

from rpcdist.deadline import NEVER
from rpcdist.errors import ProtocolViolation, TransportError, described_error
from rpcdist.inspection import ChannelFacts
from rpcdist.time_limits import READ_TURN_S
from rpcdist.transport._channels.channel import FrameReceiver
from rpcdist.transport._channels.socket_reader import SocketReader, Watch, WatchedSockets
from rpcdist.transport._channels.stream_sockets import ROUND_TRIP_AT, SHORTEST_AT, pace_if_far, round_trip_s
from rpcdist.transport._framing.frames import (
    CHUNK_BYTES,
    CHUNK_HEAD_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    parse_chunk_head,
)
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, TlsSocket
from rpcdist.transport.identities import printable
from rpcdist.transport.shared_memory import Segment
from rpcdist.transport.unix_sockets import ANCILLARY_BYTES, CLOSE_ON_EXEC, CUT_OFF, ReceivedDescriptors, rights
from rpcdist.waiters import wake

_LARGEST_BYTES: Final = MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES + CHUNK_BYTES
_LENGTH: Final = struct.Struct("<I")
_LAST: Final = 1 << 31
_SCRATCH_BYTES: Final = 1 << 17
_LARGE_BYTES: Final = _SCRATCH_BYTES // 2  # larger frames are received in place; smaller ones are copied once
_PEEK_BYTES: Final = 4096  # read after a large frame: the next frame is probably large too, and is received in place
_MAX_REASON_BYTES: Final = 1000
_RECEIVES_A_TURN: Final = 4  # then the loop does other work: a peer that sends all the time must not block it
_SOCKET_BYTES: Final = 1 << 20
"""Size of the send buffer. Its bytes delay every small message behind them, and a larger buffer does not make large
messages faster."""

_UNSENT_BYTES: Final = 256 << 10
"""The limit for TCP, on bytes that the kernel has not begun to send."""


class SocketChannel:
    """A channel that calls a receiver instead of being read. It runs on the I/O loop, unless a method says otherwise.

    Attributes:
        is_free: whether `put` may be called: the last frame was written completely.
        passes_descriptors: whether the channel can pass segments of memory, which only Unix sockets can.
        read_while_waiting, interrupt: see `SocketReader`; any thread.

    Args:
        connection: connected, with TLS after its handshake; the channel owns it from now on.
    """

    def __init__(self, connection: socket.socket | TlsSocket, address: str) -> None:
        _bound_unsent_bytes(connection)
        connection.setblocking(False)
        self.passes_descriptors = connection.family == socket.AF_UNIX
        self._socket: Any = connection  # both kinds have the methods used here
        self._tls = connection if isinstance(connection, TlsSocket) else None
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._ended: Exception | None = None  # why the channel cannot be read any more
        # Reading.
        self._receiver: FrameReceiver | None = None
        self._done: asyncio.Future[None] | None = None  # ends `deliver`
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # small frames, and the beginnings of large ones
        self._num_scratch = 0
        self._room = _SCRATCH_BYTES  # the bytes of the scratch that the next receive may fill
        self._target: memoryview | None = None  # the memory of a large frame
        self._num_target = 0
        self._plain: bytearray | None = None  # a large frame that is not a chunk, or a chunk of an aborted transfer
        self._chunk: tuple[int, int, int] | None = None  # transfer, buffer and size of a large frame that is a chunk
        self._turn_ends_at = NEVER.at  # for the loop; a waiting thread may read for longer
        self._has_frames = False  # the scratch begins with a frame, since a turn has ended
        self._reader = SocketReader(self._read_on_thread)
        self._threads_read = False
        self._descriptor = -1
        self.read_while_waiting = self._reader.read_while_waiting
        self.interrupt = self._reader.interrupt
        self._failure: Exception | None = None  # raised on a waiting thread; the loop is notified soon
        self._descriptors = ReceivedDescriptors(address)
        self.take_descriptor = self._descriptors.take
        # Writing.
        self._lock = threading.Lock()  # [Note: closing]
        self._closed = False
        self.is_free = True
        self._rest: list[memoryview] = []  # the unsent part of a frame; no other frame may begin before it is sent
        self._rest_segment: Segment | None = None  # travels with the first byte of that part
        self._writable: asyncio.Future[None] | None = None
        self._num_sent = self._num_received = 0  # bytes

    def read_along(self, other: SocketChannel) -> None:
        """See `SocketReader.read_along`."""
        self._reader.read_along(other._reader)

    @property
    def facts(self) -> ChannelFacts:
        """See `ReadChannel`."""
        kind = "local" if self.passes_descriptors else "tcp"
        trip_s = round_trip_s(self._socket, ROUND_TRIP_AT) if kind == "tcp" and not self._closed else None
        is_tls = self._tls is not None
        return ChannelFacts("", "", False, kind, is_tls, self._num_sent, self._num_received, round_trip_s=trip_s)

    @property
    def shortest_round_trip_s(self) -> float | None:
        """The shortest round trip that the kernel has measured; None for a Unix socket, or if it is unknown."""
        return None if self._closed or self.passes_descriptors else round_trip_s(self._socket, SHORTEST_AT)

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes sent and received so far."""
        return self._num_sent, self._num_received

    # ------------------------------------------------------------ reading

    async def deliver(self, receiver: FrameReceiver) -> None:
        """Gives all arriving frames to the receiver, until the channel ends; the peer is proven.

        Raises:
            TransportError: the channel ended; the error has the peer's reason, or says that the connection broke.
            Exception: the receiver raised it.

        Cancellation stops the reading and leaves the stream open.
        """
        if self._ended is not None:
            raise self._ended
        self._receiver = receiver
        self._done = self._loop.create_future()
        self._descriptor = self._socket.fileno()
        self._threads_read = self._reader.allow(self._descriptor, self._watch)
        if not self._threads_read:  # then the loop alone reads
            self._loop.add_reader(self._descriptor, self._read_some)
        self._loop.call_soon(self._start)  # bytes may have arrived right after the handshake
        try:
            await self._done
        finally:
            self._stop_listening()
        assert self._ended is not None
        raise self._ended

    def _start(self) -> None:
        if self._tls is not None:
            self._read(1)  # bytes decrypted with the end of the handshake do not make the socket readable
            if self._has_frames:
                self._loop.call_soon(self._start)
                return
        if self._threads_read:
            self._reader.open()
        self._read_some()

    def _watch(self, descriptor: int) -> Watch:
        return WatchedSockets.of(self._loop).add(descriptor, self._read_some)

    def _read_some(self) -> None:
        if not self._threads_read:
            if not self._read(_RECEIVES_A_TURN):
                self._loop.call_soon(self._read_some)  # epoll would not report it: [Note: reading to the end]
        elif self._reader.take():
            self._read_in_turns()

    def _read_in_turns(self) -> None:
        """Reads for the loop, which holds the lock. No thread reads while frames are left: it would overlook them."""
        try:
            self._read(_RECEIVES_A_TURN)  # the epoll instance reports unread bytes again
        finally:
            if self._has_frames and self._receiver is not None and self._failure is None:
                self._loop.call_soon(self._read_in_turns)
            else:
                self._reader.give_back()

    def read_out(self) -> Exception | None:
        """Delivers everything that has arrived; returns the reason why the channel has ended, or None."""
        if self._reader.stop():
            while not self._read(_RECEIVES_A_TURN):
                pass
        return self._ended

    def _read(self, limit: int) -> bool:
        """Receives up to `limit` times; True if there is nothing more to receive. [Note: reading to the end]

        When the turn ends, no further frame is delivered, so that many small messages do not delay other peers.
        """
        self._turn_ends_at = time.monotonic() + READ_TURN_S
        try:
            for _ in range(limit):
                if self._receiver is None or self._failure is not None or not self._receive_all(self._receiver):
                    return True
                if self._has_frames or time.monotonic() > self._turn_ends_at:
                    break
        except Exception as exc:
            self.fail(exc)
        finally:
            self._turn_ends_at = NEVER.at
        return self._receiver is None

    def _read_on_thread(self) -> bool:
        """Receives once, on a waiting thread; False if nothing more can arrive. The loop ends the channel."""
        receiver = self._receiver
        if receiver is None or self._failure is not None:
            return False
        try:
            if self._tls is None:
                self._receive(receiver)
            else:
                self._receive_all(receiver)
        except Exception as exc:
            self._failure = exc
            self._notify_loop(exc)
            return False
        except BaseException as exc:  # bytes may have been lost
            self._failure = TransportError(f"reading from {self._address} was interrupted: {described_error(exc)}")
            self._notify_loop(self._failure)
            raise
        return True

    def _notify_loop(self, failure: Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the channel with it
            self._loop.call_soon_threadsafe(self.fail, failure, context=Context())

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that were not read yet."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0)) or (self._tls is not None and self._tls.has_buffered)

    def _receive_all(self, receiver: FrameReceiver) -> bool:
        """Like `_receive`, but also takes the bytes that TLS has buffered, which do not make the socket readable."""
        has_arrived = self._receive(receiver)
        while self._tls is not None and self._tls.has_buffered and self._receiver is receiver:
            if self._has_frames and time.monotonic() > self._turn_ends_at:
                break
            self._receive(receiver)
        return has_arrived

    def _receive(self, receiver: FrameReceiver) -> bool:
        """Receives once, unless frames are left from the last turn; False if nothing has arrived."""
        target = self._target
        if self._has_frames:
            self._split()
            return True
        if target is not None:
            num_bytes = self._receive_large(target[self._num_target :], receiver)
        else:
            if self._num_scratch or self._room < _SCRATCH_BYTES:
                num_bytes = self._receive_into(self._scratch[self._num_scratch :][: self._room])
            else:
                num_bytes = self._receive_into(self._scratch)
            self._num_scratch += num_bytes or 0
            self._room = _SCRATCH_BYTES
            if num_bytes:
                self._split()
        if num_bytes == 0:
            raise TransportError(f"the connection with {self._address} broke: the process there is gone")
        return num_bytes is not None

    def _receive_large(self, rest: memoryview, receiver: FrameReceiver) -> int | None:
        """Like `_receive_into`, for the rest of a large frame and the beginning of the next frame."""
        num_left = len(rest)
        if self._tls is None:
            num_bytes = self._receive_into(rest, self._scratch[:_PEEK_BYTES])
        else:
            num_bytes = self._receive_into(rest)
        if num_bytes is None or num_bytes < num_left:
            self._num_target += num_bytes or 0
            return num_bytes
        self._num_scratch = num_bytes - num_left
        self._complete(receiver)
        if self._num_scratch:
            self._room = _SCRATCH_BYTES
            self._split()
        return num_bytes

    def _receive_into(self, *places: memoryview) -> int | None:
        """The number of bytes received; 0 at the end of the stream, None if no bytes have arrived yet."""
        num_bytes: int
        try:
            # TCP carries no descriptors. Before the peer is proven, the kernel drops those that it sends.
            if self._receiver is None or not self.passes_descriptors:
                if len(places) == 1:
                    num_bytes = int(self._socket.recv_into(places[0]))
                else:
                    num_bytes = int(self._socket.recvmsg_into(places)[0])
                self._num_received += num_bytes
                return num_bytes
            num_bytes, ancillary, flags, _ = self._socket.recvmsg_into(places, ANCILLARY_BYTES, CLOSE_ON_EXEC)
            self._num_received += num_bytes
            if ancillary or flags & CUT_OFF:
                self._descriptors.add(ancillary, flags)
            return num_bytes
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as exc:
            raise self._broken(exc) from exc

    def _split(self) -> None:
        """Takes the frames out of the scratch until the turn ends, and moves the rest to its beginning."""
        scratch, end, at = self._scratch, self._num_scratch, 0
        self._has_frames = False
        while end - at >= 4 and (receiver := self._receiver) is not None:
            (size,) = _LENGTH.unpack_from(scratch, at)
            is_last = False
            if size > _LARGE_BYTES:
                size, is_last = self._size_at(at)
            body = at + 4
            if end - body >= size:
                if at and time.monotonic() > self._turn_ends_at:
                    self._has_frames = True
                    break
                at = body + size
                frame = bytes(scratch[body:at])
                if is_last:
                    raise self._closed_because(frame)
                receiver.receive(frame)
            elif size > _LARGE_BYTES and end - body >= CHUNK_HEAD_BYTES:
                self._begin_large(receiver, size, scratch[body:end])
                at = end
            else:
                break
        if at == end:
            self._num_scratch = 0
        else:
            self._drop_scratch(at)

    def _begin_large(self, receiver: FrameReceiver, size: int, have: memoryview) -> None:
        head = parse_chunk_head(have[:CHUNK_HEAD_BYTES], size)
        place = None if head is None else receiver.place(*head)
        if head is None or place is None:
            self._plain = bytearray(size)
            target = memoryview(self._plain)
        else:
            transfer, buffer, _, num_bytes = head
            self._chunk = transfer, buffer, num_bytes
            target, have = place, have[CHUNK_HEAD_BYTES:]
        target[: len(have)] = have
        self._target, self._num_target = target, len(have)

    def _complete(self, receiver: FrameReceiver) -> None:
        plain, chunk = self._plain, self._chunk
        self._plain = self._chunk = self._target = None
        self._room = _PEEK_BYTES
        if chunk is not None:
            receiver.placed(*chunk)
        elif plain is not None:
            receiver.receive(plain)

    def _size_at(self, at: int) -> tuple[int, bool]:
        """The size of the frame that begins at this offset, and whether it is the last frame."""
        (number,) = _LENGTH.unpack_from(self._scratch, at)
        size, is_last = number & ~_LAST, number >= _LAST
        if size > (_MAX_REASON_BYTES if is_last else _LARGEST_BYTES):
            raise ProtocolViolation(f"{self._address} announced a frame of {size} bytes")
        return size, is_last

    def _drop_scratch(self, num_bytes: int) -> None:
        left = self._num_scratch - num_bytes
        if left and num_bytes:  # less than the scratch, and seldom more than half of it
            self._scratch[:left] = self._scratch[num_bytes : self._num_scratch]
        self._num_scratch = left

    def _closed_because(self, reason: bytes) -> TransportError:
        return TransportError(f"{self._address} closed the connection: {printable(reason)}")

    def _broken(self, exc: OSError) -> TransportError:
        return TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}")

    # ------------------------------------------------------------ writing

    def put(self, head: bytes, payload: memoryview | None = None) -> None:
        """Sends as much of a frame as the socket takes at once, and keeps the rest for `flush`.

        Any thread may call it, one at a time, and only while the channel `is_free`.

        Raises:
            TransportError: the connection broke, or was closed here.
        """
        if payload is None:
            self._send([memoryview(_LENGTH.pack(len(head))), memoryview(head)])
        else:
            size = len(head) + len(payload)
            self._send([memoryview(_LENGTH.pack(size) + head), payload])

    async def pass_segment(self, head: bytes, segment: Segment) -> None:
        """Like `write_parts`, for an envelope that also carries the descriptor of shared memory."""
        self._send([memoryview(_LENGTH.pack(len(head))), memoryview(head)], segment)
        if self._rest:
            await self.flush()

    def _send(self, parts: list[memoryview], segment: Segment | None = None) -> None:
        with self._lock:
            if self._closed:
                raise TransportError(f"the connection with {self._address} is closed")
            try:
                sent = self._socket.sendmsg(parts, () if segment is None else rights(segment), NO_SIGPIPE)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as exc:
                raise self._broken(exc) from exc
            self._num_sent += sent
            self._rest_segment = None if sent else segment  # the descriptor travels with the first byte
            # Under the lock, too, because `abort` reads `_rest` to find out whether a frame was sent in part.
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]
            self._rest = parts
            self.is_free = not parts

    async def write_parts(self, head: bytes, payload: memoryview | None = None) -> None:
        """Sends a frame, whose last bytes may be in other memory; one task at a time.

        `payload` is read until this returns. If it is cancelled within a frame, `flush` sends the rest.
        """
        self.put(head, payload)
        if self._rest:
            await self.flush()

    async def flush(self) -> None:
        """Writes the rest that `put` kept. After a cancellation it can be called again."""
        while self._rest:
            await self._until_writable()
            self._send(self._rest, self._rest_segment)

    async def _until_writable(self) -> None:
        if self._ended is not None:
            raise TransportError(str(self._ended))
        writable = self._writable = self._loop.create_future()
        self._loop.add_writer(self._socket, wake, writable)
        try:
            await writable
        finally:
            self._writable = None
            if not self._closed:
                self._loop.remove_writer(self._socket)

    # ------------------------------------------------------------ the end

    def abort(self, reason: str) -> None:
        """Ends the channel at once, and sends the peer the reason unless the socket is full; idempotent."""
        if self._closed:
            return
        self.fail(TransportError(reason))
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        text = reason.encode()[:_MAX_REASON_BYTES]
        with self._lock:
            self._closed = True
            if not self._rest:  # otherwise the peer would take the reason for the rest of a frame
                with suppress(OSError):
                    self._socket.sendmsg([_LENGTH.pack(len(text) | _LAST), text], (), NO_SIGPIPE)
        self._rest, self.is_free = [], True
        if not self._reader.stop():
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the connection while a thread still reads
        self._reader.close(self._close)

    def _close(self) -> None:
        """Called when no thread reads any more, by the loop or by a thread that stopped late."""
        self._target = None
        with self._lock:
            self._socket.close()
        self._descriptors.close()

    def fail(self, error: Exception) -> None:
        """Ends the reading, and with it `deliver`, which raises the error; on the I/O loop."""
        if self._ended is None:
            self._ended = error
        self._stop_listening()
        for waiter in (self._done, self._writable):
            if waiter is not None:
                wake(waiter)

    def _stop_listening(self) -> None:
        if self._receiver is not None:
            self._receiver = None
            self._reader.stop()
            if self._threads_read:
                WatchedSockets.of(self._loop).remove(self._descriptor)
            elif not self._closed:
                self._loop.remove_reader(self._descriptor)


def _bound_unsent_bytes(connection: socket.socket | TlsSocket) -> None:
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    else:  # a fixed buffer would also bound the bytes in flight, and so the rate
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        pace_if_far(connection)
