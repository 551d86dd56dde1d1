"""Keeps freed memory in the process, where the C library would return it to the system.

A training step allocates what the last one has freed: activations, gradients, copies. glibc's allocator returns blocks
of 128 KiB and more at once, until it has learned a higher limit from freed blocks, and trims the end of the heap from
twice that limit on. Each 4 KiB page that is allocated again costs a page fault, in which the kernel clears it.

So a training process starts with the highest limit that the allocator would learn, 32 MiB, and keeps `TRIM_FROM_BYTES`.
This needs no more memory than the process had used when the memory was freed. It affects the whole process, and lasts
beyond `shutdown`.

In glibc before 2.39, a freed tensor often leaves a hole that is too small for the next tensor of the same size: an
aligned block leaves remainders before and behind it, which other objects get, and small objects are cut from the hole
itself. Then the heap of a thread that serves calls or reads messages keeps growing. Against the first cause, torch's
variable makes it align large blocks at pages, whose remainders are too large for the lists of small blocks. torch reads
the variable at the first tensor of the process, so this works if that comes after `init_rpc`. Against the second cause,
each thread gets a stock of small blocks (`stock_small_blocks`).

Nothing is set if the environment has glibc's own variables or `RPCDIST_KEEP_FREED_MEMORY=off`, or if the C library is
not glibc. Preloaded allocators (jemalloc, tcmalloc) are not affected. benchmarks/NOTES.md has the measurements.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, cast

from rpcdist.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_FREED_MEMORY_VARIABLE: Final = "RPCDIST_KEEP_FREED_MEMORY"

LARGEST_IN_HEAP_BYTES: Final = 32 << 20
"""Larger blocks are separate mappings, which end when they are freed; glibc accepts no higher limit."""
TRIM_FROM_BYTES: Final = 256 << 20
"""Free memory at the end of a heap is returned only above this size, which small models do not reach in a step."""
LEFT_BY_TRIM_BYTES: Final = 16 << 20
"""The memory that is kept then; less than the 64 MiB of a thread's heap, or no heap would ever be returned."""

LARGE_BYTES: Final = 2 << 20
"""From this size on, torch aligns blocks at pages if its variable is set."""
TORCH_VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
_HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage"
"""Missing if the kernel has no huge pages; then torch would warn that it cannot get any."""

_STOCK_SIZES: Final = range(24, 1040, 16)
"""glibc has a list of free blocks for each of these sizes, in bytes."""
_STOCK_OF_SIZE: Final = 20
"""The number of blocks of each size: 0.7 MB in total."""
_STOCK_CUSHION_BYTES: Final = 2 << 20
"""Objects of other sizes are cut from this block; its unused pages take no memory."""
_stock: Final = threading.local()

# From <malloc.h>; these numbers are part of the binary interface.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_POINTER: Final = ctypes.c_void_p
_SETTINGS: Final = (
    (_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES),
    (_M_TRIM_THRESHOLD, TRIM_FROM_BYTES),
    (_M_TOP_PAD, LEFT_BY_TRIM_BYTES),
)
_VARIABLES_OF_GLIBC: Final = frozenset(
    {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}
)


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory, once for the process; see above.


    Raises:
        ConfigError: `RPCDIST_KEEP_FREED_MEMORY` is neither 'auto' nor 'off'.
    """
    if is_wanted(os.environ):
        _set_once()


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment does not choose otherwise.


    Raises:
        ConfigError: the variable has an unknown value.
    """
    text = environment.get(KEEP_FREED_MEMORY_VARIABLE, "auto")
    if text not in ("auto", "off"):
        raise ConfigError(f"{KEEP_FREED_MEMORY_VARIABLE} is 'auto' or 'off', not {text!r}")
    chosen = any(name in environment for name in _VARIABLES_OF_GLIBC) or "glibc.malloc." in environment.get(
        "GLIBC_TUNABLES", ""
    )
    return text == "auto" and not chosen


@cache
def _set_once() -> bool:
    """Returns whether the C library is glibc."""
    mallopt = _find_mallopt()
    apply(mallopt)
    if mallopt is not None and os.path.exists(_HUGE_PAGES):
        os.environ.setdefault(TORCH_VARIABLE, "1")
    return mallopt is not None


def stock_small_blocks() -> None:
    """Makes free blocks of small sizes in this thread's heap, once; call it before the thread makes large tensors."""
    if hasattr(_stock, "is_there"):
        return
    _stock.is_there = True
    if not (is_wanted(os.environ) and _set_once()):
        return
    libc: Any = ctypes.PyDLL(None)
    malloc, free = libc.malloc, libc.free
    malloc.restype, malloc.argtypes, free.restype, free.argtypes = _POINTER, (ctypes.c_size_t,), None, (_POINTER,)
    cushion = malloc(_STOCK_CUSHION_BYTES)
    blocks = [malloc(size) for size in _STOCK_SIZES for _ in range(_STOCK_OF_SIZE)]
    free(cushion)
    for block in blocks[::2] + blocks[1::2]:
        free(block)


def apply(mallopt: Callable[[int, int], int] | None) -> None:
    """Applies the settings, if there is such a function."""
    if mallopt is None:
        return
    refused = [(name, value) for name, value in _SETTINGS if not mallopt(name, value)]
    if refused:
        logger.debug("the C library's allocator refused the settings (number, bytes) %s", refused)


def _find_mallopt() -> Callable[[int, int], int] | None:
    """glibc's function, or None for another C library."""
    try:
        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not POSIX, another C library, not known to this one
        return None
    if not is_glibc:
        return None
    mallopt: Any = ctypes.CDLL(None).mallopt
    mallopt.restype, mallopt.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int)
    return cast(Callable[[int, int], int], mallopt)
