"""Memory that operators free stays with the process, where the C library would return it to the system each time.

A training step allocates what the last one has freed: activations, gradients, copies. The allocator of glibc returns
blocks of 128 KiB and more at once, until its own rule has learned from blocks that were freed, and what is free at the
end of the heap from twice the largest of them on. Each 4 KiB page that comes back costs a fault, in which the kernel
clears it: 4 ms and more for 16 MiB, as long as an operator takes for its work.

So a process that trains begins with the largest block that the rule would learn, 32 MiB, and keeps `TRIM_FROM_BYTES`.
This needs no more memory than the process had already used when the memory was freed. It concerns all of the process,
and stays after `shutdown`.

In glibc before 2.39, holes that tensors leave are often too small for the next tensor of the same size: an aligned
block leaves a rest before and behind it, other objects get the rests, and where nothing smaller is free, they are cut
from the hole itself. The heap of a thread that serves calls then grows by a tensor in many steps: in a test to 1.7 GiB
in place of 0.26. Against the first, torch aligns large blocks at pages, whose rests are too large for the lists of
small blocks; it also asks for huge pages then. It reads its variable at the process's first tensor, so this works where
that comes after `init_rpc`. Against the second, a thread has a stock of small blocks (`stock_small_blocks`).

Nothing is set where somebody has chosen: in the environment by glibc's own variables, or by
`RPCDIST_KEEP_FREED_MEMORY=off`; nor where the C library is another one. An allocator that is loaded in front of it
(jemalloc, tcmalloc) does not notice.

benchmarks/NOTES.md has the measurements.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from rpcdist.errors import ConfigError

logger = logging.getLogger(__name__)

KEEP_FREED_MEMORY_VARIABLE: Final = "RPCDIST_KEEP_FREED_MEMORY"

LARGEST_IN_HEAP_BYTES: Final = 32 << 20
"""Larger blocks are mappings of their own, which end when they are freed; glibc takes no higher limit."""
TRIM_FROM_BYTES: Final = 256 << 20
"""From so much on, what is free at the end of a heap is returned: more than small models use in a step."""
LEFT_BY_TRIM_BYTES: Final = 16 << 20
"""So much stays then. Less than the 64 MiB of a thread's heap: otherwise none of these would ever be returned."""

LARGE_BYTES: Final = 2 << 20
"""From this size on, torch aligns blocks at pages if its variable is set."""
TORCH_VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
"""Where the kernel has none, asking for them fails, and torch warns."""

_STOCK_SIZES: Final = range(24, 1040, 16)
"""A block of each of these sizes, in bytes, is on a list of its own in glibc."""
_STOCK_OF_SIZE: Final = 20
"""Blocks of each size: 0.7 MB in all."""
_STOCK_CUSHION_BYTES: Final = 2 << 20
"""Objects of other sizes are cut from this block. The pages that nobody uses take no memory."""
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
    """Has the C library keep what is freed, once for the process; see above.

    Raises:
        ConfigError: `RPCDIST_KEEP_FREED_MEMORY` is neither 'auto' nor 'off'.
    """
    if is_wanted(os.environ):
        _set_once()


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether nobody has chosen otherwise.

    Raises:
        ConfigError: the variable has a value that there is not.
    """
    text = environment.get(KEEP_FREED_MEMORY_VARIABLE, "auto")
    if text not in ("auto", "off"):
        raise ConfigError(f"{KEEP_FREED_MEMORY_VARIABLE} is 'auto' or 'off', not {text!r}")
    chosen = not _VARIABLES_OF_GLIBC.isdisjoint(environment) or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
    return text == "auto" and not chosen


@cache
def _set_once() -> bool:
    """Returns whether the C library is glibc."""
    mallopt = _find_mallopt()
    apply(mallopt)
    if mallopt is not None and _HUGE_PAGES.exists():
        os.environ.setdefault(TORCH_VARIABLE, "1")
    return mallopt is not None


def stock_small_blocks() -> None:
    """Makes free blocks of small sizes in the heap of this thread, once; before it makes large tensors."""
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
    """Sets all of it, or nothing where there is no such function."""
    if mallopt is None:
        return
    refused = [(name, value) for name, value in _SETTINGS if not mallopt(name, value)]
    if refused:
        logger.debug("the C library's allocator did not take the settings (number, bytes) %s", refused)


def _find_mallopt() -> Callable[[int, int], int] | None:
    """glibc's function, or None where the C library is another one."""
    try:
        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not POSIX, another C library, not known to this one
        return None
    if not is_glibc:
        return None
    mallopt: Any = ctypes.CDLL(None).mallopt
    mallopt.restype, mallopt.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int)
    return cast(Callable[[int, int], int], mallopt)
