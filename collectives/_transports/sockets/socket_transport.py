"""`SocketTransport`: the collective operations of a group over sockets.

Small all_reduces of two ranks follow the plan `doubling_all_reduce` without a `PlanRunner`: each rank
makes one system call per message, since header and numbers are adjacent in memory that is reused by the next operation.
The bytes on the wire are the same, so the other rank may run the plan.
"""

from __future__ import annotations

import os
import select
import time
import zlib
from collections.abc import Callable
from typing import Final

import torch

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.dense import copy_bytes, memory_of
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp, by_kind
from rpcdist.collectives._operations.reduce_kernels import reducer
from rpcdist.collectives._transports.sockets.pair_connections import HEADER_BYTES, OperationFrame, PairConnections
from rpcdist.collectives._transports.sockets.plan_runner import PlanBuffer, PlanRunner, Scratch
from rpcdist.collectives._transports.sockets.plans import plan_for
from rpcdist.collectives._transports.transport_base import (
    Control,
    Pollers,
    SpinPolicy,
    Transport,
    TransportPeerLost,
    TransportTimeout,
    ranks_here,
)
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, has_buffered

SMALL_BYTES: Final = 4 << 10
_START: Final = 64 - HEADER_BYTES  # makes the numbers start at a multiple of 64
_MAX_MESSAGES: Final = 64
_ALL_REDUCE: Final = Kind.ALL_REDUCE
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM


