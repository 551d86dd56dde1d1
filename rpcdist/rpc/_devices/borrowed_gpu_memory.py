"""Memory of GPUs that other processes of this host lend: what a message brings is copied into tensors of this process.

The copy waits for the lender's event in the current stream of the thread that decodes, and nobody waits on the host. An
allocation, and an event, is opened once and stays open for a while: opening takes 300 us, and 220 us. The lender hears
that the copy is done with the next message to it, or with the next tick.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._devices.cuda_memory import GpuEvent, GpuMemory, GpuUnavailable
from rpcdist.rpc._devices.lent_gpu_memory import LentGpuMemory
from rpcdist.time_limits import GPU_MEMORY_IDLE_S


@dataclass(slots=True, eq=False)
class _Opened:
    """An allocation of another process."""

    lender: int
    device: int
    address: int
    size: int
    events: dict[bytes, GpuEvent] = field(default_factory=dict)
    num_pending: int = 0  # copies of it that may not be done
    used: float = 0.0


@dataclass(slots=True, eq=False)
class _Copied:
    """A loan that is being copied, or was."""

    number: int
    events: Sequence[GpuEvent]
    opened: _Opened | None


class BorrowedGpuMemory:
    """One per agent. Any thread may use it.

    Args:
        memory: CUDA; called when memory is borrowed first.
        lent: that of this process, whose own loans come back where a worker calls itself, or another of its process.
        now: the monotonic clock.

    Attributes:
        copied_from: by lender, the loans of which it may have to hear that they were copied; nearly always empty.
    """

    def __init__(
        self,
        memory: Callable[[], GpuMemory],
        lent: Callable[[], LentGpuMemory | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._lent = lent
        self._now = now
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, bytes], _Opened] = {}  # by lender and handle
        self.copied_from: defaultdict[int, list[_Copied]] = defaultdict(list)  # by lender
        self._indices: dict[bytes, int] = {}  # of devices, by UUID

    def __repr__(self) -> str:
        return f"<BorrowedGpuMemory [{len(self._opened)} allocations open]>"

    def device_of(self, loan: value_pb2.GpuLoan) -> int:
        """The index that the device of a loan has here. Raises `SerializationError`."""
        index = self._index_of(loan.gpu)
        if index is None:
            raise SerializationError("a tensor lies on a GPU that this process does not see")
        return index

    def _index_of(self, uuid: bytes) -> int | None:
        if not self._indices:
            memory = self._memory()
            self._indices = {memory.uuid(index): index for index in range(torch.cuda.device_count())}
        return self._indices.get(uuid)

    def probe(self, loan: value_pb2.GpuLoan, lender: int) -> str:
        """Whether memory that a worker lends can be read here: empty, or why not. The loan is not copied."""
        try:
            index = self._index_of(loan.gpu)
            if index is None:
                return "its GPU is not among those that this process sees"
            self._event(self._open(loan, index, lender), loan, index)
        except GpuUnavailable as exc:
            return str(exc)
        finally:
            self.discard([loan], lender)
        return ""

    def copy(self, loan: value_pb2.GpuLoan, lender: int, offset: int, size: int, device: int) -> torch.Tensor:
        """A copy of a part of a loan, in the current stream of a device; `copied` must follow.

        Raises:
            SerializationError: the loan is damaged or cannot be read here, or there is no memory for the copy.
        """
        memory = self._memory()
        home = self.device_of(loan)
        try:
            opened = self._open(loan, home, lender)
            event = self._event(opened, loan, home)
        except GpuUnavailable as exc:
            raise SerializationError(f"a tensor that lies in memory of another process cannot be read: {exc}") from exc
        start = loan.offset + offset
        if offset + size > loan.size or start + size > opened.size:
            raise SerializationError(f"a tensor arrived that is said to lie beyond the {opened.size} bytes of its loan")
        target = new_memory(size, device)
        memory.wait(device, event)
        memory.copy(device, target.data_ptr(), opened.address + start, size)
        return target

    def copied(self, loans: Sequence[value_pb2.GpuLoan], lender: int, devices: Iterable[int]) -> None:
        """Everything that is wanted of these loans was copied in the current streams of these devices, or will be."""
        memory = self._memory()
        events = [memory.record(device) for device in devices]
        with self._lock:
            for loan in loans:
                opened = self._opened.get((lender, loan.memory))
                if opened is not None:
                    opened.num_pending += 1
                self.copied_from[lender].append(_Copied(loan.number, events, opened))

    def discard(self, loans: Sequence[value_pb2.GpuLoan], lender: int) -> None:
        """Nothing of these loans is wanted, or nothing was copied."""
        with self._lock:
            self.copied_from[lender] += [_Copied(loan.number, (), None) for loan in loans]

    def release(self, lender: int) -> rpc_pb2.Message | None:
        """What a lender has to hear: which of its loans are copied. Taken out; None if there is nothing."""
        if lender not in self.copied_from:
            return None
        with self._lock:
            pending = self.copied_from.pop(lender, [])
            done: list[_Copied] = []
            left: list[_Copied] = []
            for each in pending:
                (done if all([event.query() for event in each.events]) else left).append(each)
            if left:
                self.copied_from[lender] = left
            for each in done:
                if each.opened is not None:
                    each.opened.num_pending -= 1
        if not done:
            return None
        return rpc_pb2.Message(gpu_release=rpc_pb2.GpuRelease(numbers=[each.number for each in done]))

    def tick(self) -> dict[int, rpc_pb2.Message]:
        """What lenders have to hear by now, with the allocations that were closed because nobody used them."""
        if not self._opened and not self.copied_from:
            return {}
        news = {lender: message for lender in list(self.copied_from) if (message := self.release(lender)) is not None}
        now = self._now()
        with self._lock:
            idle = [
                key
                for key, opened in self._opened.items()
                if not opened.num_pending and now - opened.used > GPU_MEMORY_IDLE_S
            ]
            closing = [(*key, self._opened.pop(key)) for key in idle]
        for lender, handle, opened in closing:
            self._close(opened)
            message = news.setdefault(lender, rpc_pb2.Message(gpu_release=rpc_pb2.GpuRelease()))
            message.gpu_release.closed.append(handle)
        return news

    def on_gone(self, lender: int) -> None:
        """The process of a worker has ended: its memory is closed. Copies that have begun are not disturbed."""
        with self._lock:
            self.copied_from.pop(lender, None)
            closing = [self._opened.pop(key) for key in list(self._opened) if key[0] == lender]
        for opened in closing:
            self._close(opened)

    def close(self) -> None:
        """Closes everything."""
        for lender in {lender for lender, _ in list(self._opened)} | set(self.copied_from):
            self.on_gone(lender)

    def _open(self, loan: value_pb2.GpuLoan, device: int, lender: int) -> _Opened:
        key = lender, loan.memory
        with self._lock:  # two threads must not open one allocation
            opened = self._opened.get(key)
            if opened is None:
                lent = self._lent()
                own = None if lent is None else lent.own_address(loan.memory)
                address, size = self._memory().open(device, loan.memory) if own is None else own
                opened = _Opened(lender, -1 if own else device, address, size)
                self._opened[key] = opened
            opened.used = self._now()
            return opened

    def _event(self, opened: _Opened, loan: value_pb2.GpuLoan, device: int) -> GpuEvent:
        event = opened.events.get(loan.event)
        if event is None and opened.device < 0 and (lent := self._lent()) is not None:
            event = lent.own_event(loan.event)
        if event is None:
            event = self._memory().open_event(device, loan.event)
        opened.events[loan.event] = event
        return event

    def _close(self, opened: _Opened) -> None:
        opened.events.clear()
        if opened.device >= 0:
            self._memory().close(opened.device, opened.address)


def new_memory(size: int, device: int) -> torch.Tensor:
    """Memory of torch's allocator on a device. Raises `SerializationError`, with the bytes that are free."""
    place = torch.device("cuda", device)
    try:
        return torch.empty(size, dtype=torch.uint8, device=place)
    except torch.OutOfMemoryError as exc:
        free, total = torch.cuda.mem_get_info(place)
        raise SerializationError(
            f"a tensor of {size} bytes arrived for {place}, where {free} of {total} bytes are free"
        ) from exc
