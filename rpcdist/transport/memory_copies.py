"""Copies of large buffers between two places of this process's memory: in turns, and the largest by two threads.

[Note: turns] Threads that copy at once share the bandwidth of the memory, and are no faster together. But they keep the
cores busy, each for a time slice, and the threads of a small call wait behind them whenever it changes threads. So
large copies take turns: half as many at a time as there are cores, since the process at the other end copies, too.
Measured with 4 echoes of 16 MiB at once on 2 cores: a no-op beside them takes half as long, and the echoes move a fifth
more.

[Note: halves] One core does not use all the bandwidth. With another one free, a copy of 16 MiB in two halves takes
0.75x of the time, one of 64 MiB 0.56x; at 8 MiB, starting the other thread costs what it brings. Without a free core
two threads are slower than one, so the system is asked first how many are running.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Final

from rpcdist.time_limits import COPY_TURN_LIMIT_S

TAKE_TURNS_FROM_BYTES: Final = 4 << 20
TWO_THREADS_FROM_BYTES: Final = 16 << 20
_LOADAVG_BYTES: Final = 128


def declare(name: str, result: type, *arguments: type) -> Any:
    """A function of the C library; calls of it release the interpreter's lock. None where no memory can be shared."""
    if os.name != "posix":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_memmove: Final = declare("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def num_running() -> int | None:
    """How many threads of this host are running or want to, this one included; None where the system does not say."""
    try:
        descriptor = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        try:  # without a file object, which costs as much again: this is part of a call
            text = os.read(descriptor, _LOADAVG_BYTES)
        finally:
            os.close(descriptor)
        return int(text.split()[3].partition(b"/")[0])
    except (OSError, IndexError, ValueError):
        return None


class MemoryCopier:
    """Copies memory on behalf of any thread, see the notes above.

    Args:
        num_cores: that this process may use.
        num_running: how many threads of the host are running.
        copy: copies (target address, source address, bytes) with the interpreter's lock released.
        start_thread: runs a function on a new thread.
    """

    def __init__(
        self,
        num_cores: int,
        num_running: Callable[[], int | None] = num_running,
        copy: Callable[[int, int, int], object] = _memmove,
        start_thread: Callable[[Callable[[], object], tuple[()]], object] = _thread.start_new_thread,
    ) -> None:
        self._num_cores = num_cores
        self._num_running = num_running
        self._copy = copy
        self._start_thread = start_thread
        self._turns = self._new_turns()

    def _new_turns(self) -> threading.Semaphore:
        return threading.Semaphore(max(1, self._num_cores // 2))

    def after_fork_in_child(self) -> None:
        """The threads whose turn it was are gone."""
        self._turns = self._new_turns()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copies memory; returns when it is done, also when it raises `KeyboardInterrupt`.

        Args:
            target: address of memory that does not overlap with the source's.
            source: address.
            num_bytes: how much.
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

        # The interpreter looks for Ctrl-C after calls, so the first one that can be cut off by it is the one that has
        # started the thread: `done` will be released whenever this block is left.
        try:
            try:
                self._start_thread(copy_second, ())
            except RuntimeError:  # there may be no more threads
                done.release()
                first = num_bytes
            self._copy(target, source, first)
        finally:
            _wait_for(done)


def _wait_for(done: threading.Lock) -> None:
    """Waits in spite of Ctrl-C: nobody may free or reuse memory that another thread still reads or writes."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            done.acquire()
            break
        except KeyboardInterrupt as exc:
            interrupt = exc
    if interrupt is not None:
        raise interrupt


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_copier: Final = MemoryCopier(_num_cores())
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_copier.after_fork_in_child)


def copy_memory(target: int, source: int, num_bytes: int) -> None:
    """Copies memory, in turns with all others of this process that do; see `MemoryCopier.copy`."""
    _copier.copy(target, source, num_bytes)


def copy_view(target: int, view: memoryview) -> None:
    """Copies contiguous bytes to an address, as `copy_memory` does."""
    try:
        source = ctypes.addressof(ctypes.c_char.from_buffer(view))
    except TypeError:  # memory that may only be read has no address for ctypes
        ctypes.memmove(target, bytes(view), view.nbytes)
    else:
        copy_memory(target, source, view.nbytes)