class _MessageBuffers:
    """Memory for messages of one dtype and length, with views of it, and the kernel that reduces the numbers."""

    __slots__ = ("_boxes", "inbox", "kernel", "num_bytes", "outbox", "received", "target")

    def __init__(self, op: ReduceOp, tensor: torch.Tensor) -> None:
        self.kernel = reducer(op, tensor.dtype)
        self.num_bytes = tensor.nbytes
        boxes = [torch.empty(64 + tensor.nbytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._boxes = boxes  # keeps the memory of the views alive
        self.inbox, self.outbox = (memory_of(box)[_START:] for box in boxes)
        self.received = boxes[0][64:].view(self.kernel.dtype)
        self.target = boxes[1].data_ptr() + 64


_INPUT_SLOT, _RESULT_SLOT, _SECOND_SLOT = 0, 1, 2


class SocketTransport(Transport):
    """Runs a plan for each operation of two or more ranks, which connect when one first needs the connection."""

    def __init__(self, connections: PairConnections) -> None:
        self.rank = connections.rank
        self.size = len(connections.addresses)
        self._connections = connections
        self._scratch = Scratch()
        self._pollers = Pollers()
        self._spin_policy = SpinPolicy(ranks_here(self.rank, connections.addresses))
        self._peer = 1 - self.rank if self.size == 2 else -1
        self._messages: dict[tuple[int, torch.dtype, int], _MessageBuffers] = {}
        self._buffers: dict[Kind, Callable[[Operation], list[torch.Tensor]]] = by_kind(self, "_for_")

    def run(self, operation: Operation, control: Control) -> None:
        if self._is_small_exchange(operation):
            self._exchange(operation, control)
            return
        op, dtype = operation.reduce_op, operation.dtype
        reducer = None if op is None or dtype is None else reduce_kernels.reducer(op, dtype)
        tensors = self._buffers[operation.kind](operation)
        counts, received = self._counts(operation)
        plan = plan_for(
            operation.kind, self.rank, self.size, operation.root, counts,
            1 if dtype is None else dtype.itemsize, received,
        )  # fmt: skip
        detail = zlib.crc32(repr(counts).encode()) if operation.kind is Kind.REDUCE_SCATTER else 0
        frame = OperationFrame(self.rank, control.fingerprint, control.sequence, detail)
        finish = None
        if reducer is not None and reducer.finish is not None:
            make_final = reducer.finish

            def finish(tensor: torch.Tensor) -> object:
                return make_final(tensor, self.size)

        buffers = [PlanBuffer(tensor, reducer) for tensor in tensors]
        PlanRunner(
            self.rank, self._connections, control, frame, buffers, reducer, finish, self._scratch, self._pollers,
            self._spin_policy,
        ).run(plan)  # fmt: skip

    def close(self) -> None:
        self._connections.close()
        self._scratch.clear()
        self._messages.clear()

    def _counts(self, operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kind = operation.kind
        inputs, outputs = ([tensor.numel() for tensor in each] for each in (operation.inputs, operation.outputs))
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            return (inputs[0],) * self.size, ()
        if kind is Kind.SCATTER:
            return (outputs[0],) * self.size, ()
        if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
            return tuple(inputs), tuple(outputs if kind is Kind.ALL_TO_ALL else ())
        return tuple(outputs), ()

    # ------------------------------------------------------------ small all_reduces of two ranks

    def _is_small_exchange(self, operation: Operation) -> bool:
        """Whether it is a small all_reduce of two ranks, whose connection is open already."""
        if operation.kind is not _ALL_REDUCE or self._peer < 0 or operation.reduce_op is _PREMUL_SUM:
            return False
        tensor = operation.outputs[0]
        return (
            0 < tensor.nbytes <= SMALL_BYTES
            and self._connections.established(self._peer) is not None
            and not (tensor.requires_grad or tensor.is_inference())
        )

    def _exchange(self, operation: Operation, control: Control) -> None:
        tensor, connection = operation.outputs[0], self._connections.established(self._peer)
        assert connection is not None
        message = self._message(operation, tensor)
        frame = OperationFrame(self.rank, control.fingerprint, control.sequence, 0)
        header = frame.header(0, message.num_bytes)
        message.outbox[:HEADER_BYTES] = header
        copy_bytes(message.target, tensor.data_ptr(), message.num_bytes)
        self._send(connection, message.outbox, control)
        self._receive(connection, message.inbox, header, frame, control)
        kernel, received = message.kernel, message.received
        flat = tensor.view(-1).view(kernel.dtype)
        if self._peer < self.rank:
            kernel.combine(received, flat, out=flat)
        else:
            kernel.combine(flat, received, out=flat)
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

    def _send(self, connection: StreamSocket, data: memoryview, control: Control) -> None:
        while len(data):
            try:
                data = data[connection.send(data, NO_SIGPIPE) :]
            except BlockingIOError:
                self._wait_for(connection, select.POLLOUT, control)
            except OSError as exc:
                raise TransportPeerLost(self._peer, exc.strerror or str(exc)) from exc

    def _receive(
        self, connection: StreamSocket, room: memoryview, expected: bytes, frame: OperationFrame, control: Control
    ) -> None:
        """Fills `room`; compares the header as soon as it has arrived."""
        got, size = 0, len(room)
        while got < size:
            number = self._receive_some(connection, room[got:] if got else room, control)
            before, got = got, got + number
            if before < HEADER_BYTES <= got and room[:HEADER_BYTES] != expected:
                raise frame.mismatch(self._peer, expected, bytes(room[:HEADER_BYTES]))

    def _receive_some(self, connection: StreamSocket, room: memoryview, control: Control) -> int:
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
                spin_policy.spin_succeeded()
                return self._not_ended(number)
            while True:
                self._wait_for(connection, select.POLLIN, control)
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

    def _wait_for(self, connection: StreamSocket, mask: int, control: Control) -> None:
        if mask == select.POLLIN and has_buffered(connection):
            return
        if not self._pollers.wait({connection.fileno(): mask}, control):
            raise TransportTimeout(frozenset([self._peer]))

    # ------------------------------------------------------------ buffers, in the order that the plans name them

    def _for_all_reduce(self, operation: Operation) -> list[torch.Tensor]:
        reduce_kernels.premultiply_to(operation, operation.outputs[0], operation.outputs[0])
        return [operation.outputs[0]]

    def _for_reduce(self, operation: Operation) -> list[torch.Tensor]:
        tensor = operation.outputs[0]
        if self.rank == operation.root:
            reduce_kernels.premultiply_to(operation, tensor, tensor)
            return [tensor, tensor]
        result = self._scratch.get(_RESULT_SLOT, tensor.numel(), tensor.dtype)
        return [self._multiplied(operation, tensor), result]

    def _multiplied(self, operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy multiplied by this rank's factor."""
        if operation.reduce_op is not ReduceOp.PREMUL_SUM:
            return tensor
        product = self._scratch.get(_INPUT_SLOT, tensor.numel(), tensor.dtype).view(tensor.shape)
        reduce_kernels.premultiply_to(operation, tensor, product)
        return product

    def _for_broadcast(self, operation: Operation) -> list[torch.Tensor]:
        return [operation.outputs[0]]

    def _for_all_gather(self, operation: Operation) -> list[torch.Tensor]:
        _copy(operation.inputs[0], operation.outputs[self.rank])
        return list(operation.outputs)

    def _for_gather(self, operation: Operation) -> list[torch.Tensor]:
        if self.rank != operation.root:
            return [operation.inputs[0]] * self.size
        _copy(operation.inputs[0], operation.outputs[self.rank])
        return list(operation.outputs)

    def _for_scatter(self, operation: Operation) -> list[torch.Tensor]:
        if self.rank != operation.root:
            return [operation.outputs[0]] * self.size
        _copy(operation.inputs[self.rank], operation.outputs[0])
        return list(operation.inputs)

    def _for_reduce_scatter(self, operation: Operation) -> list[torch.Tensor]:
        inputs, output = operation.inputs, operation.outputs[0]
        if operation.reduce_op is ReduceOp.PREMUL_SUM:
            inputs = tuple(reduce_kernels.premultiplied(operation, tensor) for tensor in inputs)
        largest = max(tensor.numel() for tensor in inputs) if self.size > 2 else 0
        scratch = [self._scratch.get(slot, largest, output.dtype) for slot in (_RESULT_SLOT, _SECOND_SLOT)]
        return [*inputs, output, *scratch]

    def _for_all_to_all(self, operation: Operation) -> list[torch.Tensor]:
        _copy(operation.inputs[self.rank], operation.outputs[self.rank])
        return [*operation.inputs, *operation.outputs]

    def _for_barrier(self, operation: Operation) -> list[torch.Tensor]:
        return []


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor's bytes on this thread alone; does nothing if both are the same memory."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"a chunk of {source.nbytes} bytes does not fit one of {target.nbytes}")
    if source.data_ptr() != target.data_ptr():
        copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
