"""Copies large buffers within this process's memory: a few at a time, and the largest ones with two threads.

[Note: turns] Threads that copy at the same time share the memory bandwidth, so together they are no faster than one.
But they keep the cores busy, and the threads of a small call wait behind them at each thread switch. So large copies
take turns: half as many at a time as there are cores, since the process at the other end also copies.

[Note: halves] One core does not use the whole bandwidth. If another core is free, a copy of 16 MiB or more is faster in
two halves; at 8 MiB, the start of the second thread costs as much as it gains. Without a free core, two threads are
slower than one, so the copier first asks the system for the number of running threads.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rpcdist.time_limits import COPY_TURN_LIMIT_S

TAKE_TURNS_FROM_BYTES: Final = 4 << 20
TWO_THREADS_FROM_BYTES: Final = 16 << 20
_LOADAVG_BYTES: Final = 128


def declare(name: str, result: type, *arguments: type) -> Any:
    """A function of the C library, whose calls release the interpreter's lock."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_memmove: Final = declare("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def num_running() -> int | None:
    """The number of running or runnable threads on this host, including this one; None if it is not known."""
    try:
        descriptor = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        try:  # not with a file object, which would double the cost: every large call runs this
            text = os.read(descriptor, _LOADAVG_BYTES)
        finally:
            os.close(descriptor)
        return int(text.split()[3].partition(b"/")[0])
    except (OSError, IndexError, ValueError):
        return None


@dataclass(eq=False, repr=False)
class MemoryCopier:
    """Copies memory for any thread; see the notes above.

    Args:
        num_cores: the number of cores that this process may use.
        num_running: returns the number of running threads on the host.
        copy: copies (target address, source address, bytes) without the interpreter's lock.
    """

    _num_cores: int
    _num_running: Callable[[], int | None] = num_running
    _copy: Callable[[int, int, int], object] = _memmove
    _start_thread: Callable[[Callable[[], object], tuple[()]], object] = _thread.start_new_thread

    def __post_init__(self) -> None:
        self._turns = self._new_turns()

    def _new_turns(self) -> threading.Semaphore:
        return threading.Semaphore(max(1, self._num_cores // 2))

    def after_fork_in_child(self) -> None:
        """Makes new turns: the threads that held the old ones do not exist in the child."""
        self._turns = self._new_turns()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copies memory; the copy is complete when this returns, or raises `KeyboardInterrupt`.

        Args:
            target: address of memory that does not overlap with the source.
        """
        if num_bytes < TAKE_TURNS_FROM_BYTES:
            self._copy(target, source, num_bytes)
            return
        turns = self._turns
        has_turn = turns.acquire(timeout=COPY_TURN_LIMIT_S)
        try:
            if num_bytes >= TWO_THREADS_FROM_BYTES and self._has_free_core():
                self._copy_in_halves(target, source, num_bytes)
            else:
                self._copy(target, source, num_bytes)
        finally:
            if has_turn:
                turns.release()

    def _has_free_core(self) -> bool:
        running = self._num_running()
        return running is not None and running < self._num_cores

    def _copy_in_halves(self, target: int, source: int, num_bytes: int) -> None:
        first = half = num_bytes // 2
        done = threading.Lock()
        done.acquire()

        def copy_second() -> None:
            try:
                self._copy(target + half, source + half, num_bytes - half)
            finally:
                done.release()

        # The interpreter checks for Ctrl-C after calls. The first call that it can interrupt is the one that starts the
        # thread, so `done` is always released when this block is left.
        try:
            try:
                self._start_thread(copy_second, ())
            except RuntimeError:  # the system allows no more threads
                done.release()
                first = num_bytes
            self._copy(target, source, first)
        finally:
            _wait_for(done)


def _wait_for(done: threading.Lock) -> None:
    """Waits even if Ctrl-C interrupts: memory that another thread still reads or writes must not be freed or reused."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            done.acquire()
            break
        except KeyboardInterrupt as exc:
            interrupt = exc
    if interrupt is not None:
        raise interrupt


_copier: Final = MemoryCopier(len(os.sched_getaffinity(0)))
os.register_at_fork(after_in_child=_copier.after_fork_in_child)


def copy_memory(target: int, source: int, num_bytes: int) -> None:
    """Copies memory, in turns with all other copies of this process; see `MemoryCopier.copy`."""
    _copier.copy(target, source, num_bytes)


# One array type for all lengths: otherwise ctypes would make (and keep) a class for each length. Only a slice of it is
# ever accessed.
_Memory: Final = ctypes.c_char * (1 << 62)


def memory_view(address: int, size: int, owner: object) -> memoryview:
    """A writable view of `size` bytes at `address`; it and every slice of it keep `owner` alive."""
    memory = _Memory.from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")[:size]


def copy_view(target: int, view: memoryview) -> None:
    """Copies contiguous bytes to an address, like `copy_memory`."""
    try:
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
    except TypeError:  # ctypes gives no address of read-only memory
        ctypes.memmove(target, bytes(view), view.nbytes)
    else:
        copy_memory(target, source, view.nbytes)


class LargeBuffer:
    """Bytes that travel separately from their message. They must not change until they are sent; the object keeps them
    alive.

    Attributes:
        size: size in bytes.
        may_wait: whether reading may wait for a device; an event loop then asks `is_ready` first.
    """

    __slots__ = ("_view", "size")

    may_wait = False

    def __init__(self, view: memoryview) -> None:
        self.size = view.nbytes
        self._view = view

    @property
    def view(self) -> memoryview:
        """The bytes, C-contiguous, one byte per item.

        Raises:
            TransportError: the memory was released; the session ends.
        """
        return self._view

    def part(self, start: int, end: int) -> memoryview:
        """A chunk of the bytes, which is written next. Raises the errors of `view`."""
        return self.view[start:end]

    def is_ready(self, end: int) -> bool:
        """Whether the bytes up to `end` can be read without waiting."""
        return True

    def copy_to(self, address: int) -> None:
        """Copies the bytes to memory with room for them, in turns with other copies. Raises the errors of `view`."""
        copy_view(address, self._view)
