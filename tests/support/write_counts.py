"""Counts the writes to the sockets of channels; driver and workers import this module."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["counted_writes", "mark", "num_writes", "start_counting", "stop_counting", "writes_between_marks"]

_sendmsg: Any = socket.socket.sendmsg
_num_writes = itertools.count()
_seen = 0
_marks: list[int] = []


def _counting(self: socket.socket, *arguments: Any) -> int:
    global _seen
    _seen = next(_num_writes) + 1
    sent: int = _sendmsg(self, *arguments)
    return sent


def start_counting() -> None:
    """Forgets the marks, too."""
    _marks.clear()
    socket.socket.sendmsg = _counting  # type: ignore[assignment,method-assign]


def stop_counting() -> None:
    socket.socket.sendmsg = _sendmsg  # type: ignore[method-assign]


def num_writes() -> int:
    return _seen


def mark() -> None:
    """The first thing that happens in each step."""
    _marks.append(_seen)


def writes_between_marks() -> list[int]:
    return [after - before for before, after in itertools.pairwise(_marks)]


@contextmanager
def counted_writes() -> Iterator[None]:
    start_counting()
    try:
        yield
    finally:
        stop_counting()
