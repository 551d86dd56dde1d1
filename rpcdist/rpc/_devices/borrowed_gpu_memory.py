"""Memory of GPUs that other processes of this host lend: what a message brings is copied into tensors of this process.

The copy waits for the lender's number in the current stream of the thread that decodes, and writes a number of its own
when it is done: nobody waits on the host. That it is under way, the lender hears with the next message to it, or with
the next tick. An allocation is opened once, which takes 300 us, and stays open for a while.

If the lender is lost before its number is there, or does not write it for `GPU_WAIT_LIMIT_S`, the streams that wait for
it go on, and what they copy is undefined; the log says so.
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
from rpcdist.rpc._devices.cuda_memory import GpuMemory, GpuUnavailable
from rpcdist.rpc._devices.lent_gpu_memory import ALIGNMENT_BYTES, COPIED_AT, LentGpuMemory
from rpcdist.time_limits import GPU_WAIT_LIMIT_S, IDLE_LIMIT_S, POLL_S

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenMemory:
    """An allocation of another process, or of this one.

    Attributes:
        sequences: by offset, the last number that a stream of this process waits for there, and since when; those that
            are known to have come are left out.
    """

    device: int
    address: int
    size: int
    is_own: bool
    used: float = 0.0
    sequences: dict[int, tuple[int, float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Borrowed:
    """A loan that is being copied.

    Attributes:
        home: the device that it is on.
        devices: those that it is copied to.
    """

    loan: value_pb2.GpuLoan
    home: int
    address: int
    devices: list[int] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class BorrowedGpuMemory:
    """One per agent. Any thread may use it.

    Args:
        memory: CUDA; called when memory is borrowed first.
        lent: that of this process, whose own loans come back where a worker calls itself, or another of its process.
        now: the monotonic clock.

    Attributes:
        news: by lender, the message that it shall get.
    """

    memory: Callable[[], GpuMemory]
    lent: Callable[[], LentGpuMemory | None]
    name_of: Callable[[int], str]
    now: Callable[[], float] = time.monotonic
    _lock: LockType = field(default_factory=threading.Lock)
    _opened: dict[tuple[int, bytes], _OpenMemory] = field(default_factory=dict)  # by lender and handle
    news: dict[int, rpc_pb2.GpuRelease] = field(default_factory=dict)
    _indices: dict[bytes, int] = field(default_factory=dict)  # of devices, by UUID
    _overdue: set[int] = field(default_factory=set)  # lenders whose numbers did not come

    @property
    def is_used(self) -> bool:
        return bool(self._opened)

    def device_of(self, loan: value_pb2.GpuLoan) -> int:
        """The index that the device of a loan has here. Raises `SerializationError`."""
        if not self._indices:
            memory = self.memory()
            self._indices = {memory.uuid(index): index for index in range(torch.cuda.device_count())}
        if loan.gpu not in self._indices:
            raise SerializationError("a tensor lies on a GPU that this process does not see")
        return self._indices[loan.gpu]

    def probe(self, loan: value_pb2.GpuLoan, lender: int) -> str:
        """Whether memory that a worker lends can be read here: empty, or why not. The loan is not copied."""
        reason = ""
        try:
            self.begin(loan, lender)
        except (GpuUnavailable, SerializationError) as exc:
            reason = str(exc)
        self.discard([loan], lender)
        return reason

    def begin(self, loan: value_pb2.GpuLoan, lender: int) -> Borrowed:
        """Opens the memory of a loan; `finish` or `discard` must follow.

        Raises:
            SerializationError: it is damaged, or cannot be read here.
        """
        home = self.device_of(loan)
        with self._lock:
            if lender in self._overdue:
                raise SerializationError(
                    f"worker {self.name_of(lender)!r} has lent memory of a GPU that it did not write within "
                    f"{GPU_WAIT_LIMIT_S:g} s, and nothing more is borrowed from it; let it send CPU tensors, or "
                    "restart it"
                )
            try:
                opened = self._open(loan, home, lender)
            except GpuUnavailable as exc:
                raise SerializationError(f"a tensor in memory of another process cannot be read: {exc}") from exc
            if loan.offset % ALIGNMENT_BYTES or loan.offset + loan.size > opened.size or loan.size < ALIGNMENT_BYTES:
                raise SerializationError(
                    f"a loan arrived that is said to lie beyond the {opened.size} bytes of its memory"
                )
            if not opened.is_own:
                opened.sequences[loan.offset] = loan.sequence, self.now()
            return Borrowed(loan, home, opened.address + loan.offset)

    def copy(self, borrowed: Borrowed, offset: int, target: torch.Tensor, size: int) -> None:
        """Copies a part of a loan into a tensor, in the current stream of its device.

        Raises:
            SerializationError: the part is not in the loan.
        """
        loan, memory, device = borrowed.loan, self.memory(), target.get_device()
        if offset + size > loan.size:
            raise SerializationError(f"a tensor arrived that is said to lie beyond the {loan.size} bytes of its loan")
        if device not in borrowed.devices:
            try:
                memory.wait(borrowed.home, borrowed.address, loan.sequence, device)
            except GpuUnavailable as exc:
                raise SerializationError(f"a tensor in memory of another process cannot be read: {exc}") from exc
            borrowed.devices.append(device)
        memory.copy(device, target.data_ptr(), borrowed.address + offset, size)

    def finish(self, borrowed: Borrowed, lender: int) -> None:
        """All that is wanted of a loan is being copied."""
        if not borrowed.devices:
            self.discard([borrowed.loan], lender)
            return
        copied_at = borrowed.address + COPIED_AT
        try:
            self.memory().write(borrowed.home, copied_at, borrowed.loan.sequence, borrowed.devices)
        except GpuUnavailable as exc:
            logger.error("the sender of a tensor cannot be told that it was copied: %s", exc)
            return  # it uses the memory again when this process is gone
        with self._lock:
            self._news_of(lender).copied.append(borrowed.loan.number)

    def discard(self, loans: Iterable[value_pb2.GpuLoan], lender: int) -> None:
        with self._lock:
            self._news_of(lender).unwanted.extend([loan.number for loan in loans])

    def _news_of(self, lender: int) -> rpc_pb2.GpuRelease:
        """With the lock."""
        news = self.news.get(lender)
        if news is None:
            news = self.news[lender] = rpc_pb2.GpuRelease()
        return news

    def release(self, lender: int) -> rpc_pb2.Message | None:
        """Takes out the news for a lender; None if there are none."""
        if lender not in self.news:
            return None
        with self._lock:
            news = self.news.pop(lender, None)
        return None if news is None else rpc_pb2.Message(gpu_release=news)

    def clean(self) -> None:
        """Closes allocations that nobody used for a while. May take long."""
        now = self.now()
        closing: list[tuple[int, bytes, _OpenMemory]] = []
        with self._lock:  # nobody else closes them meanwhile
            for key, opened in list(self._opened.items()):
                is_idle = now - opened.used > IDLE_LIMIT_S
                if is_idle or any(now - since > GPU_WAIT_LIMIT_S for _, since in opened.sequences.values()):
                    self._end_waits(opened, key[0], now)
                if is_idle and not opened.sequences:  # else closing would wait with the stream, and for ever
                    closing.append((*key, self._opened.pop(key)))
        for lender, handle, opened in closing:
            self._close(opened)
            with self._lock:
                self._news_of(lender).closed.append(handle)

    def _end_waits(self, opened: _OpenMemory, lender: int, now: float) -> None:
        """Forgets the numbers that have come, and ends the waits that have lasted too long. With the lock."""
        memory = self.memory()
        for offset, (sequence, since) in list(opened.sequences.items()):
            address = opened.address + offset
            if 0 < (sequence - memory.read(opened.device, address) & 0xFFFFFFFF) < 1 << 31:  # not there yet
                if now - since <= GPU_WAIT_LIMIT_S:
                    continue
                memory.force(opened.device, address, sequence)
                if lender not in self._overdue:
                    self._overdue.add(lender)
                    logger.error(
                        "worker %r has lent memory of a GPU, and has not written it within %g s: the content of "
                        "tensors that it sent is undefined, and no more memory is borrowed from it",
                        self.name_of(lender),
                        GPU_WAIT_LIMIT_S,
                    )
            del opened.sequences[offset]

    def on_gone(self, lender: int, name: str) -> None:
        """The process of a worker has ended: streams that wait for it go on. Closes its memory, which may take long."""
        with self._lock:
            self.news.pop(lender, None)
            self._overdue.discard(lender)
            closing = [self._opened.pop(key) for key in list(self._opened) if key[0] == lender]
        self._end(closing, f"worker {name!r} was lost", Deadline.after(0.0))

    def close(self, timeout_s: float) -> None:
        """Closes everything, when all that was borrowed is copied, or after `timeout_s`."""
        with self._lock:
            closing = list(self._opened.values())
            self._opened.clear()
            self.news.clear()
        self._end(closing, "RPC ended here", Deadline.after(timeout_s))

    def _end(self, closing: list[_OpenMemory], what: str, deadline: Deadline) -> None:
        """Closes allocations. Writes the numbers that are not there by the deadline, or streams would hang."""
        num_undefined = 0
        for opened in closing:
            if opened.is_own:
                continue
            memory = self.memory()
            for offset, (sequence, _) in opened.sequences.items():
                while memory.read(opened.device, opened.address + offset) != sequence:
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
            self._close(opened)

    def _open(self, loan: value_pb2.GpuLoan, device: int, lender: int) -> _OpenMemory:
        """With the lock: two threads must not open one allocation."""
        key = lender, loan.memory
        opened = self._opened.get(key)
        if opened is None:
            lent = self.lent()
            own = None if lent is None else lent.own_address(loan.memory)
            address, size = self.memory().open(device, loan.memory) if own is None else own
            opened = self._opened[key] = _OpenMemory(device, address, size, own is not None)
        opened.used = self.now()
        return opened

    def _close(self, opened: _OpenMemory) -> None:
        if not opened.is_own:
            self.memory().close(opened.device, opened.address)
