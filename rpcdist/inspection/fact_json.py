"""Facts as JSON, and back. The JSON of another process is not believed: types and sizes are checked."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from functools import cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from rpcdist.errors import ProtocolViolation
from rpcdist.inspection import facts as facts_module
from rpcdist.inspection.facts import LiveNotes, WorkerFacts

__all__ = ["MAX_FACTS_BYTES", "facts_from_json", "facts_to_json", "fields_of", "notes_from_json"]

MAX_FACTS_BYTES: Final = 3 << 20
"""Of the JSON of one worker."""

MAX_TEXT: Final = 2000
"""Characters of one text."""

MAX_ENTRIES: Final = 10_000
"""Of one list."""

MAX_NUMBER: Final = 1 << 64
"""Sums and quotients of numbers up to here are finite."""

T = TypeVar("T")


def facts_to_json(facts: WorkerFacts | LiveNotes) -> str:
    """One line of JSON."""
    return json.dumps(fields_of(facts), separators=(",", ":"), allow_nan=False)


def fields_of(value: Any) -> Any:
    """A fact as what `json` writes: quicker than `dataclasses.asdict`, which copies deeply."""
    if isinstance(value, tuple):
        return [fields_of(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {name: fields_of(getattr(value, name)) for name in _types_of(type(value))}  # type: ignore[arg-type]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def facts_from_json(text: str | bytes) -> WorkerFacts:
    """The facts of a worker. Fields that are not known here are left out: they are a newer version's.

    Raises:
        ProtocolViolation: the text is too long, or is not what `facts_to_json` writes.
    """
    return _from_json(WorkerFacts, text)


def notes_from_json(text: str | bytes) -> LiveNotes:
    """The notes of a worker for a live view; raises as `facts_from_json` does."""
    return _from_json(LiveNotes, text)


def _from_json(kind: type[T], text: str | bytes) -> T:
    if len(text) > MAX_FACTS_BYTES:
        raise ProtocolViolation(f"a worker sent {len(text)} bytes of facts; {MAX_FACTS_BYTES} are allowed")
    try:
        found = _read(kind, json.loads(text), "facts")
    except (ValueError, RecursionError) as exc:
        raise ProtocolViolation(f"a worker sent facts that cannot be read: {exc}") from exc
    assert isinstance(found, kind)
    return found


@cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, vars(facts_module))


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type that the facts are made of; raises `ValueError`."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        known = _types_of(kind)  # type: ignore[arg-type]
        try:
            return kind(**{name: _read(known[name], item, name) for name, item in value.items() if name in known})  # type: ignore[operator]
        except TypeError as exc:  # one is missing
            raise ValueError(f"{where}: {exc}") from exc
    origin = get_origin(kind)
    if origin is tuple:
        return _read_tuple(get_args(kind), value, where)
    if origin is dict:
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            raise ValueError(f"{where} is no object, or too large")
        return {_read(str, key, where): _read(get_args(kind)[1], item, where) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _read(next(option for option in get_args(kind) if option is not type(None)), value, where)
    if type(value) in (int, float) and not -MAX_NUMBER <= value <= MAX_NUMBER:  # or it is not a number
        raise ValueError(f"{where} is out of range")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    if kind is str:
        if len(value) > MAX_TEXT:
            raise ValueError(f"{where} has {len(value)} characters")
        return value.encode(errors="replace").decode()  # half of a surrogate pair cannot be written anywhere
    return value


def _read_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise ValueError(f"{where} is no list, or too long")
    if kinds[-1] is Ellipsis:
        return tuple(_read(kinds[0], item, where) for item in value)
    if len(kinds) != len(value):
        raise ValueError(f"{where} has {len(value)} entries, not {len(kinds)}")
    return tuple(_read(kind, item, where) for kind, item in zip(kinds, value, strict=True))
