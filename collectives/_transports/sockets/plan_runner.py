"""Runs one plan: round by round, all messages of a round at once, on the caller's thread."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from rpcdist.collectives._algorithms import Plan, ReceiveStep, Region, SendStep
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel
from rpcdist.collectives._transports.base import Control, TransportTimeout
from rpcdist.collectives._transports.sockets.connections import Links
from rpcdist.collectives._transports.sockets.framing import OperationFrame
from rpcdist.collectives._transports.sockets.pollers import Pollers
from rpcdist.collectives._transports.sockets.spin_policy import SpinPolicy
from rpcdist.collectives._transports.sockets.tensor_memory import Buffer, Scratch, memory_of
from rpcdist.collectives._transports.sockets.transfers import Receiving, Reduction, Sending, Transfer, piece_bytes
from rpcdist.time_limits import CHECK_INTERVAL_MS

__all__ = ["PlanRunner"]

_LANDING_SLOT: Final = -1
_NO_BYTES: Final = memoryview(b"")


class PlanRunner:
    """Runs the plan of one operation.

    Args:
        rank: this process's rank in the group.
        links: connections of the group.
        control: of the operation.
        frame: makes the headers.
        buffers: what the plan's regions are in.
        reducer: for plans that reduce.
        finish: makes a region final, given it in the reducer's dtype; None when there is nothing to do.
        scratch: memory for what arrives to be reduced.
        pollers: those of the transport.
        spin_policy: how long the transport spins.
    """

    def __init__(
        self,
        rank: int,
        links: Links,
        control: Control,
        frame: OperationFrame,
        buffers: Sequence[Buffer],
        reducer: ReduceKernel | None,
        finish: Callable[[torch.Tensor], object] | None,
        scratch: Scratch,
        pollers: Pollers,
        spin_policy: SpinPolicy,
    ) -> None:
        self._rank = rank
        self._links = links
        self._control = control
        self._frame = frame
        self._buffers = buffers
        self._reducer = reducer
        self._finish = finish
        self._scratch = scratch
        self._pollers = pollers
        self._spin_policy = spin_policy

    def run(self, plan: Plan) -> None:
        """Runs all rounds; raises like `Transport.run`."""
        for number, round_ in enumerate(plan):
            pending: list[Transfer] = []
            for send in round_.sends:
                # At once: while it travels, this rank gets ready to receive.
                pending += [sending for sending in self._sending(number, send) if not self._advance(sending)]
            receiving = [part for receive in round_.receives for part in self._receiving(number, receive, round_.final)]
            self._move([*pending, *receiving])
            for transfer in receiving:
                transfer.complete()

    # ------------------------------------------------------------ from steps to messages

    def _sending(self, number: int, step: SendStep) -> Iterator[Sending]:
        payload = self._buffers[step.region.buffer].bytes_of(step.region) if step.region.count else _NO_BYTES
        for channel, (start, stop) in enumerate(self._links.stripes(step.peer, len(payload))):
            yield Sending(step.peer, channel, self._frame.header(number, stop - start), payload[start:stop])

    def _receiving(self, number: int, step: ReceiveStep, final: Region | None) -> Iterator[Receiving]:
        region = step.region
        payload = self._buffers[region.buffer].bytes_of(region) if region.count else _NO_BYTES
        for channel, (start, stop) in enumerate(self._links.stripes(step.peer, len(payload))):
            expected = self._frame.header(number, stop - start)
            part, reduction = payload[start:stop], None
            if step.operand is not None and region.count:
                reduction = self._reduction(step, channel, start, stop, region == final)
                part = reduction.memory
            yield Receiving(step.peer, channel, self._frame, expected, part, stop - start, reduction)

    def _reduction(self, step: ReceiveStep, channel: int, start: int, stop: int, final: bool) -> Reduction:
        """What to do with bytes `start` to `stop` of a message."""
        assert self._reducer is not None and step.operand is not None
        operand = self._buffers[step.operand.buffer].numbers(step.operand, start, stop)
        buffer = self._buffers[step.region.buffer]
        target = buffer.numbers(step.region, start, stop)
        if target.data_ptr() != operand.data_ptr():
            landing, memory = target, buffer.bytes_of(step.region)[start:stop]
        else:
            size = target.nbytes if step.late else min(target.nbytes, piece_bytes(target.element_size()))
            landing = self._scratch.get(_LANDING_SLOT - channel, size // target.element_size(), target.dtype)
            memory = memory_of(landing)
        return Reduction(
            self._reducer.combine, target, operand, landing, memory, step.peer < self._rank, step.late,
            self._finish if final else None,
        )  # fmt: skip

    # ------------------------------------------------------------ moving them

    def _move(self, transfers: list[Transfer]) -> None:
        spin_policy = self._spin_policy
        pending = self._rest(transfers)
        while pending:
            for _ in range(spin_policy.looks):
                os.sched_yield()
                pending = self._rest(before := pending)
                if len(pending) < len(before):
                    spin_policy.came()
                    break
            else:
                began = time.monotonic()
                self._wait(pending)
                spin_policy.slept(time.monotonic() - began)
                pending = self._rest(pending)

    def _rest(self, transfers: list[Transfer]) -> list[Transfer]:
        """Moves what can be moved now; those that are not done."""
        return [transfer for transfer in transfers if not self._advance(transfer)]

    def _advance(self, transfer: Transfer) -> bool:
        if transfer.link is None:
            transfer.link = self._links.get(transfer.peer, transfer.channel, self._control)
            if transfer.link is None:
                return False
        return transfer.advance()

    def _wait(self, pending: list[Transfer]) -> None:
        """Waits until one of them can go on."""
        masks: dict[int, int] = {}
        for transfer in pending:
            if transfer.link is None:
                masks[self._links.wakeup_fd] = select.POLLIN
            else:
                descriptor = transfer.link.fileno()
                masks[descriptor] = masks.get(descriptor, 0) | (select.POLLOUT if transfer.is_send else select.POLLIN)
        wakeup_fd = self._control.wakeup_fd
        poller = self._pollers.get(masks, wakeup_fd)
        while True:
            ready = poller.poll(CHECK_INTERVAL_MS)
            self._control.check()
            if any(descriptor != wakeup_fd for descriptor, _ in ready):
                break
            if self._control.deadline.expired():
                raise TransportTimeout(frozenset(transfer.peer for transfer in pending))
        if any(descriptor == self._links.wakeup_fd for descriptor, _ in ready):
            self._links.drain_wakeups()
