"""The operations of a store as data: one class for each, with its parameters and its result.

The public methods of `Store` make them, and `Store.execute` runs them; in between they may get a prefix, travel to
another process, or wait. `decide` defines an operation: from the contents of a table it computes the result and the
changes. It changes nothing itself, so that a file can be written before the changes are applied, and an operation that
must wait can simply be tried again.

The semantics are those of torch's stores, found by experiments: a value and a queue of the same name can coexist;
queues count for `check` and `wait`, but not for `num_keys`, `list_keys` and `delete_key`; `compare_set` on a missing
key writes only if the expected value is empty; `add` stores decimal text and wraps at 64 bits.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import filterfalse, repeat
from typing import ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from rpcdist.errors import DistStoreError


class Code(enum.IntEnum):
    """The kind of a change. `FileStore` writes the numbers to its files."""

    SET = 1
    APPEND = 2
    DELETE = 3
    PUSH = 4
    POP = 5
    OPENED = 6  # a process with a known world size began to use the file
    CLOSED = 7  # such a process has ended its use of the file


class Change(NamedTuple):
    """One change of the contents; it always succeeds, because the operation has checked the contents."""

    code: Code
    key: str = ""
    value: bytes = b""


class Contents:
    """Keys with values, and queues, which have separate names. An empty queue is removed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes | bytearray] = {}  # one that grows is changed in place, and not copied each time
        self.queues: dict[str, deque[bytes]] = {}

    def without_value(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` that have no value, in order."""
        return tuple(filterfalse(self.values.__contains__, keys))

    def without_value_or_queue(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` that name neither a value nor a queue, in order."""
        return tuple(filterfalse(self.queues.__contains__, self.without_value(keys)))

    def apply(self, change: Change) -> None:
        """Applies a change. `OPENED` and `CLOSED` concern only the file and change nothing here."""
        key, value = change.key, change.value
        match change.code:
            case Code.SET:
                self.values[key] = value
            case Code.APPEND:
                found = self.values.get(key, b"")
                if not isinstance(found, bytearray):
                    found = self.values[key] = bytearray(found)
                found += value
            case Code.DELETE:
                del self.values[key]
            case Code.PUSH:
                self.queues.setdefault(key, deque()).append(value)
            case Code.POP:
                self.queues[key].popleft()
                if not self.queues[key]:
                    del self.queues[key]


R_co = TypeVar("R_co", covariant=True)

LARGEST_BYTES: Final = 128 << 20
"""The limit of the keys and values of one operation, of a value, and of a reply from another process."""
_ITEM_BYTES: Final = 8  # the overhead of each key and value in a message
_NUMBER = re.compile(rb"\s*([+-]?\d{1,30})")
_MAX_NUMBER_BYTES: Final = 100  # with white space before it, of which a value may have any amount
_NAMES_KEYS: Final = frozenset({"key", "keys", "prefix"})
"""The fields of operations that contain keys or the start of keys."""
_WORD_START = re.compile("(?<!^)(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Missing:
    """The result of an operation that needs keys that do not exist: the caller waits for them, or gives up."""

    keys: tuple[str, ...]


Decision = tuple[R_co | Missing, tuple[Change, ...]]
"""The result of an operation, and its changes of the contents."""


class StoreOperation(ABC, Generic[R_co]):
    """An operation whose result has the type `R_co`.

    Attributes:
        method: the method of `Store` that makes it; torch's name for the operation.
        read_only: whether it never changes the contents.
    """

    __slots__ = ()
    method: ClassVar[str]
    read_only: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.method = _WORD_START.sub("_", cls.__name__).lower()

    @classmethod
    @cache
    def parameters(cls) -> list[str]:
        """Returns the names of the fields, which are also the fields of its message; do not change the list."""
        return [field.name for field in fields(cls)]  # type: ignore[arg-type]  # each of the classes is a dataclass

    @property
    def arguments(self) -> tuple[object, ...]:
        """Returns the values of the fields, which are the arguments of torch's method if that takes one key."""
        return tuple(getattr(self, name) for name in self.parameters())

    @property
    def size_bytes(self) -> int:
        """The size of its keys and values."""
        return sum(_size_bytes(argument) for argument in self.arguments)

    @abstractmethod
    def decide(self, contents: Contents) -> Decision[R_co]:
        """Returns the result and the changes of the operation; `Missing` if it must wait."""

    def under(self, prefix: str) -> Self:
        """Returns the same operation with `prefix` before each key."""
        changed: dict[str, str | tuple[str, ...]] = {}
        for name in _NAMES_KEYS.intersection(self.parameters()):
            given = getattr(self, name)
            changed[name] = prefix + given if isinstance(given, str) else tuple(prefix + key for key in given)
        return replace(self, **changed) if changed else self  # type: ignore[type-var]  # likewise


# ---------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class Set(StoreOperation[None]):
    """Sets all keys, at one instant; returns None. `multi_set` has several keys."""

    keys: tuple[str, ...]
    values: tuple[bytes, ...]

    def decide(self, contents: Contents) -> Decision[None]:
        if len(self.keys) != len(self.values):
            raise DistStoreError(f"cannot set {len(self.keys)} keys to {len(self.values)} values")
        return None, tuple(map(Change, repeat(Code.SET), self.keys, self.values))


@dataclass(frozen=True, slots=True)
class Get(StoreOperation[tuple[bytes, ...]]):
    """Waits for all keys and returns their values, as of one instant. `multi_get` has several keys."""

    keys: tuple[str, ...]
    read_only = True

    def decide(self, contents: Contents) -> Decision[tuple[bytes, ...]]:
        missing = contents.without_value(self.keys)
        if missing:
            return Missing(missing), ()
        found = {key: bytes(contents.values[key]) for key in dict.fromkeys(self.keys)}  # a copy of each value
        return tuple(map(found.__getitem__, self.keys)), ()


@dataclass(frozen=True, slots=True)
class Wait(StoreOperation[None]):
    """Waits until each key has a value or a queue; returns None."""

    keys: tuple[str, ...]
    read_only = True

    def decide(self, contents: Contents) -> Decision[None]:
        missing = contents.without_value_or_queue(self.keys)
        return (Missing(missing) if missing else None), ()


@dataclass(frozen=True, slots=True)
class Check(StoreOperation[bool]):
    """Returns whether each key has a value or a queue."""

    keys: tuple[str, ...]
    read_only = True

    def decide(self, contents: Contents) -> Decision[bool]:
        return not contents.without_value_or_queue(self.keys), ()


@dataclass(frozen=True, slots=True)
class Add(StoreOperation[int]):
    """Adds `amount` to the number of `key`, or to 0 if it is missing, and returns the sum."""

    key: str
    amount: int

    def decide(self, contents: Contents) -> Decision[int]:
        number = next_number(self.key, contents.values.get(self.key), self.amount)
        return number, (Change(Code.SET, self.key, str(number).encode()),)


@dataclass(frozen=True, slots=True)
class Append(StoreOperation[None]):
    """Appends to the value of `key`, or to an empty value if it is missing; returns None."""

    key: str
    value: bytes

    def decide(self, contents: Contents) -> Decision[None]:
        size_bytes = len(contents.values.get(self.key, b"")) + len(self.value)
        if size_bytes > LARGEST_BYTES:
            raise DistStoreError(
                f"cannot append to key {self.key!r}: its value would have {size_bytes} bytes, but the limit is "
                f"{LARGEST_BYTES} ({LARGEST_BYTES >> 20} MiB)"
            )
        return None, (Change(Code.APPEND, self.key, self.value),)


@dataclass(frozen=True, slots=True)
class CompareSet(StoreOperation[bytes]):
    """Sets `key` if its value is `expected`; returns the value after that, or `expected` if `key` stays missing."""

    key: str
    expected: bytes
    desired: bytes

    def decide(self, contents: Contents) -> Decision[bytes]:
        current = contents.values.get(self.key)
        if current is None and self.expected:
            return self.expected, ()
        if current is None or current == self.expected:
            return self.desired, (Change(Code.SET, self.key, self.desired),)
        return bytes(current), ()


@dataclass(frozen=True, slots=True)
class DeleteKey(StoreOperation[bool]):
    """Removes the value of `key`; returns whether it had one."""

    key: str

    def decide(self, contents: Contents) -> Decision[bool]:
        there = self.key in contents.values
        return there, (Change(Code.DELETE, self.key),) if there else ()


@dataclass(frozen=True, slots=True)
class NumKeys(StoreOperation[int]):
    """Returns the number of keys in the whole table."""

    read_only = True

    def decide(self, contents: Contents) -> Decision[int]:
        return len(contents.values), ()


@dataclass(frozen=True, slots=True)
class ListKeys(StoreOperation[tuple[str, ...]]):
    """Returns the keys that start with `prefix`."""

    prefix: str = ""
    read_only = True

    def decide(self, contents: Contents) -> Decision[tuple[str, ...]]:
        return tuple(key for key in contents.values if key.startswith(self.prefix)), ()


# ---------------------------------------------------------------- queues


@dataclass(frozen=True, slots=True)
class QueuePush(StoreOperation[None]):
    """Puts a value at the end of the queue `key`; returns None."""

    key: str
    value: bytes

    def decide(self, contents: Contents) -> Decision[None]:
        return None, (Change(Code.PUSH, self.key, self.value),)


@dataclass(frozen=True, slots=True)
class QueuePop(StoreOperation[bytes]):
    """Takes the first value of the queue `key` and returns it; waits for a value."""

    key: str

    def decide(self, contents: Contents) -> Decision[bytes]:
        queue = contents.queues.get(self.key)
        return (queue[0], (Change(Code.POP, self.key),)) if queue else (Missing((self.key,)), ())


@dataclass(frozen=True, slots=True)
class QueueLen(StoreOperation[int]):
    """Returns the number of values in the queue `key`."""

    key: str
    read_only = True

    def decide(self, contents: Contents) -> Decision[int]:
        return len(contents.queues.get(self.key, ())), ()


def _size_bytes(argument: object) -> int:
    match argument:
        case tuple():
            return sum(map(_size_bytes, argument))
        case str():
            return _ITEM_BYTES + (len(argument) if argument.isascii() else len(argument.encode("utf-8", "replace")))
        case bytes():
            return _ITEM_BYTES + len(argument)
    return _ITEM_BYTES


def next_number(key: str, text: bytes | bytearray | None, amount: int) -> int:
    """Returns the sum that `add` stores, wrapped to a signed 64-bit number as in torch."""
    match = _NUMBER.match(text[:_MAX_NUMBER_BYTES]) if text is not None else None
    if text is not None and match is None:
        shown = bytes(text) if len(text) <= 40 else bytes(text[:40]) + b"..."
        raise DistStoreError(f"cannot add to key {key!r}: its value {shown!r} is not a number")
    total = (int(match[1]) if match else 0) + amount
    return (total + 2**63) % 2**64 - 2**63
