"""A pause of Python's garbage collector while a value of very many tensors is made.

None of the new objects is garbage, and the collector looks at all of them, and at all others of the process, again and
again: of 100,000 tensors that takes as long as making them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PAUSED_FROM: Final = 10_000
"""Tensors that are made at once."""

_PAUSED: Final = 100_000_007
"""A threshold that nobody else sets: who finds it changed while it pauses leaves the new one alone."""


_before: tuple[int, ...] = gc.get_threshold()  # when the last pause began


@contextmanager
def paused_collections() -> Iterator[None]:
    """No collection begins by itself meanwhile, on any thread, unless somebody else sets thresholds; `gc.disable` and
    `gc.enable` of others keep their effect. Where two pause at once, the pause ends with the one that began it.
    """
    global _before
    before = gc.get_threshold()
    if before[0] == _PAUSED:
        yield
        return
    _before = before
    gc.set_threshold(_PAUSED, *before[1:])
    try:
        yield
    finally:
        _end(before)


def _end(before: tuple[int, ...]) -> None:
    if gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(*before)


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    # A child that was forked meanwhile may have no thread that ends the pause.
    os.register_at_fork(after_in_child=lambda: _end(_before))
