"""Filling a dict with keys that a peer chose: the work is bounded, or the value is refused.

The hash of a number is the number modulo 2**61 - 1, and that of a tuple follows from its items, so a peer can send as
many keys of one hash as it likes: the dict compares each with all before it. Strings and bytes are hashed with a secret
of this process, and cannot be chosen so.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import compress
from typing import Any, Final

from rpcdist.errors import SerializationError

CHECKED_FROM: Final = 16
"""Dicts of fewer entries are not watched: comparing all of their keys with each other takes 20 ns a byte."""

_FREE_WORK: Final = 2_000_000
_WORK_PER_BYTE: Final = 40
"""Limit of the cost of filling, in nanoseconds of the processor: 40 ms for each MiB of the value. Ordinary keys take a
quarter of that at most (short tuples; a number has nine bytes and takes 80 ns)."""

_FEW: Final = 8
_LONG_BYTES: Final = 32
"""Comparing keys takes time for each byte that they have in common: of long ones few are entered between two looks."""

_EIGHTH: Final = bytes(32 * [1] + 224 * [0])
_KEYED: Final = frozenset((str, bytes))


class HashWork:
    """The time that the dicts of one value have taken to fill.

    It is the processor time of this thread, not that of the clock. Between the chunks other threads have their turn.
    Very many short keys may take three times as long on a machine whose caches others use: before a dict of such keys
    is refused, its hashes are counted.

    Args:
        size_bytes: of the body of the value; hashing a long number takes time for each byte.
    """

    __slots__ = ("_limit", "_spent")

    def __init__(self, size_bytes: int) -> None:
        self._limit = _FREE_WORK + size_bytes * _WORK_PER_BYTE
        self._spent = 0

    def fill(self, made: dict[object, object], keys: list[Any], values: list[Any], size_bytes: int) -> None:
        """Adds the entries to `made`.

        Args:
            size_bytes: of the entries, as they arrived.

        Raises:
            SerializationError: the keys collide so much that filling takes far longer than their size accounts for.
        """
        if _KEYED.issuperset(map(type, keys)):
            made.update(zip(keys, values, strict=True))
            return
        step = _FEW if size_bytes > _LONG_BYTES * len(keys) else len(keys)
        for start in range(0, len(keys), step):
            began = time.thread_time_ns()
            made.update(zip(keys[start : start + step], values[start : start + step], strict=True))
            self._spent += time.thread_time_ns() - began
            if self._spent > self._limit:
                if step == len(keys) and _few_are_alike(made):
                    self._limit = self._spent + self._spent // 2
                    continue
                raise SerializationError(
                    f"a dict arrived whose keys have hashes that collide: {len(made)} of them took "
                    f"{self._spent / 1e9:.3f} s to enter. Send the entries as a list of pairs, or with keys of type str"
                )


def _few_are_alike(made: dict[object, object]) -> bool:
    """Whether the dict had to compare hardly any of its keys with others: of an eighth of them, drawn by chance."""
    drawn = compress(made, random.randbytes(len(made)).translate(_EIGHTH))
    counts = Counter(map(hash, drawn)).values()
    return sum([count * (count - 1) for count in counts if count > 1]) <= len(made) // 8
