"""Small all_reduces of two ranks: what `doubling_all_reduce` plans, without the machinery that runs plans.

On the wire it is the same, byte for byte, so it does not matter whether the other rank takes this way. A message is one
system call at each end: header and numbers lie one after the other in memory that is kept for the next operation.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from typing import Final

import torch

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import reducer
from rpcdist.collectives._transports.base import Control, TransportPeerLost, TransportTimeout
from rpcdist.collectives._transports.sockets.connections import Links
from rpcdist.collectives._transports.sockets.framing import HEADER_BYTES, OperationFrame
from rpcdist.collectives._transports.sockets.pollers import Pollers
from rpcdist.collectives._transports.sockets.spin_policy import SpinPolicy
from rpcdist.collectives._transports.sockets.tensor_memory import memory_of
from rpcdist.time_limits import CHECK_INTERVAL_MS

__all__ = ["SMALL_BYTES", "SmallExchange"]

SMALL_BYTES: Final = 4 << 10
_START: Final = 64 - HEADER_BYTES  # so that the numbers start at a multiple of 64
_MAX_PROGRAMS: Final = 64
_ALL_REDUCE: Final = Kind.ALL_REDUCE
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM


class _Program:
    """Memory for tensors of one dtype and length, with views of it; and how to reduce them."""

    __slots__ = ("_boxes", "how", "inbox", "num_bytes", "outbox", "received", "target")

    def __init__(self, op: ReduceOp, tensor: torch.Tensor) -> None:
        self.how = reducer(op, tensor.dtype)
        self.num_bytes = tensor.nbytes
        boxes = [torch.empty(64 + tensor.nbytes, dtype=torch.uint8) for _ in range(2)]
        self._boxes = boxes  # the views do not keep the memory
        self.inbox, self.outbox = (memory_of(box)[_START:] for box in boxes)
        self.received = boxes[0][64:].view(self.how.dtype)
        self.target = boxes[1].data_ptr() + 64


class SmallExchange:
    """One rank's part.

    Args:
        rank: this process's rank in the group.
        size: number of ranks in the group; with more than two ranks it takes nothing.
        links: connections of the group.
        pollers: those of the transport.
        spin_policy: how long the transport spins.
    """

    def __init__(self, rank: int, size: int, links: Links, pollers: Pollers, spin_policy: SpinPolicy) -> None:
        self._rank = rank
        self._peer = 1 - rank if size == 2 else -1
        self._links = links
        self._pollers = pollers
        self._spin_policy = spin_policy
        self._programs: dict[tuple[int, torch.dtype, int], _Program] = {}

    def takes(self, operation: Operation) -> bool:
        """Whether it is one of these, and the connection stands already."""
        if operation.kind is not _ALL_REDUCE or self._peer < 0 or operation.reduce_op is _PREMUL_SUM:
            return False
        tensor = operation.outputs[0]
        return (
            0 < tensor.nbytes <= SMALL_BYTES
            and self._links.standing(self._peer) is not None
            and not (tensor.requires_grad or tensor.is_inference())
        )

    def run(self, operation: Operation, control: Control) -> None:
        """Raises like `Transport.run`."""
        tensor, link = operation.outputs[0], self._links.standing(self._peer)
        assert link is not None
        program = self._program(operation, tensor)
        frame = OperationFrame(self._rank, control.fingerprint, control.sequence, 0)
        header = frame.header(0, program.num_bytes)
        program.outbox[:HEADER_BYTES] = header
        ctypes.memmove(program.target, tensor.data_ptr(), program.num_bytes)
        self._send(link, program.outbox, control)
        self._receive(link, program.inbox, header, frame, control)
        how, received = program.how, program.received
        flat = tensor.view(-1).view(how.dtype)
        if self._peer < self._rank:
            how.combine(received, flat, flat)
        else:
            how.combine(flat, received, flat)
        if how.finish is not None:
            how.finish(flat, 2)

    def _program(self, operation: Operation, tensor: torch.Tensor) -> _Program:
        op = operation.reduce_op
        assert op is not None
        key = (id(op), tensor.dtype, tensor.numel())  # the members of an enum live for ever, and hash slowly
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = _Program(op, tensor)
        return program

    def clear(self) -> None:
        """Releases the memory."""
        self._programs.clear()

    # ------------------------------------------------------------ messages

    def _send(self, link: socket.socket, data: memoryview, control: Control) -> None:
        while len(data):
            try:
                data = data[link.send(data) :]
            except BlockingIOError:
                self._wait(link, select.POLLOUT, control)
            except OSError as exc:
                raise TransportPeerLost(self._peer, exc.strerror or str(exc)) from exc

    def _receive(
        self, link: socket.socket, room: memoryview, expected: bytes, frame: OperationFrame, control: Control
    ) -> None:
        """Fills `room`; its header is judged as soon as it is there."""
        got, size = 0, len(room)
        while got < size:
            number = self._look(link, room[got:] if got else room, control)
            before, got = got, got + number
            if before < HEADER_BYTES <= got and room[:HEADER_BYTES] != expected:
                raise frame.mismatch(self._peer, expected, bytes(room[:HEADER_BYTES]))

    def _look(self, link: socket.socket, room: memoryview, control: Control) -> int:
        """Receives something; how much."""
        spin_policy = self._spin_policy
        try:
            for _ in range(spin_policy.looks):
                try:
                    number = link.recv_into(room)
                except BlockingIOError:
                    os.sched_yield()
                    continue
                spin_policy.came()
                return self._some(number)
            while True:
                began = time.monotonic()
                self._wait(link, select.POLLIN, control)
                spin_policy.slept(time.monotonic() - began)
                try:
                    return self._some(link.recv_into(room))
                except BlockingIOError:
                    pass  # the kernel was wrong
        except OSError as exc:
            raise TransportPeerLost(self._peer, exc.strerror or str(exc)) from exc

    def _some(self, number: int) -> int:
        if not number:
            raise TransportPeerLost(self._peer, "it closed the connection")
        return number

    def _wait(self, link: socket.socket, mask: int, control: Control) -> None:
        """Until the socket is ready."""
        wakeup_fd = control.wakeup_fd
        poller = self._pollers.get({link.fileno(): mask}, wakeup_fd)
        while True:
            ready = poller.poll(CHECK_INTERVAL_MS)
            control.check()
            if any(descriptor != wakeup_fd for descriptor, _ in ready):
                return
            if control.deadline.expired():
                raise TransportTimeout(frozenset([self._peer]))
