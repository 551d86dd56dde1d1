"""Filling a dict with keys that a peer chose: the work is bounded, or the value is refused.

The hash of a number is the number modulo 2**61 - 1, and that of a tuple follows from its items, so a peer can send as
many keys of one hash as it likes: the dict compares each with all before it. Strings and bytes are hashed with a secret
of this process, and cannot be chosen so.
"""

from __future__ import annotations

import time
from typing import Any, Final

from rpcdist.errors import SerializationError

__all__ = ["CHECKED_FROM", "HashWork"]

CHECKED_FROM: Final = 128
"""Dicts of fewer entries are not watched: comparing all of their keys with each other takes less than 0.1 ms."""

_FREE_S: Final = 0.1
_PER_PART_S: Final = 1e-6
_PER_BYTE_S: Final = 5e-9
"""What filling may cost in all: ten times what ordinary keys take, on a slow machine."""

_KEYED: Final = frozenset((str, bytes))


class HashWork:
    """The time that the dicts of one value have taken to fill.

    It is the processor time of this thread, not that of the clock: a busy machine refuses nobody. Between the chunks
    other threads have their turn.

    Args:
        size_bytes: of the value; hashing a long number takes time for each byte.
    """

    __slots__ = ("_size_s", "_spent_s")

    def __init__(self, size_bytes: int) -> None:
        self._size_s = size_bytes * _PER_BYTE_S
        self._spent_s = 0.0

    def fill(self, made: dict[object, object], keys: list[Any], values: list[Any], num_parts: int) -> None:
        """Adds the entries to `made`.

        Args:
            made: the dict.
            keys: of the entries.
            values: as many.
            num_parts: how many parts of the value have been read.

        Raises:
            SerializationError: the keys collide so much that filling takes far longer than their number accounts for.
        """
        if _KEYED.issuperset(map(type, keys)):
            made.update(zip(keys, values, strict=True))
            return
        limit_s = _FREE_S + self._size_s + num_parts * _PER_PART_S
        for start in range(0, len(keys), CHECKED_FROM):
            began_s = time.thread_time()
            made.update(zip(keys[start : start + CHECKED_FROM], values[start : start + CHECKED_FROM], strict=True))
            self._spent_s += time.thread_time() - began_s
            if self._spent_s > limit_s:
                raise SerializationError(
                    f"a dict of {len(keys)} keys arrived whose hashes collide: {start + CHECKED_FROM} of them took "
                    f"{self._spent_s:.2f} s to enter. Send the entries as a list of pairs, or with keys of type str"
                )
