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

_FREE_WORK: Final = 25_000_000
_WORK_PER_BYTE: Final = 48
"""What filling may cost in all, in nanoseconds of the processor: 50 ms for each MiB of the value. Ordinary keys take a
quarter of that at most (short tuples; a number has nine bytes and takes 80 ns)."""

_KEYED: Final = frozenset((str, bytes))


class HashWork:
    """The time that the dicts of one value have taken to fill.

    It is the processor time of this thread, not that of the clock: a busy machine refuses nobody. Between the chunks
    other threads have their turn.

    Args:
        size_bytes: of the value; hashing a long number takes time for each byte.
    """

    __slots__ = ("_limit", "_spent")

    def __init__(self, size_bytes: int) -> None:
        self._limit = _FREE_WORK + size_bytes * _WORK_PER_BYTE
        self._spent = 0

    def fill(self, made: dict[object, object], keys: list[Any], values: list[Any]) -> None:
        """Adds the entries to `made`.

        Args:
            made: the dict.
            keys: of the entries.
            values: as many.

        Raises:
            SerializationError: the keys collide so much that filling takes far longer than their size accounts for.
        """
        if _KEYED.issuperset(map(type, keys)):
            made.update(zip(keys, values, strict=True))
            return
        for start in range(0, len(keys), CHECKED_FROM):
            began = time.thread_time_ns()
            made.update(zip(keys[start : start + CHECKED_FROM], values[start : start + CHECKED_FROM], strict=True))
            self._spent += time.thread_time_ns() - began
            if self._spent > self._limit:
                raise SerializationError(
                    f"a dict of {len(keys)} keys arrived whose hashes collide: {start + CHECKED_FROM} of them took "
                    f"{self._spent / 1e9:.2f} s to enter. Send the entries as a list of pairs, or with keys of type str"
                )
