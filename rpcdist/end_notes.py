"""Notes the end of objects in a queue, without an instruction of Python at that moment.

[Note: Ctrl-C in finalizers] Python runs the handlers of signals between any two instructions of the main thread, those
of a `__del__` included, and throws away what a finalizer raises. A Ctrl-C that strikes there is lost, and so is what
the finalizer had still to do: a reference would never be released. No `try` helps, as the first chance comes before it.
The callback of a weak reference that is written in C, as `deque.append` is, leaves no such gap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["EndNote"]

A = TypeVar("A")


class EndNote(weakref.ref[Any], Generic[A]):
    """Goes into a queue when an object is freed, on any thread; whoever keeps the note decides that it shall.

    Args:
        watched: the object. Its note has to outlive it, so it cannot be kept there.
        append: puts the note into a queue; a function written in C, see [Note: Ctrl-C in finalizers].
        about: what the reader of the queue needs to know; it must not keep the object alive.

    Attributes:
        about: the argument.
    """

    __slots__ = ("about",)

    def __new__(cls, watched: object, append: Callable[[EndNote[A]], object], about: A) -> EndNote[A]:
        return super().__new__(cls, watched, append)

    def __init__(self, watched: object, append: Callable[[EndNote[A]], object], about: A) -> None:
        self.about = about
