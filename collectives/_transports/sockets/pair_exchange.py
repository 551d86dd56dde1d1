"""Small all_reduces of two ranks: the plan `doubling_all_reduce`, without the machinery that runs plans.

On the wire it is the same, byte for byte, so it does not matter whether the other rank does the same. A message is one
system call at each end: header and numbers lie one after the other in memory that is kept for the next operation.
"""

from __future__ import annotations

import os
import select
import time
from typing import Final

import torch

from rpcdist.collectives._operations.dense import copy_bytes, memory_of
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import reducer
from rpcdist.collectives._transports.rank_waits import Pollers, SpinPolicy
from rpcdist.collectives._transports.sockets.pair_connections import HEADER_BYTES, OperationFrame, PairConnections
from rpcdist.collectives._transports.transport_base import Control, TransportPeerLost, TransportTimeout
from rpcdist.time_limits import CHECK_INTERVAL_S
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, has_buffered

SMALL_BYTES: Final = 4 << 10
_START: Final = 64 - HEADER_BYTES  # so that the numbers start at a multiple of 64
_MAX_MESSAGES: Final = 64
_ALL_REDUCE: Final = Kind.ALL_REDUCE
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM


class _MessageBuffers:
    """Memory for messages of one dtype and length, with views of it, and the kernel that reduces them."""

    __slots__ = ("_boxes", "inbox", "kernel", "num_bytes", "outbox", "received", "target")

    def __init__(self, op: ReduceOp, tensor: torch.Tensor) -> None:
        self.kernel = reducer(op, tensor.dtype)
        self.num_bytes = tensor.nbytes
        boxes = [torch.empty(64 + tensor.nbytes, dtype=torch.uint8) for _ in range(2)]
        self._boxes = boxes  # keeps the memory of the views alive
        self.inbox, self.outbox = (memory_of(box)[_START:] for box in boxes)
        self.received = boxes[0][64:].view(self.kernel.dtype)
        self.target = boxes[1].data_ptr() + 64


class PairExchange:
    """One rank's part of these operations."""

    def __init__(
        self, rank: int, size: int, connections: PairConnections, pollers: Pollers, spin_policy: SpinPolicy
    ) -> None:
        self._rank = rank
        self._peer = 1 - rank if size == 2 else -1
        self._connections = connections
        self._pollers = pollers
        self._spin_policy = spin_policy
        self._messages: dict[tuple[int, torch.dtype, int], _MessageBuffers] = {}

    def takes(self, operation: Operation) -> bool:
        """Whether it is such an operation, and the connection is open already."""
        if operation.kind is not _ALL_REDUCE or self._peer < 0 or operation.reduce_op is _PREMUL_SUM:
            return False
        tensor = operation.outputs[0]
        return (
            0 < tensor.nbytes <= SMALL_BYTES
            and self._connections.established(self._peer) is not None
            and not (tensor.requires_grad or tensor.is_inference())
        )

    def run(self, operation: Operation, control: Control) -> None:
        """Raises like `Transport.run`."""
        tensor, connection = operation.outputs[0], self._connections.established(self._peer)
        assert connection is not None
        message = self._message(operation, tensor)
        frame = OperationFrame(self._rank, control.fingerprint, control.sequence, 0)
        header = frame.header(0, message.num_bytes)
        message.outbox[:HEADER_BYTES] = header
        copy_bytes(message.target, tensor.data_ptr(), message.num_bytes)
        self._send(connection, message.outbox, control)
        self._receive(connection, message.inbox, header, frame, control)
        kernel, received = message.kernel, message.received
        flat = tensor.view(-1).view(kernel.dtype)
        if self._peer < self._rank:
            kernel.combine(received, flat, flat)
        else:
            kernel.combine(flat, received, flat)
        if kernel.finish is not None:
            kernel.finish(flat, 2)

    def _message(self, operation: Operation, tensor: torch.Tensor) -> _MessageBuffers:
        op = operation.reduce_op
        assert op is not None
        key = (id(op), tensor.dtype, tensor.numel())  # enum members are never freed, and their hash is slow
        message = self._messages.get(key)
        if message is None:
            if len(self._messages) >= _MAX_MESSAGES:
                self._messages.clear()
            message = self._messages[key] = _MessageBuffers(op, tensor)
        return message

    def clear(self) -> None:
        """Releases the memory."""
        self._messages.clear()

    # ------------------------------------------------------------ messages

    def _send(self, connection: StreamSocket, data: memoryview, control: Control) -> None:
        while len(data):
            try:
                data = data[connection.send(data, NO_SIGPIPE) :]
            except BlockingIOError:
                self._wait(connection, select.POLLOUT, control)
            except OSError as exc:
                raise TransportPeerLost(self._peer, exc.strerror or str(exc)) from exc

    def _receive(
        self, connection: StreamSocket, room: memoryview, expected: bytes, frame: OperationFrame, control: Control
    ) -> None:
        """Fills `room`; the header is compared as soon as it has come."""
        got, size = 0, len(room)
        while got < size:
            number = self._receive_some(connection, room[got:] if got else room, control)
            before, got = got, got + number
            if before < HEADER_BYTES <= got and room[:HEADER_BYTES] != expected:
                raise frame.mismatch(self._peer, expected, bytes(room[:HEADER_BYTES]))

    def _receive_some(self, connection: StreamSocket, room: memoryview, control: Control) -> int:
        """Receives at least one byte; returns how many."""
        spin_policy = self._spin_policy
        try:
            began = now = time.monotonic()
            while now - began < spin_policy.spin_s:
                try:
                    number = connection.recv_into(room)
                except BlockingIOError:
                    os.sched_yield()
                    now = time.monotonic()
                    continue
                spin_policy.came()
                return self._not_ended(number)
            while True:
                self._wait(connection, select.POLLIN, control)
                spin_policy.slept(time.monotonic() - now)
                try:
                    return self._not_ended(connection.recv_into(room))
                except BlockingIOError:
                    now = time.monotonic()  # a spurious wakeup
        except OSError as exc:
            raise TransportPeerLost(self._peer, exc.strerror or str(exc)) from exc

    def _not_ended(self, number: int) -> int:
        if not number:
            raise TransportPeerLost(self._peer, "it closed the connection")
        return number

    def _wait(self, connection: StreamSocket, mask: int, control: Control) -> None:
        """Waits until the socket is ready."""
        if mask == select.POLLIN and has_buffered(connection):
            return
        wakeup_fd = control.wakeup_fd
        poller = self._pollers.get({connection.fileno(): mask}, wakeup_fd)
        while True:
            ready = poller.poll(1000 * CHECK_INTERVAL_S)
            control.check()
            if any(descriptor != wakeup_fd for descriptor, _ in ready):
                return
            if control.deadline.expired():
                raise TransportTimeout(frozenset([self._peer]))
