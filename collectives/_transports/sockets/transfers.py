"""One message between two ranks, moved without blocking: each call moves as many bytes as the socket takes or has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import ClassVar, Final

import torch

from rpcdist.collectives._operations.reduce_kernels import Combine
from rpcdist.collectives._transports.sockets.pair_connections import HEADER_BYTES, OperationFrame
from rpcdist.collectives._transports.transport_base import TransportPeerLost
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, has_buffered

SLICE_ELEMENTS: Final = 32 << 10
"""How many numbers are reduced at once. Torch runs larger kernels on several threads, which spin while they wait for
each other: where ranks share cores, that was measured to take 30 times as long."""

_SLICE_BYTES: Final = 128 << 10  # fits into the processor's cache until it is reduced
_SLICE_BYTES_OF_ONE_THREAD: Final = 512 << 10  # fits as well, and runs fewer lines of Python

_SMALL_BYTES: Final = 4 << 10
"""Payloads of up to this size are read together with their header, as the copy is cheaper than a system call."""

_TURN_BYTES: Final = 4 << 20
"""How many bytes of a message are moved before the other messages of the round have a turn. With an eighth of this, an
all_reduce of 16 MiB took 1.1x to 1.4x as long, as each change of turns empties a socket and puts a rank to sleep."""


def slice_bytes(unit: int) -> int:
    if torch.get_num_threads() == 1:
        return _SLICE_BYTES_OF_ONE_THREAD
    return min(_SLICE_BYTES, SLICE_ELEMENTS * unit)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message between this rank and a peer.

    Attributes:
        channel: the index of the connection with the peer.
        connection: the connection; None until it is open.
    """

    peer: int
    channel: int
    connection: StreamSocket | None = field(default=None, init=False)
    is_send: ClassVar[bool] = False

    def advance(self) -> bool:
        """Moves as many bytes as possible now; returns whether the message is complete.

        Raises:
            TransportPeerLost: the connection ended.
            TransportMismatch: the message is not the expected one.
        """
        raise NotImplementedError

    @property
    def has_buffered(self) -> bool:
        """Whether the transfer can continue although poll does not report its connection."""
        return not self.is_send and self.connection is not None and has_buffered(self.connection)

    def lost(self, exc: OSError | None = None) -> TransportPeerLost:
        return TransportPeerLost(self.peer, (exc.strerror or str(exc)) if exc else "it closed the connection")


@dataclass(slots=True, eq=False)
class Sending(Transfer):
    """Sends a header and a payload."""

    is_send: ClassVar[bool] = True

    _header: bytes
    _payload: memoryview
    _sent: int = field(default=0, init=False)

    def advance(self) -> bool:
        connection = self.connection
        assert connection is not None
        total = HEADER_BYTES + len(self._payload)
        limit = min(self._sent + _TURN_BYTES, total)
        try:
            while self._sent < limit:
                if self._sent < HEADER_BYTES:
                    parts = (self._header[self._sent :], self._payload[:_TURN_BYTES])
                    self._sent += connection.sendmsg(parts, (), NO_SIGPIPE)
                else:
                    start = self._sent - HEADER_BYTES
                    self._sent += connection.send(self._payload[start : start + _TURN_BYTES], NO_SIGPIPE)
        except BlockingIOError:
            pass
        except OSError as exc:
            raise self.lost(exc) from exc
        return self._sent == total


@dataclass(slots=True, eq=False)
class Reduction:
    """How to reduce a message with a tensor as it arrives.

    Args:
        operand: the tensor with which the message is reduced; as long as `target`, and perhaps the same.
        staging: the tensor in which the message arrives; as long as `target`, or as one slice.
        memory: the bytes of `staging`.
        slice_bytes: the size of a slice, see the function `slice_bytes`.
        deferred: whether to reduce in `complete`; then `staging` is as long as `target`.
        finish: finishes the reduced numbers, such as by dividing them; may be None.
    """

    _combine: Combine
    target: InitVar[torch.Tensor]
    operand: InitVar[torch.Tensor]
    staging: InitVar[torch.Tensor]
    memory: memoryview
    _received_first: bool
    slice_bytes: int
    deferred: bool
    _finish: Callable[[torch.Tensor], object] | None
    _slices: list[tuple[torch.Tensor, ...]] = field(init=False)

    def __post_init__(self, target: torch.Tensor, operand: torch.Tensor, staging: torch.Tensor) -> None:
        length = self.slice_bytes // target.element_size()
        targets, received = target.split(length), staging.split(length)
        if len(received) < len(targets):  # all slices arrive in the same place
            received = (*received * (len(targets) - 1), staging[: targets[-1].numel()])
        self._slices = list(zip(targets, operand.split(length), received, strict=True))

    def reduce_all(self) -> None:
        for index in range(len(self._slices)):
            self.reduce(index)

    def reduce(self, index: int) -> None:
        """Reduces the slice of this index, which has arrived in the staging tensor."""
        target, operand, received = self._slices[index]
        if self._received_first:
            self._combine(received, operand, out=target)
        else:
            self._combine(operand, received, out=target)
        if self._finish is not None:
            self._finish(target)


@dataclass(slots=True, eq=False)
class Receiving(Transfer):
    """Receives a message, after it has compared the header with the expected one."""

    _frame: OperationFrame
    _expected: bytes
    _payload: memoryview  # of `_size` bytes; the staging of a reduction may be shorter
    _size: int
    reduction: Reduction | None
    _header: bytes = field(default=b"", init=False)
    _got: int = field(default=0, init=False)
    _num_reduced: int = field(default=0, init=False)

    def advance(self) -> bool:
        connection = self.connection
        assert connection is not None
        try:
            if len(self._header) < HEADER_BYTES and not self._read_header(connection):
                return False
            return self._got == self._size or self._read_payload(connection)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self.lost(exc) from exc

    def _read_header(self, connection: StreamSocket) -> bool:
        small = self._size if self._size <= _SMALL_BYTES else 0  # a small payload comes with the header
        data = self._header + (part := connection.recv(HEADER_BYTES - len(self._header) + small))
        if not part:
            raise self.lost()
        self._header = data[:HEADER_BYTES]
        if len(data) < HEADER_BYTES:
            return False
        if self._header != self._expected:
            raise self._frame.mismatch(self.peer, self._expected, self._header)
        if len(data) > HEADER_BYTES:
            self._got = len(data) - HEADER_BYTES
            self._payload[: self._got] = data[HEADER_BYTES:]
            if self._got == self._size and self.reduction is not None and not self.reduction.deferred:
                self.reduction.reduce_all()
        return True

    def _read_payload(self, connection: StreamSocket) -> bool:
        limit = self._got + _TURN_BYTES
        while self._got < self._size and self._got < limit:
            room = self._room()
            number = connection.recv_into(room)
            if not number:
                raise self.lost()
            self._got += number
            if number == len(room) and self.reduction is not None and not self.reduction.deferred:
                self.reduction.reduce(self._num_reduced)
                self._num_reduced += 1
        return self._got == self._size

    def _room(self) -> memoryview:
        """Returns the memory for the next bytes: up to the end of a slice, if slices are reduced as they arrive."""
        if self.reduction is None or self.reduction.deferred:
            return self._payload[self._got : self._size]
        start = self._got % len(self._payload)
        rest = self.reduction.slice_bytes - self._got % self.reduction.slice_bytes
        return self._payload[start : start + min(rest, self._size - self._got)]

    def complete(self) -> None:
        """Reduces a message whose reduction was deferred to the end of the round."""
        if self.reduction is not None and self.reduction.deferred:
            self.reduction.reduce_all()
