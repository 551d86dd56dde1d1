"""Looks up what a peer has named without import, and without code of a module.

`getattr` is no such look-up: a module may have a `__getattr__` (PEP 562), be of a class of its own that imports what is
asked for (lazy packages, `importlib.util.LazyLoader`), and a class may have a metaclass, and descriptors. Here only
what lies in the dictionaries of modules and classes is found.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Final

_MRO: Final[Any] = type.__dict__["__mro__"]
_CLASS_DICT: Final[Any] = type.__dict__["__dict__"]
_CALLABLES: Final = frozenset(
    (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
        staticmethod,
        classmethod,
    )
)
"""What a class may hold whose binding to the class runs no code but the interpreter's."""


def look_up_quietly(module_name: str, path: str) -> Any:
    """What "module:path" names: attributes of modules and classes, the last one of them any object.

    Raises:
        AttributeError: the module is not loaded, or what is named is not in the dictionaries.
    """
    found: Any = sys.modules.get("__main__" if module_name == "__mp_main__" else module_name)
    if found is None:
        raise AttributeError(f"module {module_name!r} is not loaded here, and nothing is imported for a peer")
    for part in path.split("."):
        found = _member(found, part)
    return found


def _member(owner: Any, name: str) -> Any:
    kind = type(owner)  # `isinstance` would ask the object for its `__class__`
    if issubclass(kind, types.ModuleType):
        members = object.__getattribute__(owner, "__dict__")
        if name in members:
            return members[name]
    elif issubclass(kind, type):
        for base in _MRO.__get__(owner):
            members = _CLASS_DICT.__get__(base)
            if name in members:
                found = members[name]
                return found.__get__(None, owner) if type(found) in _CALLABLES else found
    raise AttributeError(f"it has no {name!r} of its own")
