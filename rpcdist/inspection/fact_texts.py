"""Converts facts to JSON and back, and an explanation to text. Checks types and sizes in JSON from other processes."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import isfinite
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from rpcdist.errors import ProtocolViolation, raised_as
from rpcdist.inspection import facts as facts_module
from rpcdist.inspection.facts import LiveNotes, WorkerFacts
from rpcdist.inspection.waits import Chain, Explanation, WaitLink

MAX_FACTS_BYTES: Final = 3 << 20
"""The limit of one worker's JSON."""

MAX_TEXT: Final = 2000
"""The limit of one text, in characters."""

MAX_ENTRIES: Final = 10_000
"""The limit of one list."""

MAX_NUMBER: Final = 1 << 64
"""The largest number, so that sums and quotients are finite."""

T = TypeVar("T")


def facts_to_json(facts: WorkerFacts | LiveNotes) -> str:
    """Returns the facts as one line of JSON."""
    return json.dumps(fields_of(facts), separators=(",", ":"), allow_nan=False)


def fields_of(facts: Any) -> dict[str, Any]:
    """Converts a dataclass of facts to values that `json` writes."""
    return {name: _plain(getattr(facts, name)) for name in facts.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) else None
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return fields_of(value) if dataclasses.is_dataclass(value) else value


def facts_from_json(text: str | bytes) -> WorkerFacts:
    """Returns the facts of a worker. Ignores unknown fields, which come from a newer version.

    Raises:
        ProtocolViolation: the text is too long, or not from `facts_to_json`.
    """
    return _from_json(WorkerFacts, text)


def notes_from_json(text: str | bytes) -> LiveNotes:
    """Returns the notes of a worker for a live view; raises like `facts_from_json`."""
    return _from_json(LiveNotes, text)


def _from_json(kind: type[T], text: str | bytes) -> T:
    if len(text) > MAX_FACTS_BYTES:
        raise ProtocolViolation(f"a worker sent {len(text)} bytes of facts, but at most {MAX_FACTS_BYTES} are allowed")
    with raised_as(ProtocolViolation, "a worker sent facts that cannot be read", ValueError, RecursionError):
        read: Callable[[Any, str], Any] = _reader(kind)  # type: ignore[arg-type] # types are hashable
        found = read(json.loads(text), "facts")
    assert isinstance(found, kind)
    return found


# An inspection of 100 workers reads 20,000 fields, twice a second, so types are analysed only once.


@cache
def _reader(kind: Any) -> Callable[[Any, str], Any]:
    """Returns a function that reads a value of a type; it gets the name of the place, and raises `ValueError`."""
    if dataclasses.is_dataclass(kind):
        types_of = get_type_hints(kind, vars(facts_module))
        return partial(_read_object, kind, {name: _reader(one) for name, one in types_of.items()})
    kinds = get_args(kind)
    if get_origin(kind) is types.UnionType:  # with None
        read = _reader(next(option for option in kinds if option is not type(None)))
        return lambda value, where: None if value is None else read(value, where)
    if get_origin(kind) is dict:
        return partial(_read_dict, _reader(kinds[1]))
    if get_origin(kind) is tuple:
        if kinds[-1] is Ellipsis:
            return partial(_read_list, _reader(kinds[0]))
        return partial(_read_tuple, [_reader(one) for one in kinds])
    return {str: _read_text, float: _read_float}.get(kind) or partial(_read_exact, kind)


def _read_object(kind: Any, readers: dict[str, Callable[[Any, str], Any]], value: Any, where: str) -> Any:
    if type(value) is not dict:
        raise ValueError(f"{where} is not an object")
    try:
        return kind(**{name: readers[name](item, name) for name, item in value.items() if name in readers})
    except TypeError as exc:  # a field is missing
        raise ValueError(f"{where}: {exc}") from exc


def _read_dict(read: Callable[[Any, str], Any], value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict or len(value) > MAX_ENTRIES:
        raise ValueError(f"{where} is not an object, or too large")
    return {_read_text(key, where): read(item, where) for key, item in value.items()}


def _read_list(read: Callable[[Any, str], Any], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list or len(value) > MAX_ENTRIES:
        raise ValueError(f"{where} is not a list, or too long")
    return tuple([read(item, where) for item in value])


def _read_tuple(readers: Sequence[Callable[[Any, str], Any]], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list or len(value) != len(readers):
        raise ValueError(f"{where} is not a list of {len(readers)} entries")
    return tuple([read(item, where) for read, item in zip(readers, value, strict=True)])


def _read_text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} is a {type(value).__name__}, not a str")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{where} has {len(value)} characters")
    # Half of a surrogate pair cannot be encoded.
    return value if value.isascii() else value.encode(errors="replace").decode()


def _read_float(value: Any, where: str) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{where} is a {type(value).__name__}, not a float")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:  # also for NaN
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
    """Returns the text: first the ends of all waits, then each chain with its stacks."""
    if not explanation.chains:
        return "no worker waits: no call, collective or backward pass is older than the limit"
    lines = [f"DEADLOCK: {sentence}" for sentence in explanation.deadlocks]
    for culprit, number in explanation.culprits:
        lines.append(f"{number} {'chain ends' if number == 1 else 'chains end'} here: {culprit}")
    if not lines:
        lines.append("each chain ends at a call that has just begun: the work that waits for it makes progress")
    shown: set[str] = set()
    chain_of: dict[tuple[WaitLink, ...], int] = {}  # the chain that showed each end
    for number, chain in enumerate(explanation.chains[:most_chains], 1):
        lines += ["", f"chain {number}{' (ends in a circle)' if chain.is_circle else ''}:"]
        lines += _chain_lines(chain, number, shown, chain_of)
    if len(explanation.chains) > most_chains:
        lines += ["", f"{len(explanation.chains) - most_chains} more chains are not shown"]
    return printable_lines("\n".join(lines))


def _chain_lines(
    chain: Chain, number: int, shown: set[str], chain_of: dict[tuple[WaitLink, ...], int]
) -> Iterator[str]:
    """Returns the lines of a chain, without the end that an earlier chain has already shown."""
    for depth, link in enumerate(chain.links):
        indent = "  " * (depth + 1)
        rest = chain.links[depth:]
        before = chain_of.setdefault(rest, number)
        if before != number and len(rest) > 1:
            yield f"{indent}{link.worker}: {link.text}, and so on as in chain {before}"
            return
        yield f"{indent}{link.worker}: {link.text}"
        yield from (f'{indent}    File "{frame.file}", line {frame.line}, in {frame.function}' for frame in link.stack)
        if link.details and link.details not in shown:
            shown.add(link.details)
            yield from (f"{indent}    | {line}" for line in link.details.splitlines()[:MAX_DETAIL_LINES])


def printable_lines(text: str) -> str:
    """Removes control characters of terminals from other processes' text."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
