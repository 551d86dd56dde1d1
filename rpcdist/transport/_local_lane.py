"""The lane between two workers of one host: the same envelopes as on gRPC, over an abstract Unix socket.

A worker that serves host:port also listens under a name made of that address, so a peer on the same host that knows the
address finds the lane, and a peer elsewhere (another host, another network namespace) finds nothing and takes gRPC.
The handshake is the same, and comes first as well; beyond that, the kernel says whose process the other end is.

On the wire: four bytes of length, little endian, and the envelope. A set top bit marks the last frame, whose text says
why the sender closes. Before the handshake is done, frames are limited to its size.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Final

from rpcdist.errors import ConfigError, ProtocolViolation, TransportError
from rpcdist.transport import fork
from rpcdist.transport._frames import MAX_ENVELOPE_BYTES, MAX_FRAME_BYTES, PIECE_BYTES
from rpcdist.transport._sockets_wire import has_abstract_sockets, same_user, tune
from rpcdist.transport.session import MAX_HANDSHAKE_BYTES

__all__ = ["LANES_VARIABLE", "LocalStream", "connect_local", "listen_local", "local_lanes_allowed"]

LANES_VARIABLE: Final = "RPCDIST_LANES"
_LARGEST_BYTES: Final = MAX_ENVELOPE_BYTES + MAX_FRAME_BYTES + PIECE_BYTES
_LENGTH: Final = struct.Struct("<I")
_LAST: Final = 1 << 31
_SCRATCH_BYTES: Final = 1 << 17
_MAX_REASON_BYTES: Final = 1000
_BACKLOG: Final = 512


def local_lanes_allowed() -> bool:
    """Whether this process may use lanes beside gRPC: always, unless `RPCDIST_LANES=grpc` says no.

    Raises:
        ConfigError: the variable has another value than "auto" or "grpc".
    """
    text = os.environ.get(LANES_VARIABLE, "auto")
    if text not in ("auto", "grpc"):
        raise ConfigError(f"{LANES_VARIABLE} is 'auto' or 'grpc', not {text!r}")
    return text == "auto" and has_abstract_sockets()


def _name(address: str) -> str:
    return f"\0rpcdist-lane-{address}"


def listen_local(address: str) -> socket.socket | None:
    """Listens for peers on this host that look for `address`; None where somebody else took the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fork.note_socket(listener)
    try:
        listener.bind(_name(address))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def connect_local(address: str) -> LocalStream | None:
    """Connects to the lane of the worker at `address`; None if there is none on this host. On the I/O loop."""
    if not local_lanes_allowed():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fork.note_socket(connection)
    connection.setblocking(False)
    try:
        connection.connect(_name(address))
        if not same_user(connection):
            raise PermissionError("another user's process listens under this worker's name")
    except OSError:  # nobody there, or a full backlog: gRPC will do
        connection.close()
        return None
    return LocalStream(connection, address)


