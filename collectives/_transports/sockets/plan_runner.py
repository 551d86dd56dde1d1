"""Runs one plan on the caller's thread: the rounds in order, all messages of a round in parallel."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rpcdist.collectives._operations.dense import memory_of
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel
from rpcdist.collectives._transports.sockets.pair_connections import OperationFrame, PairConnections
from rpcdist.collectives._transports.sockets.plans import Plan, ReceiveStep, Region, SendStep
from rpcdist.collectives._transports.sockets.transfers import Receiving, Reduction, Sending, Transfer, slice_bytes
from rpcdist.collectives._transports.transport_base import Control, Pollers, SpinPolicy, TransportTimeout
from rpcdist.errors import TransportError
from rpcdist.own_shortage import own_shortage

_KEPT_BYTES: Final = 64 << 20


class PlanBuffer:
    """A dense tensor that a plan names by number."""

    __slots__ = ("_element_bytes", "_numbers", "_unit_bytes", "memory", "tensor")

    def __init__(self, tensor: torch.Tensor, reducer: ReduceKernel | None = None) -> None:
        self.tensor = tensor
        self.memory = memory_of(tensor)
        self._element_bytes = tensor.element_size()
        self._numbers = None if reducer is None else tensor.view(-1).view(reducer.dtype)
        self._unit_bytes = 1 if self._numbers is None else self._numbers.element_size()

    def bytes_of(self, region: Region) -> memoryview:
        return self.memory[region.start * self._element_bytes : region.stop * self._element_bytes]

    def numbers(self, region: Region, start: int, stop: int) -> torch.Tensor:
        """Returns bytes `start` to `stop` of a region, as numbers of the dtype in which they are reduced."""
        assert self._numbers is not None
        base = region.start * self._element_bytes
        return self._numbers[(base + start) // self._unit_bytes : (base + stop) // self._unit_bytes]


class Scratch:
    """Memory that is reused by later operations, since fresh pages are slow."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, slot: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of `count` elements in a slot of the caller's choice. Its content is undefined."""
        size_bytes = count * dtype.itemsize
        kept = self._kept.get(slot)
        if kept is None or kept.nbytes < size_bytes:
            kept = torch.empty(-(-size_bytes // 64) * 64, dtype=torch.uint8, device="cpu")
            if kept.nbytes <= _KEPT_BYTES:
                self._kept[slot] = kept
        return kept[:size_bytes].view(dtype)

    def clear(self) -> None:
        self._kept.clear()


_STAGING_SLOT: Final = -1
_NO_BYTES: Final = memoryview(b"")


@dataclass(slots=True)
class PlanRunner:
    """Runs the plan of one operation.

    Attributes:
        finish: finishes a reduced region, which it gets in the reducer's dtype, such as by dividing; may be None.
        scratch: memory for messages that are reduced as they arrive.
    """

    rank: int
    connections: PairConnections
    control: Control
    frame: OperationFrame
    buffers: Sequence[PlanBuffer]
    reducer: ReduceKernel | None
    finish: Callable[[torch.Tensor], object] | None
    scratch: Scratch
    pollers: Pollers
    spin_policy: SpinPolicy

    def run(self, plan: Plan) -> None:
        for number, round_ in enumerate(plan):
            pending: list[Transfer] = []
            for send in round_.sends:
                # Send first: this rank prepares its receives while the bytes travel.
                pending += [sending for sending in self._sending(number, send) if not self._advance(sending)]
            receiving = [part for receive in round_.receives for part in self._receiving(number, receive, round_.final)]
            self._finish_transfers([*pending, *receiving])
            for transfer in receiving:
                transfer.complete()

    # ------------------------------------------------------------ from steps to messages

    def _sending(self, number: int, step: SendStep) -> Iterator[Sending]:
        payload = self.buffers[step.region.buffer].bytes_of(step.region) if step.region.count else _NO_BYTES
        for channel, (start, stop) in enumerate(self.connections.stripes(step.peer, len(payload))):
            yield Sending(step.peer, channel, self.frame.header(number, stop - start), payload[start:stop])

    def _receiving(self, number: int, step: ReceiveStep, final: Region | None) -> Iterator[Receiving]:
        region = step.region
        payload = self.buffers[region.buffer].bytes_of(region) if region.count else _NO_BYTES
        for channel, (start, stop) in enumerate(self.connections.stripes(step.peer, len(payload))):
            expected = self.frame.header(number, stop - start)
            part, reduction = payload[start:stop], None
            if step.operand is not None and region.count:
                reduction = self._reduction(step, channel, start, stop, region == final)
                part = reduction.memory
            yield Receiving(step.peer, channel, self.frame, expected, part, stop - start, reduction)

    def _reduction(self, step: ReceiveStep, channel: int, start: int, stop: int, final: bool) -> Reduction:
        assert self.reducer is not None and step.operand is not None
        operand = self.buffers[step.operand.buffer].numbers(step.operand, start, stop)
        buffer = self.buffers[step.region.buffer]
        target = buffer.numbers(step.region, start, stop)
        size = slice_bytes(target.element_size())
        if target.data_ptr() != operand.data_ptr():
            staging, memory = target, buffer.bytes_of(step.region)[start:stop]
        else:
            length = target.nbytes if step.deferred else min(target.nbytes, size)
            staging = self.scratch.get(_STAGING_SLOT - channel, length // target.element_size(), target.dtype)
            memory = memory_of(staging)
        return Reduction(
            self.reducer.combine, target, operand, staging, memory, step.peer < self.rank, size,
            step.deferred, self.finish if final else None,
        )  # fmt: skip

    # ------------------------------------------------------------ transfers

    def _finish_transfers(self, transfers: list[Transfer]) -> None:
        spin_policy = self.spin_policy
        pending = self._unfinished(transfers)
        while pending:
            num_before = len(pending)
            began = now = time.monotonic()
            while len(pending) == num_before and now - began < spin_policy.spin_s:
                os.sched_yield()
                pending = self._unfinished(pending)
                now = time.monotonic()
            if len(pending) < num_before:
                spin_policy.spin_succeeded()
            else:
                self._wait(pending)
                spin_policy.slept(time.monotonic() - now)
                pending = self._unfinished(pending)

    def _unfinished(self, transfers: list[Transfer]) -> list[Transfer]:
        """Moves as many bytes as possible without waiting; returns the transfers that are not done."""
        return [transfer for transfer in transfers if not self._advance(transfer)]

    def _advance(self, transfer: Transfer) -> bool:
        if transfer.connection is None:
            transfer.connection = self.connections.get(transfer.peer, transfer.channel, self.control)
            if transfer.connection is None:
                return False
        return transfer.advance()

    def _wait(self, pending: list[Transfer]) -> None:
        if any(transfer.has_buffered for transfer in pending):
            return
        arrivals = self.connections.waker.fileno()
        masks: dict[int, int] = {}
        for transfer in pending:
            if transfer.connection is None:
                masks[arrivals] = select.POLLIN
            else:
                descriptor = transfer.connection.fileno()
                masks[descriptor] = masks.get(descriptor, 0) | (select.POLLOUT if transfer.is_send else select.POLLIN)
        ready = self.pollers.wait(masks, self.control)
        if not ready:
            self._check_own_shortage(pending)
            raise TransportTimeout(frozenset(transfer.peer for transfer in pending))
        if arrivals in ready:
            self.connections.waker.drain()

    def _check_own_shortage(self, pending: list[Transfer]) -> None:
        """Raises `TransportError` if lower ranks may have tried to connect while this process could not accept."""
        if any(transfer.connection is None for transfer in pending) and (shortage := own_shortage()) is not None:
            raise TransportError(f"no connection of a lower rank could be accepted: {shortage}")
