"""GPU memory that other processes of this host lend: the tensors of a message are copied into memory of this process.

In the current stream of the decoding thread, the copy waits for the lender's number, and then writes a number of its
own: no thread of the host waits. The next message to the lender, or the next tick, reports that the copy was enqueued.
An allocation is opened once, and stays open for a while.

If the lender is lost before it wrote its number, or does not write it for `GPU_WAIT_LIMIT_S`, the waiting streams
continue, and what they copy is undefined; the log says so.
"""

from __future__ import annotations

import logging
import threading
import time
from _thread import LockType
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._devices.cuda_memory import CudaMemory, GpuUnavailable, is_reached
from rpcdist.rpc._devices.lent_gpu_memory import ALIGNMENT_BYTES, COPIED_AT, LentGpuMemory
from rpcdist.time_limits import GPU_WAIT_LIMIT_S, IDLE_LIMIT_S, POLL_S

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenMemory:
    """An allocation of another process, or of this one.

    Attributes:
        last: the number of the last loan in it.
        num_users: the loans that threads are copying from it now.
        is_over: whether the last of these threads closes it.
        sequences: by offset, the last number that a stream of this process waits for, and since when. Numbers that are
            known to be written are left out.
    """

    device: int
    address: int
    size: int
    is_own: bool
    last: int = 0
    num_users: int = 0
    is_over: bool = False
    used: float = 0.0
    sequences: dict[int, tuple[int, float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Borrowed:
    """A loan that is being copied from the device `home` to `devices`."""

    loan: value_pb2.GpuLoan
    home: int
    opened: _OpenMemory
    address: int
    devices: list[int] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class BorrowedGpuMemory:
    """The borrowed memory of an agent. Thread-safe.

    Functions of CUDA that may wait for a device are called with `_calls`, and never with `_lock`, which the I/O loop
    takes.

    Args:
        memory: makes the interface to CUDA, when memory is first borrowed.
        lent: the memory that this process lends: its own loans come back if its workers call each other.
        now: the monotonic clock.

    Attributes:
        news: the pending report to each lender.
    """

    memory: Callable[[], CudaMemory]
    lent: Callable[[], LentGpuMemory]
    now: Callable[[], float] = time.monotonic
    _calls: LockType = field(default_factory=threading.Lock)
    _lock: LockType = field(default_factory=threading.Lock)
    _opened: dict[tuple[Identity, bytes], _OpenMemory] = field(default_factory=dict)  # by lender and handle
    news: dict[Identity, rpc_pb2.GpuRelease] = field(default_factory=dict)
    _indices: dict[bytes, int] = field(default_factory=dict)  # of devices, by UUID
    _overdue: set[Identity] = field(default_factory=set)  # lenders whose numbers did not come

    @property
    def is_used(self) -> bool:
        return bool(self._opened)

    def device_of(self, loan: value_pb2.GpuLoan) -> int:
        """The index of a loan's device in this process. Raises `SerializationError`."""
        if not self._indices:
            memory = self.memory()
            self._indices = {memory.uuid(index): index for index in range(torch.cuda.device_count())}
        if loan.gpu not in self._indices:
            raise SerializationError("a tensor lies on a GPU that this process does not see")
        return self._indices[loan.gpu]

    def probe(self, loan: value_pb2.GpuLoan, lender: Identity) -> str:
        """Opens a loan without copying it; returns why it cannot be read here, or an empty text."""
        try:
            begun = self.begin(loan, lender)
        except (GpuUnavailable, SerializationError) as exc:
            self.discard([loan], lender)
            return str(exc)
        self.finish(begun, lender)
        return ""

    def begin(self, loan: value_pb2.GpuLoan, lender: Identity) -> Borrowed:
        """Opens the memory of a loan; `finish` must follow. Raises `SerializationError`; then `discard` must follow."""
        home = self.device_of(loan)
        with self._calls:
            if lender in self._overdue:
                raise SerializationError(
                    f"worker {lender.name!r} has lent memory of a GPU that it did not write within "
                    f"{GPU_WAIT_LIMIT_S:g} s, and nothing more is borrowed from it; let it send CPU tensors, or "
                    "restart it"
                )
            try:
                opened = self._open(loan, home, lender)
            except GpuUnavailable as exc:
                raise SerializationError(f"a tensor in memory of another process cannot be read: {exc}") from exc
            if loan.offset % ALIGNMENT_BYTES or loan.offset + loan.size > opened.size or loan.size < ALIGNMENT_BYTES:
                raise SerializationError(f"a loan arrived that lies beyond the {opened.size} bytes of its memory")
            with self._lock:
                opened.last = max(opened.last, loan.number)
                opened.num_users += 1
            if not opened.is_own:
                opened.sequences[loan.offset] = loan.sequence, self.now()
            return Borrowed(loan, home, opened, opened.address + loan.offset)

    def copy(self, borrowed: Borrowed, offset: int, target: torch.Tensor, size: int) -> None:
        """Copies a part of a loan into a tensor, in the current stream of its device. Raises `SerializationError`."""
        loan, memory, device = borrowed.loan, self.memory(), target.get_device()
        if offset + size > loan.size:
            raise SerializationError(f"a tensor arrived that lies beyond the {loan.size} bytes of its loan")
        if device not in borrowed.devices:
            try:
                memory.wait(borrowed.home, borrowed.address, loan.sequence, device)
            except GpuUnavailable as exc:
                raise SerializationError(f"a tensor in memory of another process cannot be read: {exc}") from exc
            borrowed.devices.append(device)
        memory.copy(device, target.data_ptr(), borrowed.address + offset, size)

    def finish(self, borrowed: Borrowed, lender: Identity) -> None:
        """Reports that all needed parts of a loan are being copied."""
        try:
            if borrowed.devices:
                copied_at = borrowed.address + COPIED_AT
                self.memory().write(borrowed.home, copied_at, borrowed.loan.sequence, borrowed.devices)
        except (GpuUnavailable, RuntimeError) as exc:  # the sender reuses the memory when this process has ended
            logger.error("the sender of a tensor cannot be notified that it was copied: %s", exc)
        else:
            if borrowed.devices:
                with self._lock:
                    self._news_of(lender).copied.append(borrowed.loan.number)
            else:
                self.discard([borrowed.loan], lender)
        opened = borrowed.opened
        with self._lock:
            opened.num_users -= 1
            is_last = opened.is_over and not opened.num_users
        if is_last:
            self._close(opened)

    def discard(self, loans: Iterable[value_pb2.GpuLoan], lender: Identity) -> None:
        with self._lock:
            news = self._news_of(lender)
            for loan in loans:
                news.unwanted.append(loan.number)
                opened = self._opened.get((lender, loan.memory))
                if opened is None:  # the lender does not know whether this loan was opened
                    news.closed.append(loan.number)
                else:
                    opened.last = max(opened.last, loan.number)

    def _news_of(self, lender: Identity) -> rpc_pb2.GpuRelease:
        """With the lock."""
        news = self.news.get(lender)
        if news is None:
            news = self.news[lender] = rpc_pb2.GpuRelease()
        return news

    def release(self, lender: Identity) -> rpc_pb2.Message | None:
        """Removes and returns the report to a lender; None if there is none."""
        if lender not in self.news:
            return None
        with self._lock:
            news = self.news.pop(lender, None)
        return None if news is None else rpc_pb2.Message(gpu_release=news)

    def clean(self) -> None:
        """Closes allocations that were not used for a while. May take long."""
        now = self.now()
        closing: list[tuple[Identity, _OpenMemory]] = []
        with self._calls:  # no other thread closes them meanwhile
            for key, opened in list(self._opened.items()):
                is_idle = now - opened.used > IDLE_LIMIT_S
                if is_idle or any(now - since > GPU_WAIT_LIMIT_S for _, since in opened.sequences.values()):
                    self._end_waits(opened, key[0], now)
                with self._lock:
                    # Otherwise closing would wait as long as the stream.
                    if is_idle and not opened.sequences and not opened.num_users:
                        closing.append((key[0], self._opened.pop(key)))
        for lender, opened in closing:
            self._close(opened)
            with self._lock:
                self._news_of(lender).closed.append(opened.last)

    def _end_waits(self, opened: _OpenMemory, lender: Identity, now: float) -> None:
        """Forgets the numbers that are written, and ends the waits that have lasted too long. With `_calls`."""
        memory = self.memory()
        for offset, (sequence, since) in list(opened.sequences.items()):
            address = opened.address + offset
            if not is_reached(memory, opened.device, address, sequence):
                if now - since <= GPU_WAIT_LIMIT_S:
                    continue
                memory.force(opened.device, address, sequence)
                if lender not in self._overdue:
                    self._overdue.add(lender)
                    logger.error(
                        "worker %r has lent memory of a GPU, and has not written it within %g s: the content of "
                        "tensors that it sent is undefined, and no more memory is borrowed from it",
                        lender.name,
                        GPU_WAIT_LIMIT_S,
                    )
            del opened.sequences[offset]

    def on_gone(self, lender: Identity) -> None:
        """Ends the waits for a process that has ended, and closes its memory. May take long."""
        with self._calls, self._lock:
            self.news.pop(lender, None)
            self._overdue.discard(lender)
            closing = [self._opened.pop(key) for key in list(self._opened) if key[0] == lender]
        self._end(closing, f"worker {lender.name!r} was lost", Deadline.after(0.0))

    def close(self, timeout_s: float) -> None:
        """Closes all memory when its copies are done, or after `timeout_s`."""
        with self._calls, self._lock:
            closing = list(self._opened.values())
            self._opened.clear()
            self.news.clear()
        self._end(closing, "RPC ended here", Deadline.after(timeout_s))

    def _end(self, closing: list[_OpenMemory], what: str, deadline: Deadline) -> None:
        """Closes allocations. Writes numbers that are missing at the deadline, since streams would hang."""
        num_undefined = 0
        for opened in closing:
            if opened.is_own:
                continue
            memory = self.memory()
            for offset, (sequence, _) in list(opened.sequences.items()):
                while not is_reached(memory, opened.device, opened.address + offset, sequence):
                    if deadline.expired():
                        memory.force(opened.device, opened.address + offset, sequence)
                        num_undefined += 1
                        break
                    time.sleep(POLL_S)
        if num_undefined:
            logger.error(
                "%s before the GPU of the sender had computed tensors that came with %d messages: their content is "
                "undefined",
                what,
                num_undefined,
            )
        for opened in closing:
            with self._lock:
                opened.is_over = bool(opened.num_users)
            if not opened.is_over:
                self._close(opened)

    def _open(self, loan: value_pb2.GpuLoan, device: int, lender: Identity) -> _OpenMemory:
        """With `_calls`: two threads must not open one allocation."""
        key = lender, loan.memory
        opened = self._opened.get(key)
        if opened is None:
            own = self.lent().own_address(loan.memory)
            address, size = self.memory().open(device, loan.memory) if own is None else own
            opened = _OpenMemory(device, address, size, own is not None)
            with self._lock:
                self._opened[key] = opened
        opened.used = self.now()
        return opened

    def _close(self, opened: _OpenMemory) -> None:
        if not opened.is_own:
            self.memory().close(opened.device, opened.address)
