"""One message on its way: as much as the socket takes or gives at a time, never blocking."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import torch

from rpcdist.collectives._operations.reduce_kernels import Combine
from rpcdist.collectives._transports.base import TransportPeerLost
from rpcdist.collectives._transports.sockets.framing import HEADER_BYTES, OperationFrame

__all__ = ["Receiving", "Reduction", "Sending", "Transfer", "piece_bytes"]

PIECE_ELEMENTS: Final = 32 << 10
"""Numbers that are reduced at once. Torch runs larger kernels on several threads, which wait for each other spinning:
where ranks share cores, that was measured to take 30 times as long."""

_PIECE_BYTES: Final = 128 << 10  # a piece stays in the processor's cache, until it is reduced

_SMALL_BYTES: Final = 4 << 10
"""A payload up to this size is read together with its header; the copy is cheaper than a system call."""

_TURN_BYTES: Final = 512 << 10
"""How much a message may move before the others of the round get their turn."""


def piece_bytes(unit: int) -> int:
    """Size of the pieces in which numbers of `unit` bytes are reduced."""
    return min(_PIECE_BYTES, PIECE_ELEMENTS * unit)


class Transfer:
    """A message between this rank and a peer.

    Attributes:
        peer: the other rank.
        channel: which of the connections with it.
        link: the connection; None until it is open.
    """

    __slots__ = ("channel", "link", "peer")

    peer: int
    channel: int
    link: socket.socket | None
    is_send: bool = False

    def advance(self) -> bool:
        """Moves what can be moved now; whether all of it is done.

        Raises:
            TransportPeerLost: the connection ended.
            TransportMismatch: the message is another one.
        """
        raise NotImplementedError

    def lost(self, exc: OSError | None = None) -> TransportPeerLost:
        """The error for a connection that ended."""
        return TransportPeerLost(self.peer, (exc.strerror or str(exc)) if exc else "it closed the connection")


class Sending(Transfer):
    """Sends a header and a payload."""

    __slots__ = ("_header", "_payload", "_sent", "_total")

    is_send = True

    def __init__(self, peer: int, channel: int, header: bytes, payload: memoryview) -> None:
        self.peer = peer
        self.channel = channel
        self.link = None
        self._header = header
        self._payload = payload
        self._sent = 0
        self._total = HEADER_BYTES + len(payload)

    def advance(self) -> bool:
        link = self.link
        assert link is not None
        limit = self._sent + _TURN_BYTES
        try:
            while self._sent < self._total and self._sent < limit:
                if self._sent < HEADER_BYTES:
                    self._sent += link.sendmsg((self._header[self._sent :], self._payload[:_TURN_BYTES]))
                else:
                    start = self._sent - HEADER_BYTES
                    self._sent += link.send(self._payload[start : start + _TURN_BYTES])
        except BlockingIOError:
            pass
        except OSError as exc:
            raise self.lost(exc) from exc
        return self._sent == self._total


class Reduction:
    """What to do with a message besides keeping it.

    Args:
        combine: `Reducer.combine`.
        target: where the result goes.
        operand: what the message is reduced with; as long as `target`, and perhaps the same.
        landing: where the message arrives; as long as `target`, or as one piece.
        landing_memory: the same memory.
        received_first: whether the message is the first operand.
        late: whether to reduce in `complete`; `landing` is as long as `target`, then.
        finish: makes what was reduced final; None when there is nothing to do.
    """

    __slots__ = (
        "_combine", "_finish", "_landing", "_operand", "_received_first", "_target", "_unit", "late", "memory",
        "piece_bytes",
    )  # fmt: skip

    def __init__(
        self,
        combine: Combine,
        target: torch.Tensor,
        operand: torch.Tensor,
        landing: torch.Tensor,
        landing_memory: memoryview,
        received_first: bool,
        late: bool,
        finish: Callable[[torch.Tensor], object] | None,
    ) -> None:
        self._combine = combine
        self._target = target
        self._operand = operand
        self._landing = landing
        self._received_first = received_first
        self._unit = target.element_size()
        self.memory = landing_memory
        self.late = late
        self._finish = finish
        self.piece_bytes = piece_bytes(self._unit)

    def reduce_all(self) -> None:
        """Reduces a message that has arrived as a whole."""
        size = self._target.nbytes
        for start in range(0, size, self.piece_bytes):
            self.reduce(start, min(start + self.piece_bytes, size))

    def reduce(self, start: int, stop: int) -> None:
        """Reduces bytes `start` to `stop` of the message, which lie in the landing modulo its length."""
        unit = self._unit
        first, last = start // unit, stop // unit
        position = first % len(self._landing)
        received = self._landing[position : position + last - first]
        target, operand = self._target[first:last], self._operand[first:last]
        if self._received_first:
            self._combine(received, operand, target)
        else:
            self._combine(operand, received, target)
        if self._finish is not None:
            self._finish(target)


class Receiving(Transfer):
    """Receives a message after its header has proven to be the expected one."""

    __slots__ = (
        "_expected",
        "_frame",
        "_got",
        "_header",
        "_num_header_bytes",
        "_payload",
        "_reduced",
        "_size",
        "reduction",
    )

    def __init__(
        self,
        peer: int,
        channel: int,
        frame: OperationFrame,
        expected: bytes,
        payload: memoryview,
        size: int,
        reduction: Reduction | None,
    ) -> None:
        self.peer = peer
        self.channel = channel
        self.link = None
        self.reduction = reduction
        self._frame = frame
        self._expected = expected
        self._header = b""
        self._payload = payload  # of `size` bytes; the landing of a reduction may be shorter
        self._size = size
        self._got = 0
        self._reduced = 0

    def advance(self) -> bool:
        link = self.link
        assert link is not None
        try:
            if len(self._header) < HEADER_BYTES and not self._read_header(link):
                return False
            return self._got == self._size or self._read_payload(link)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.lost(exc) from exc

    def _read_header(self, link: socket.socket) -> bool:
        small = self._size if self._size <= _SMALL_BYTES else 0  # a small payload comes along, to be looked at later
        data = self._header + (piece := link.recv(HEADER_BYTES - len(self._header) + small))
        if not piece:
            raise self.lost()
        self._header = data[:HEADER_BYTES]
        if len(data) < HEADER_BYTES:
            return False
        if self._header != self._expected:
            raise self._frame.mismatch(self.peer, self._expected, self._header)
        if len(data) > HEADER_BYTES:
            self._got = len(data) - HEADER_BYTES
            self._payload[: self._got] = data[HEADER_BYTES:]
            if self._got == self._size and self.reduction is not None and not self.reduction.late:
                self.reduction.reduce_all()
        return True

    def _read_payload(self, link: socket.socket) -> bool:
        limit = self._got + _TURN_BYTES
        while self._got < self._size and self._got < limit:
            room = self._room()
            number = link.recv_into(room)
            if not number:
                raise self.lost()
            self._got += number
            if number == len(room) or self._got == self._size:
                self._reduce()
        return self._got == self._size

    def _room(self) -> memoryview:
        """Where the next bytes go: up to the end of a piece, if pieces are reduced as they arrive."""
        if self.reduction is None or self.reduction.late:
            return self._payload[self._got : self._size]
        start = self._got % len(self._payload)
        piece = self.reduction.piece_bytes - self._got % self.reduction.piece_bytes
        return self._payload[start : start + min(piece, self._size - self._got)]

    def _reduce(self) -> None:
        if self.reduction is not None and not self.reduction.late and self._got > self._reduced:
            self.reduction.reduce(self._reduced, self._got)
            self._reduced = self._got

    def complete(self) -> None:
        """Reduces what had to wait for the end of the round."""
        if self.reduction is not None and self.reduction.late:
            self.reduction.reduce_all()
