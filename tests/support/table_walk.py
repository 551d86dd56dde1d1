"""Finds the tables of a worker: the sizes of all containers that its agent leads to, by where they are."""

from __future__ import annotations

import gc
import threading
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

_CONTAINERS: Final = (dict, list, set, frozenset, deque)
_LEAVES: Final = (str, bytes, bytearray, int, float, type, types.ModuleType, threading.Thread, types.FrameType)


def tables(root: object) -> dict[str, int]:
    """The containers that objects of this package lead to, from `root` on: path and length.

    Keys and entries are walked, too. A path names attributes only, so that the entries of one table share a path, and
    the lengths of tables in them are added up.
    """
    gc.collect()
    found: dict[str, int] = {}
    seen: set[int] = set()
    left: deque[tuple[str, object]] = deque([("agent", root)])
    while left:
        path, thing = left.popleft()
        if id(thing) in seen or isinstance(thing, _LEAVES) or thing is None:
            continue
        seen.add(id(thing))
        if isinstance(thing, _CONTAINERS):
            found[path] = found.get(path, 0) + len(thing)
            entries = list(thing.items()) if isinstance(thing, dict) else list(thing)
            left.extend((f"{path}[]", entry) for entry in entries)
        elif isinstance(thing, tuple):
            left.extend((path, entry) for entry in thing)
        else:
            left.extend((f"{path}.{name}", value) for name, value in _attributes(thing))
    return found


def _attributes(thing: Any) -> Iterator[tuple[str, object]]:
    if isinstance(thing, types.MethodType):
        yield "self", thing.__self__
        return
    if isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        return
    if isinstance(thing, types.BuiltinMethodType) and isinstance(thing.__self__, _CONTAINERS):
        yield "self", thing.__self__
        return
    if not type(thing).__module__.startswith("rpcdist"):
        return
    names = {*getattr(thing, "__dict__", ()), *(slot for kind in type(thing).__mro__ for slot in _slots(kind))}
    for name in sorted(names):
        try:
            yield name, object.__getattribute__(thing, name)
        except AttributeError:
            continue


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The tables that are larger than before."""
    return {path: (before.get(path, 0), size) for path, size in after.items() if size > before.get(path, 0)}
