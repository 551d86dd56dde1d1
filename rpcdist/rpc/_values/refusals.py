"""Why a value cannot be sent: finds the part, for an error that names it."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType

import torch
from torch.nn import Parameter

from rpcdist.rpc._values.pickled import write_pickle
from rpcdist.rpc._values.plain import MAX_DEPTH, MAX_ITEMS
from rpcdist.rpc._values.tensors import DTYPE_CODES, Externals

MAX_TRIALS = 1000
"""So many parts are pickled in the search for the one that fails."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def why_not_plain(obj: object, externals: Externals | None, name: str = "value") -> str:
    """A sentence that names the first part of `obj` that cannot be sent without pickle, by its path."""
    seen: set[int] = set()
    pending: list[tuple[object, str, int]] = [(obj, name, 0)]
    while pending:
        item, path, depth = pending.pop()
        kind = type(item)
        if kind in (list, tuple, dict):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if depth > MAX_DEPTH:
                return f"{path} is nested deeper than {MAX_DEPTH} containers, which only pickle can send"
            pending.extend((part, path + step, depth + 1) for part, step in reversed(_parts(item)))
            continue
        if kind in (torch.Tensor, Parameter):
            assert isinstance(item, torch.Tensor)
            if item.layout is not torch.strided or item.is_nested or item.dtype not in DTYPE_CODES:
                return f"{path} is a tensor of {item.layout} and {item.dtype}; only dense ones go without pickle"
            continue
        if kind in _SCALARS or (externals is not None and externals.is_external(item)):
            continue
        return (
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which only pickle can send, and pickle is off here. "
            "Send None, bool, numbers, str, bytes, tensors, and lists, tuples and dicts of them"
        )
    return (
        f"{name} has more parts than may go without pickle ({MAX_ITEMS}): put numbers into a tensor, or send it in "
        "several calls"
    )


def _parts(item: object) -> list[tuple[object, str]]:
    if isinstance(item, dict):
        keys = [(key, f".key({key!r:.40})") for key in item]
        return [
            part
            for key, entry in zip(keys, item.items(), strict=True)
            for part in (key, (entry[1], f"[{entry[0]!r:.40}]"))
        ]
    assert isinstance(item, list | tuple)
    return [(part, f"[{index}]") for index, part in enumerate(item)]


def unpicklable_part(obj: object, name: str, externals: Externals | None, by_value: bool) -> str | None:
    """A sentence that names the innermost part of `obj` that does not pickle; None if all of it does.

    Runs user code (`__reduce__`), as sending does.
    """
    trials = MAX_TRIALS
    item, path = obj, name
    if _pickles(item, externals, by_value):
        return None
    seen: set[int] = set()
    while trials > 0 and id(item) not in seen:
        seen.add(id(item))
        for part, step in _picklable_parts(item):
            trials -= 1
            if trials <= 0:
                break
            if not _pickles(part, externals, by_value):
                item, path = part, path + step
                break
        else:
            break
    kind = type(item)
    return f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be pickled"


def _pickles(item: object, externals: Externals | None, by_value: bool) -> bool:
    try:
        write_pickle(item, externals, by_value)
    except Exception:  # whatever it is, the part cannot be sent
        return False
    return True


def _held_parts(function: FunctionType) -> list[tuple[object, str]]:
    """The objects that a function by value takes along."""
    code = function.__code__
    parts = [
        (default, ".default") for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    ]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            parts.append((cell.cell_contents, f".closure[{name!r}]"))
    used = [name for name in code.co_names if name in function.__globals__]
    return parts + [(function.__globals__[name], f".globals[{name!r}]") for name in used]


def _picklable_parts(item: object) -> list[tuple[object, str]]:
    if isinstance(item, dict):
        return [(value, f"[{key!r:.40}]") for key, value in item.items()] + [
            (key, f".key({key!r:.40})") for key in item
        ]
    if isinstance(item, list | tuple):
        return [(part, f"[{index}]") for index, part in enumerate(item)]
    if isinstance(item, set | frozenset):
        return [(part, f".item({part!r:.40})") for part in item]
    if isinstance(item, type):
        return []
    if isinstance(item, FunctionType):
        return _held_parts(item)
    attributes = getattr(item, "__dict__", None)
    return [(part, f".{name}") for name, part in attributes.items()] if isinstance(attributes, dict) else []
