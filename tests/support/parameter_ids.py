"""Names of parametrized tests, the same in every process: the workers of one run must collect the same tests."""

from __future__ import annotations

import re

__all__ = ["short_repr"]


def short_repr(value: object, max_chars: int = 50) -> str:
    """The beginning of `repr(value)` in ASCII, without the addresses of objects; the members of a set in order."""
    if isinstance(value, set | frozenset):
        return short_repr((type(value).__name__, *sorted(value)), max_chars)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:max_chars].encode("ascii", "replace").decode()
