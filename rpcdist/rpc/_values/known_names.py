"""Names of functions that were found before: each is looked up once more, and not worked out again."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Final

MAX_KNOWN: Final = 4096


class KnownNames:
    """What `function_reference` has returned for functions and classes at the top level of modules. Any thread.

    A name holds as long as its module still has the same object there: reloading and patching a module are noticed.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[object, tuple[str, str, str]] = {}  # module, name in it, and name on the wire

    def __repr__(self) -> str:
        return f"<KnownNames [{len(self._known)}]>"

    def find(self, func: object) -> str | None:
        """The name on the wire; None if it is not known, or leads to something else now."""
        # Of other types equality, or the hash, may run code of users, or mean what they hold.
        known = self._known.get(func) if type(func) is FunctionType or type(func) is type else None
        if known is None:
            return None
        module = sys.modules.get(known[0])
        if module is not None and getattr(module, known[1], None) is func:
            return known[2]
        self._known.pop(func, None)  # deleted or replaced: nothing else would let go of it
        return None

    def note(self, func: object, encoded: str) -> None:
        """Keeps what `function_reference` has returned, if it is the name of something at the top level of a module."""
        if type(func) is FunctionType or type(func) is type:
            module, name = func.__module__, func.__qualname__
            if "." not in name:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()  # those in use are soon back
                self._known[func] = module, name, encoded