class LocalStream:
    """A connected lane, as a `ByteStream`. All of it runs on the I/O loop.

    Attributes:
        limit_bytes: of one frame; `open_up` raises it once the peer is proven.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        tune(connection)
        connection.setblocking(False)
        self.limit_bytes = MAX_HANDSHAKE_BYTES
        self._socket = connection
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes | bytearray] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._num_scratch = 0
        self._large: bytearray | None = None  # a frame that does not fit into the scratch, received in place
        self._num_large = 0
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._ended: TransportError | None = None
        self._closed_by_peer = False
        self._listening = True
        self._loop.add_reader(connection, self._readable)

    def open_up(self) -> None:
        """The peer is proven: frames may be as large as envelopes."""
        self.limit_bytes = _LARGEST_BYTES

    # ------------------------------------------------------------ reading

    async def read(self) -> bytes | bytearray | None:
        """See `ByteStream`. A `bytearray` is the caller's."""
        while not self._frames:
            if self._closed_by_peer:
                return None
            if self._ended is not None:
                raise self._ended
            self._listen()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()

    def _listen(self) -> None:
        if not self._listening:
            self._listening = True
            self._loop.add_reader(self._socket, self._readable)

    def _readable(self) -> None:
        try:
            if self._large is not None:
                self._take_large()
            else:
                self._take_small()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._end(TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}"))
        except ProtocolViolation as exc:
            self._end(exc)
        if self._frames or self._ended is not None or self._closed_by_peer:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_large(self) -> None:
        large = self._large
        assert large is not None
        num_bytes = self._socket.recv_into(memoryview(large)[self._num_large :])
        if num_bytes == 0:
            self._closed_by_peer = True
            self._stop_listening()
            return
        self._num_large += num_bytes
        if self._num_large == len(large):
            self._frames.append(large)
            self._large = None
            self._stop_listening()  # until it was taken: what the reader has not taken stays with the sender

    def _take_small(self) -> None:
        num_bytes = self._socket.recv_into(self._scratch[self._num_scratch :])
        if num_bytes == 0:
            self._closed_by_peer = True
            self._stop_listening()
            return
        self._num_scratch += num_bytes
        self._split()

    def _split(self) -> None:
        """Takes whole frames out of the scratch, and moves what is left to its beginning."""
        scratch, end, at = self._scratch, self._num_scratch, 0
        while end - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(scratch, at)
            last, size = size & _LAST, size & ~_LAST
            if size > self.limit_bytes:
                raise ProtocolViolation(f"{self._address} announced a frame of {size} bytes")
            body = at + _LENGTH.size
            if body + size <= end:
                self._frame(bytes(scratch[body : body + size]), bool(last))
                at = body + size
            elif body + size - at > _SCRATCH_BYTES // 2:
                self._large = bytearray(size)
                self._num_large = end - body
                self._large[: end - body] = scratch[body:end]
                at = end
            else:
                break
        scratch[: end - at] = scratch[at:end]
        self._num_scratch = end - at

    def _frame(self, data: bytes, last: bool) -> None:
        if not last:
            self._frames.append(data)
            return
        reason = data[:_MAX_REASON_BYTES].decode(errors="replace")
        self._end(TransportError(f"{self._address} closed the connection: {reason}"))

    # ------------------------------------------------------------ writing

    async def write(self, data: bytes) -> None:
        """See `ByteStream`; by one task at a time. Cancelled in the middle of a frame, it leaves the stream useless."""
        if self._ended is not None:
            raise self._ended
        sent = self._send([_LENGTH.pack(len(data)), data])
        if sent < _LENGTH.size + len(data):
            head = _LENGTH.pack(len(data))
            await self._write_rest(memoryview(head)[sent:] if sent < len(head) else None)
            await self._write_rest(memoryview(data)[max(0, sent - len(head)) :])

    async def _write_rest(self, rest: memoryview | None) -> None:
        while rest:
            rest = rest[self._send([rest]) :]
            if rest:
                await self._until_writable()

    def _send(self, parts: list[bytes | memoryview]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}") from exc

    async def _until_writable(self) -> None:
        if self._ended is not None:
            raise self._ended
        writable = self._writable = self._loop.create_future()
        self._loop.add_writer(self._socket, self._now_writable)
        try:
            await writable
        finally:
            self._writable = None
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket)

    def _now_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # ------------------------------------------------------------ the end

    def abort(self, reason: str) -> None:
        """Ends the stream at once, and tells the peer why if there is room; idempotent."""
        if self._socket.fileno() < 0:
            return
        if self._writable is None and self._ended is None:
            text = reason.encode()[:_MAX_REASON_BYTES]
            with suppress(OSError):
                self._socket.sendmsg([_LENGTH.pack(len(text) | _LAST), text])
        self._end(TransportError(reason))
        self._stop_listening()
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._wake()

    async def end(self) -> None:
        """The session is over."""
        self.abort("the session ended")

    def _end(self, error: TransportError) -> None:
        if self._ended is None:
            self._ended = error
        self._stop_listening()
        self._now_writable()

    def _stop_listening(self) -> None:
        if self._listening and self._socket.fileno() >= 0:
            self._listening = False
            self._loop.remove_reader(self._socket)
