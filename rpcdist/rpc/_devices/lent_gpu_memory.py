"""GPU memory that this process lends: tensors are copied into it, and it is kept until its receiver has copied it.

The copy is made in the current stream of the sending thread, so a tensor may change, or be freed, as soon as the call
was made. It works for tensors of every allocator.
    idle -> lent      `lend`: the bytes are copied into a slot, and then a number is written at its beginning
    lent -> idle      `release`: the receiver copies them, or has; the next copy into the slot waits, on the device, for
                      the number that the receiver's stream writes afterwards
    lent -> doubtful  `doubt`: the message with the loan may not have arrived, or its connection has ended
    doubtful -> idle  `release`, or `clean` after `GPU_LOAN_DOUBT_S`: a receiver that was about to copy has done so

A slot is a part of an allocation, or a whole one. A slot that is idle is used again for loans of its size. An
allocation of idle slots is freed after a while, when all processes that had opened it have closed it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rpcdist._proto import value_pb2
from rpcdist.deadline import Deadline
from rpcdist.ids import Identity
from rpcdist.rpc._devices.cuda_memory import CudaMemory, is_reached
from rpcdist.time_limits import GPU_LOAN_DOUBT_S, GPU_WAIT_LIMIT_S, IDLE_LIMIT_S, POLL_S

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES: Final = 512
"""Alignment of each part of a loan. The first part has the lender's number, and the receiver's at `COPIED_AT`."""

COPIED_AT: Final = 128

SHARED_ALLOCATION_BYTES: Final = 32 << 20
"""Slots of up to an eighth of this are parts of allocations of this size; larger ones have their own."""

MAX_PART_BYTES: Final = SHARED_ALLOCATION_BYTES // 8

MOST_OF_DEVICE: Final = 8
"""At most an eighth of a device's memory is lent or kept for loans; other tensors travel through host memory. At most
another eighth is for tensors that have arrived through host memory, and are not decoded."""


@dataclass(slots=True, eq=False)
class _Allocation:
    device: int
    address: int
    size: int
    handle: bytes
    made: float
    slots: list[_LoanSlot] = field(default_factory=list)
    filled: int = 0  # by slots
    readers: dict[Identity, int] = field(default_factory=dict)  # that may have opened it, and their last loans


@dataclass(slots=True, eq=False)
class _LoanSlot:
    allocation: _Allocation
    offset: int
    size: int
    sequence: int = 0  # of the last loan
    copied_by: Identity | None = None  # the receiver of the last loan, if its stream says when it has copied it
    # The last number of each earlier receiver for which a stream of this worker waits, or has waited; and since when.
    awaited: dict[Identity, tuple[int, float]] = field(default_factory=dict)
    idle_since: float = 0.0
    lent_to: Identity | None = None  # while it is not idle
    doubtful_since: float | None = None

    @property
    def address(self) -> int:
        return self.allocation.address + self.offset


class LentGpuMemory:
    """The lent memory of a process, which its agents share; `now` is the monotonic clock. Thread-safe.

    Functions of CUDA that may wait for a device are called with `_calls`, and never with `_lock`, which the I/O loop
    takes.
    """

    def __init__(self, memory: CudaMemory, now: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._now = now
        self._calls = threading.Lock()
        self._lock = threading.Lock()
        self._idle: defaultdict[tuple[int, int], list[_LoanSlot]] = defaultdict(list)  # by device and size
        self._allocations: dict[bytes, _Allocation] = {}
        self._lent: dict[int, _LoanSlot] = {}  # by number
        self._next_number = secrets.randbits(62)  # so a report to an earlier process names no loan of this one
        self._overdue: set[Identity] = set()  # receivers whose numbers did not come
        self._uuids: dict[int, bytes] = {}

    @property
    def num_loans(self) -> int:
        return len(self._lent)

    def kept_bytes(self, device: int | None = None) -> int:
        """The size of all allocations, on one device or on all of them."""
        kept = list(self._allocations.values())
        return sum(each.size for each in kept if device is None or each.device == device)

    def lend(
        self, to: Identity, device: int, spans: Sequence[tuple[int, int]]
    ) -> tuple[value_pb2.GpuLoan, list[int]] | None:
        """Copies memory of a device, and lends the copy to a worker.

        Args:
            spans: address and size of each part.

        Returns:
            The loan, and where each of the spans begins in it; None if there is no memory for it, or if the worker did
            not write that it had copied an earlier loan.
        """
        offsets: list[int] = []
        size = ALIGNMENT_BYTES
        for _, span_size in spans:
            offsets.append(size)
            size += -(-span_size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while True:
            with self._lock:
                if to in self._overdue:
                    return None
                slot = self._take_slot(device, slot_size(size))
                if slot is not None:
                    number = self._next_number
                    self._next_number += 1
                    self._lent[number] = slot
                    slot.lent_to, slot.doubtful_since = to, None
                    slot.allocation.readers[to] = number
                    before, copied_by = slot.sequence, slot.copied_by
                    slot.sequence, slot.copied_by = before + 1 & 0xFFFFFFFF, None
                    if copied_by is not None:
                        slot.awaited[copied_by] = before, self._now()
                    break
            if not self._allocate(device, slot_size(size)):  # another thread may take it
                return None
        try:
            start = slot.address
            if copied_by is not None:
                self._memory.wait(device, start + COPIED_AT, before, device)
            for (address, span_size), offset in zip(spans, offsets, strict=True):
                self._memory.copy(device, start + offset, address, span_size)
            self._memory.write(device, start, slot.sequence, (device,))
            if (uuid := self._uuids.get(device)) is None:
                uuid = self._uuids[device] = self._memory.uuid(device)
        except BaseException:
            self.doubt([number])  # the copy may be on its way
            raise
        loan = value_pb2.GpuLoan(
            number=number,
            memory=slot.allocation.handle,
            sequence=slot.sequence,
            offset=slot.offset,
            size=size,
            gpu=uuid,
        )
        return loan, offsets

    def own_address(self, handle: bytes) -> tuple[int, int] | None:
        """Address and size of an allocation of this process, which cannot open it like those of others."""
        allocation = self._allocations.get(handle)
        return None if allocation is None else (allocation.address, allocation.size)

    def release(
        self, copied: Iterable[int], unwanted: Iterable[int], sender: Identity, closed: Iterable[int] = ()
    ) -> None:
        """Ends loans that a worker no longer needs; numbers of loans to other workers are ignored.

        Args:
            copied: the loans that it is copying: its stream writes a number afterwards.
            unwanted: the loans that it does not copy.
            closed: its last loans in allocations that it has closed, or has not opened.
        """
        with self._lock:
            for numbers, copied_by in ((copied, sender), (unwanted, None)):
                for number in numbers:
                    slot = self._lent.get(number)
                    if slot is not None and slot.lent_to == sender:
                        slot.copied_by = None if sender in self._overdue else copied_by
                        self._end(number)
            if last := set(closed):
                for allocation in self._allocations.values():
                    if allocation.readers.get(sender) in last:  # otherwise it will open it again, or has
                        del allocation.readers[sender]

    def doubt(self, numbers: Iterable[int]) -> None:
        """Records that these loans may not arrive."""
        with self._lock:
            for number in numbers:
                slot = self._lent.get(number)
                if slot is not None and slot.doubtful_since is None:
                    slot.doubtful_since = self._now()

    def on_broken(self, to: Identity) -> None:
        """Handles the end of a connection with a worker. Loans that it has not read stay for a while."""
        self.doubt([number for number, slot in list(self._lent.items()) if slot.lent_to == to])

    def on_gone(self, to: Identity) -> None:
        """Handles the end of a process: nothing is open there, and it reports no more copies. May take long."""
        self.on_broken(to)
        with self._calls:
            with self._lock:
                self._overdue.discard(to)
                for allocation in self._allocations.values():
                    allocation.readers.pop(to, None)
                for slot in self._slots():
                    if slot.lent_to == to:
                        slot.lent_to = None  # a report that is handled later would name a number that never comes
            self._end_waits(to)

    def _slots(self) -> list[_LoanSlot]:
        """With one of the locks."""
        return [slot for allocation in list(self._allocations.values()) for slot in list(allocation.slots)]

    def _is_copied(self, slot: _LoanSlot, number: int) -> bool:
        return is_reached(self._memory, slot.allocation.device, slot.address + COPIED_AT, number)

    def _end_waits(self, receiver: Identity) -> None:
        """Writes the numbers that a receiver has not written. With `_calls`."""
        for slot in self._slots():
            with self._lock:
                number = slot.sequence if slot.copied_by == receiver else slot.awaited.get(receiver, (None,))[0]
            if number is not None and not self._is_copied(slot, number):
                self._memory.force(slot.allocation.device, slot.address + COPIED_AT, number)

    def _end_old_waits(self, now: float) -> None:
        """Ends waits of this worker's streams that have lasted too long. With `_calls`."""
        with self._lock:
            old = [
                (slot, receiver, slot.awaited.pop(receiver)[0])
                for slot in self._slots()
                for receiver, (_, since) in list(slot.awaited.items())
                if now - since > GPU_WAIT_LIMIT_S
            ]
        for slot, receiver, number in old:
            if self._is_copied(slot, number):
                continue
            self._memory.force(slot.allocation.device, slot.address + COPIED_AT, number)
            self._end_waits(receiver)
            with self._lock:
                is_new = receiver not in self._overdue
                self._overdue.add(receiver)
            if is_new:
                logger.error(
                    "worker %r has not copied GPU memory that was lent to it within %g s: the content of tensors that "
                    "it received is undefined, and no more memory is lent to it",
                    receiver.name,
                    GPU_WAIT_LIMIT_S,
                )

    def settle(self, deadline: Deadline) -> None:
        """Waits until all loans are written, and copied if their receivers copy them, or until the deadline."""
        while True:
            with self._calls:
                if all(self._is_settled(slot) for slot in self._slots()) or deadline.expired():
                    return
            time.sleep(POLL_S)

    def _is_settled(self, slot: _LoanSlot) -> bool:
        number = slot.sequence
        return is_reached(self._memory, slot.allocation.device, slot.address, number) and (
            slot.copied_by is None or self._is_copied(slot, number)
        )

    def clean(self) -> None:
        """Ends old doubts, and frees memory that was not used for a while. May wait until a device is idle."""
        if not self._lent and not self._allocations:
            return
        now = self._now()
        with self._calls:
            self._end_old_waits(now)
            with self._lock:
                for number, slot in list(self._lent.items()):
                    if slot.doubtful_since is not None and now - slot.doubtful_since > GPU_LOAN_DOUBT_S:
                        self._end(number)
                busy = {slot.allocation.handle for slot in self._lent.values()}
                unused = [
                    each
                    for each in self._allocations.values()
                    if not each.readers
                    and each.handle not in busy
                    and all(
                        now - since > IDLE_LIMIT_S for since in (each.made, *(one.idle_since for one in each.slots))
                    )
                ]
                for allocation in unused:
                    del self._allocations[allocation.handle]
                    for slot in allocation.slots:
                        self._idle[allocation.device, slot.size].remove(slot)
            for allocation in unused:
                self._memory.free(allocation.device, allocation.address)

    def _end(self, number: int) -> None:
        slot = self._lent.pop(number)
        slot.lent_to, slot.idle_since = None, self._now()
        self._idle[slot.allocation.device, slot.size].append(slot)

    def _take_slot(self, device: int, size: int) -> _LoanSlot | None:
        """With the lock."""
        if idle := self._idle[device, size]:
            return idle.pop()
        wanted = SHARED_ALLOCATION_BYTES if size <= MAX_PART_BYTES else size
        for allocation in self._allocations.values():
            if allocation.device == device and allocation.size == wanted >= allocation.filled + size:
                slot = _LoanSlot(allocation, allocation.filled, size)
                allocation.slots.append(slot)
                allocation.filled += size
                return slot
        return None

    def _allocate(self, device: int, size: int) -> bool:
        """Allocates memory for a slot; False if there is too little."""
        size = SHARED_ALLOCATION_BYTES if size <= MAX_PART_BYTES else size
        with self._calls:
            if self.kept_bytes(device) + size > self._memory.total_bytes(device) // MOST_OF_DEVICE:
                return False
            try:
                address = self._memory.allocate(device, size)
            except MemoryError:
                return False
            try:
                handle = self._memory.handle(device, address)
            except BaseException:
                self._memory.free(device, address)
                raise
            with self._lock:
                self._allocations[handle] = _Allocation(device, address, size, handle, self._now())
        return True


def slot_size(size: int) -> int:
    """The size of a loan's slot: at most an eighth more, so that loans of similar sizes use the same slots."""
    step = max(ALIGNMENT_BYTES, 1 << max(0, size.bit_length() - 4))
    return max(1, -(-size // step)) * step
