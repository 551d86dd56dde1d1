"""Facts as JSON, and back, and an explanation as text. The JSON of another process is checked: types and sizes."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import isfinite
from operator import attrgetter
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from rpcdist.errors import ProtocolViolation
from rpcdist.inspection import facts as facts_module
from rpcdist.inspection.facts import Frame, LiveNotes, WorkerFacts
from rpcdist.inspection.waits import Chain, Explanation, WaitLink

__all__ = [
    "MAX_FACTS_BYTES",
    "describe",
    "facts_from_json",
    "facts_to_json",
    "fields_of",
    "notes_from_json",
    "printable_lines",
]

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


def fields_of(facts: Any) -> dict[str, Any]:
    """One of the dataclasses of facts as what `json` writes."""
    write = _writer(type(facts))  # type: ignore[arg-type] # types are hashable
    assert write is not None
    fields: dict[str, Any] = write(facts)
    return fields


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
        read: Callable[[Any, str], Any] = _reader(kind)  # type: ignore[arg-type] # types are hashable
        found = read(json.loads(text), "facts")
    except (ValueError, RecursionError) as exc:
        raise ProtocolViolation(f"a worker sent facts that cannot be read: {exc}") from exc
    assert isinstance(found, kind)
    return found


@cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, vars(facts_module))


# A look at a job of 100 workers writes and reads 20,000 fields, twice a second: what a type needs is found out once.


@cache
def _writer(kind: Any) -> Callable[[Any], Any] | None:
    """Makes what `json` writes of a value of this type; None if the value is that already."""
    if kind is float:
        return _finite
    if dataclasses.is_dataclass(kind):
        return _object_writer(_types_of(kind))  # type: ignore[arg-type]
    if (item := _optional(kind)) is not None:
        return None if (write := _writer(item)) is None else partial(_write_optional, write)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            return None if (write := _writer(kinds[0])) is None else partial(_write_list, write)
        writers = [_writer(one) or _same for one in kinds]
        return lambda value: [write(one) for write, one in zip(writers, value, strict=True)]
    return None


def _object_writer(types: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    names = tuple(types)
    values_of = attrgetter(*names)  # each class of facts has several fields: of one it would return no tuple
    writers = [(name, write) for name, kind in types.items() if (write := _writer(kind)) is not None]

    def write_object(value: Any) -> dict[str, Any]:
        fields = dict(zip(names, values_of(value), strict=True))
        for name, write in writers:
            fields[name] = write(fields[name])
        return fields

    return write_object


def _write_optional(write: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else write(value)


def _write_list(write: Callable[[Any], Any], value: Any) -> list[Any]:
    return [write(one) for one in value]


def _finite(value: float) -> float | None:
    return round(value, 6) if isfinite(value) else None


def _same(value: Any) -> Any:
    return value


def _optional(kind: Any) -> Any:
    """The type of which a value may be None; None if it may not."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(option for option in get_args(kind) if option is not type(None))
    return None


@cache
def _reader(kind: Any) -> Callable[[Any, str], Any]:
    """Reads a value of a type that the facts are made of, at a place that is named; it raises `ValueError`."""
    if dataclasses.is_dataclass(kind):
        return partial(_read_object, kind, {name: _reader(one) for name, one in _types_of(kind).items()})  # type: ignore[arg-type]
    if (item := _optional(kind)) is not None:
        read = _reader(item)
        return lambda value, where: None if value is None else read(value, where)
    kinds = get_args(kind)
    if get_origin(kind) is dict:
        return partial(_read_dict, _reader(kinds[1]))
    if get_origin(kind) is tuple:
        if kinds[-1] is Ellipsis:
            return partial(_read_list, _reader(kinds[0]))
        return partial(_read_tuple, [_reader(one) for one in kinds])
    return {str: _read_text, float: _read_float}.get(kind) or partial(_read_exact, kind)


def _read_object(kind: Any, readers: dict[str, Callable[[Any, str], Any]], value: Any, where: str) -> Any:
    if type(value) is not dict:
        raise ValueError(f"{where} is no object")
    try:
        return kind(**{name: readers[name](item, name) for name, item in value.items() if name in readers})
    except TypeError as exc:  # one is missing
        raise ValueError(f"{where}: {exc}") from exc


def _read_dict(read: Callable[[Any, str], Any], value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict or len(value) > MAX_ENTRIES:
        raise ValueError(f"{where} is no object, or too large")
    return {_read_text(key, where): read(item, where) for key, item in value.items()}


def _read_list(read: Callable[[Any, str], Any], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list or len(value) > MAX_ENTRIES:
        raise ValueError(f"{where} is no list, or too long")
    return tuple([read(item, where) for item in value])


def _read_tuple(readers: Sequence[Callable[[Any, str], Any]], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(readers):
        raise ValueError(f"{where} is no list of {len(readers)} entries")
    return tuple([read(item, where) for read, item in zip(readers, value, strict=True)])


def _read_text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} is a {type(value).__name__}, not a str")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{where} has {len(value)} characters")
    # Half of a surrogate pair cannot be written anywhere.
    return value if value.isascii() else value.encode(errors="replace").decode()


def _read_float(value: Any, where: str) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{where} is a {type(value).__name__}, not a float")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:  # or it is not a number
        raise ValueError(f"{where} is out of range")
    return float(value)


def _read_exact(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    if type(value) is int and not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"{where} is out of range")
    return value


MAX_DETAIL_LINES: Final = 60


def describe(explanation: Explanation, most_chains: int = 20) -> str:
    """The text: first the ends of all waits, and then each chain with its stacks."""
    if not explanation.chains:
        return "nothing waits: no call, collective or backward pass is older than the limit"
    lines = [f"DEADLOCK: {sentence}" for sentence in explanation.deadlocks]
    for culprit, number in explanation.culprits:
        lines.append(f"{number} {'chain ends' if number == 1 else 'chains end'} here: {culprit}")
    if not lines:
        lines.append("each chain ends at a call that has just begun: the work that waits for it goes on")
    shown: set[str] = set()
    chain_of: dict[tuple[WaitLink, ...], int] = {}  # of each end of a chain that was shown
    for number, chain in enumerate(explanation.chains[:most_chains], 1):
        lines += ["", f"chain {number}{' (ends in a circle)' if chain.is_circle else ''}:"]
        lines += _chain_lines(chain, number, shown, chain_of)
    if len(explanation.chains) > most_chains:
        lines += ["", f"{len(explanation.chains) - most_chains} more chains are not shown"]
    return printable_lines("\n".join(lines))


def _chain_lines(
    chain: Chain, number: int, shown: set[str], chain_of: dict[tuple[WaitLink, ...], int]
) -> Iterator[str]:
    """The lines of a chain; the end that it has in common with one before is left out."""
    for depth, link in enumerate(chain.links):
        indent = "  " * (depth + 1)
        rest = chain.links[depth:]
        before = chain_of.setdefault(rest, number)
        if before != number and len(rest) > 1:
            yield f"{indent}{link.worker}: {link.text}, and so on as in chain {before}"
            return
        yield f"{indent}{link.worker}: {link.text}"
        yield from (f"{indent}    {_frame_text(frame)}" for frame in link.stack)
        if link.details and link.details not in shown:
            shown.add(link.details)
            yield from (f"{indent}    | {line}" for line in link.details.splitlines()[:MAX_DETAIL_LINES])


def _frame_text(frame: Frame) -> str:
    return f'File "{frame.file}", line {frame.line}, in {frame.function}'


def printable_lines(text: str) -> str:
    """Text of other processes without characters that a terminal would act on."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
