"""Memory that operators free stays with the process, where the C library would return it to the system each time.

A training step allocates what the last one has freed: activations, gradients, copies. The allocator of glibc returns
blocks of 128 KiB and more at once, until its own rule has learned from blocks that were freed, and what is free at the
end of the heap from twice the largest of them on. Each 4 KiB page that comes back costs a fault, in which the kernel
clears it: 4 ms and more for 16 MiB, as long as an operator takes for its work.

So a process that trains begins with the largest block that the rule would learn, 32 MiB, and keeps `TRIM_FROM_BYTES`.
This needs no more memory than the process had already used when the memory was freed. It concerns all of the process,
and stays after `shutdown`. Nothing is set where somebody has chosen: in the environment by glibc's own variables, or by
`RPCDIST_KEEP_FREED_MEMORY=off`; nor where the C library is another one. An allocator that is loaded in front of it
(jemalloc, tcmalloc) does not notice.

benchmarks/NOTES.md has the measurements.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
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

# From <malloc.h>; these numbers are part of the binary interface.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
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
def _set_once() -> None:
    apply(_find_mallopt())


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
