"""Sleeping until a word of shared memory changes: Linux's futex(2) through ctypes; and whether this machine has it.

Both calls let other Python threads run. A word has 32 bits.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from typing import Final

from rpcdist.collectives._transports.shm import futex
from rpcdist.transport import shared_memory
from rpcdist.transport.memory_copies import declare

_SYS_FUTEX: Final = 202  # on x86-64
_WAIT: Final = 0  # not FUTEX_PRIVATE: the waiters are other processes
_WAKE: Final = 1
_EVERYBODY: Final = (1 << 31) - 1


_TimeSpec = ctypes.c_long * 2  # seconds and nanoseconds


_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p
_syscall: Final = declare("syscall", _LONG, _LONG, _POINTER, _LONG, ctypes.c_ulong, _POINTER, _POINTER, _LONG)


def unavailable() -> str | None:
    word = ctypes.c_uint32(1)
    _syscall(_SYS_FUTEX, ctypes.addressof(word), _WAIT, 0, None, None, 0)
    code = ctypes.get_errno()  # EAGAIN is the expected one: the word is not 0
    return None if code == errno.EAGAIN else f"futex failed: {errno.errorcode.get(code, code)}"


def wait(address: int, value: int, limit_s: float) -> None:
    """Sleeps while the word at `address` is `value`, for at most `limit_s`; spurious wake-ups are possible.

    A full memory barrier separates this thread's earlier stores from the load of the word.
    """
    limit = _TimeSpec(int(limit_s), int(limit_s % 1 * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    _syscall(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def unsupported_here() -> str | None:
    """Returns why ranks on this machine cannot use shared memory, as a clause for a message, or None if they can.

    Flags are plain stores that follow the stores of the data that they announce. Only x86-64 is known to make them
    visible to other cores in that order; see [Note: store order] in `signals`.
    """
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return f"its flags rely on the store order of x86-64, but this processor is {machine or 'unknown'}"
    return shared_memory.unavailable() or futex.unavailable()
