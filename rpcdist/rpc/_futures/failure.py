"""The C++ half of a future that failed.

[Note: failures in C++]
    Raising an exception stores the frames of the waiting function in it, and these hold the future: a cycle. Python
    collects it, but not where a part of it is owned by C++, and with it would leak every local variable of every
    function that waited for a failed call. So the C++ half holds a `Failure`, which has a copy that is never raised.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import NoReturn

from rpcdist.errors import Cancelled, NotInitialized
from rpcdist.rpc._values.exceptions import copied, get_traceback, traceback_of

logger = logging.getLogger("rpcdist.rpc.future")  # the public module


class Failure:
    """The C++ half of a failed future; logs the error if the program has not retrieved it."""

    __slots__ = ("_frames", "_template", "seen")

    def __init__(self, error: BaseException) -> None:
        self._template = copied(error)
        self._frames: traceback.StackSummary | None = None
        if (frames := get_traceback(error)) is not None:  # a remote error has its traceback in its cause
            self._frames = traceback.StackSummary.extract(traceback.walk_tb(frames), lookup_lines=False)
        self.seen = issubclass(type(error), Cancelled | NotInitialized)  # ended by this process

    def __repr__(self) -> str:
        return f"<failure {self._template!r}>"

    def __del__(self) -> None:
        # Finalizers should not log, but the error must not get lost; asyncio does the same.
        if self.seen or sys.is_finalizing():
            return
        frames = "".join(self._frames.format()) if self._frames is not None else ""
        logger.error("the program did not retrieve the error of a future:\n%s%s", frames, traceback_of(self._template))


def raise_failure(failure: Failure) -> NoReturn:
    """The function through which C++ turns the stored value into an error."""
    failure.seen = True
    raise copied(failure._template)
