"""Fills a dict with keys that a peer chose: the work is bounded, or the value is refused.

The hash of a number is the number modulo 2**61 - 1, and the hash of a tuple follows from its items, so a peer can send
any number of keys with the same hash, and the dict compares each key with all before it. Strings and bytes are hashed
with a secret of this process, so a peer cannot choose their hashes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import compress
from typing import Any, Final

from rpcdist.errors import SerializationError

CHECKED_FROM: Final = 16
"""Dicts with fewer entries are not checked: comparing all of their keys with each other takes 20 ns a byte."""

_FREE_WORK: Final = 2_000_000
_WORK_PER_BYTE: Final = 40
"""Limit on the cost of filling, in nanoseconds of processor time: 40 ms for each MiB of the value. Ordinary keys take
at most a quarter of that (short tuples; a number has nine bytes and takes 80 ns)."""

_FEW: Final = 8
_LONG_BYTES: Final = 32
"""Comparing keys takes time for each common byte, so only a few long keys are added between two checks."""

_EIGHTH: Final = bytes(32 * [1] + 224 * [0])
_KEYED: Final = frozenset((str, bytes))


Fill = Callable[[dict[object, object], list[Any], list[Any], int], None]
"""Adds keys and values, which have this size on the wire, to a dict."""


def bounded_fill(size_bytes: int) -> Fill:
    """A function that fills the dicts of one value, and raises `SerializationError` if too many of their keys collide,
    so that filling takes far longer than the size of the value justifies.

    It counts the processor time of this thread, not wall-clock time. Other threads can run between the chunks. Very
    many short keys may take three times as long on a machine whose caches are shared, so the hashes of such keys are
    counted before the dict is refused.

    Args:
        size_bytes: size of the value's body; hashing a long number takes time for each byte.
    """
    limit = _FREE_WORK + size_bytes * _WORK_PER_BYTE
    spent = 0

    def fill(made: dict[object, object], keys: list[Any], values: list[Any], size_bytes: int) -> None:
        nonlocal limit, spent
        if _KEYED.issuperset(map(type, keys)):
            made.update(zip(keys, values, strict=True))
            return
        step = _FEW if size_bytes > _LONG_BYTES * len(keys) else len(keys)
        for start in range(0, len(keys), step):
            began = time.thread_time_ns()
            made.update(zip(keys[start : start + step], values[start : start + step], strict=True))
            spent += time.thread_time_ns() - began
            if spent > limit:
                if step == len(keys) and _few_are_alike(made):
                    limit = spent + spent // 2
                    continue
                raise SerializationError(
                    f"a dict with colliding hashes arrived: {len(made)} of its keys took "
                    f"{spent / 1e9:.3f} s to add. Send the entries as a list of pairs, or with keys of type str"
                )

    return fill


def _few_are_alike(made: dict[object, object]) -> bool:
    """Whether the dict had to compare few of its keys with others, judged by a random eighth of the keys."""
    drawn = compress(made, random.randbytes(len(made)).translate(_EIGHTH))
    counts = Counter(map(hash, drawn)).values()
    return sum([count * (count - 1) for count in counts if count > 1]) <= len(made) // 8
