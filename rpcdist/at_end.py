"""What is to be done when an object is freed, without an instruction of Python at that moment.

[Note: Ctrl-C in finalizers] Python runs the handlers of signals between any two instructions of the main thread, those
of a `__del__` included, and throws away what a finalizer raises. A Ctrl-C that strikes there is lost, and so is what
the finalizer had still to do: a reference would never be released. No `try` helps, as the first chance comes before it.
A finalizer that is written in C, and calls nothing but C, leaves no such gap. The callback of a weak reference would be
one, but the collector runs those before any `__del__`, which may still use what they call freed.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class AtEnd(partial[object]):
    """Calls its function, with its arguments, when it is freed: `self._at_end = AtEnd(queue.append, what)`.

    The function has to be written in C, as `deque.append` is, and to be safe on any thread at any moment. Among objects
    that the collector frees together it runs as any `__del__` does, usually in the order in which they were made.
    """

    __slots__ = ()
    __del__ = partial.__call__

    def __reduce__(self) -> Any:
        raise TypeError("what happens once, at the end of an object, cannot be copied or pickled")
