"""The contents of a store's table, keys with values and queues, and the changes that turn one state into the next."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Code(enum.IntEnum):
    """What a change does. The numbers stand in the files of `FileStore`."""

    SET = 1
    APPEND = 2
    DELETE = 3
    PUSH = 4
    POP = 5
    OPENED = 6  # a process with a known world size began to use the file
    CLOSED = 7  # it will not use the file any more


class Change(NamedTuple):
    """One change of the contents; it always succeeds, because the operation that asks for it looked first."""

    code: Code
    key: str = ""
    value: bytes = b""


class Contents:
    """Keys with values, and queues, which have names of their own. An empty queue is removed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}

    def __repr__(self) -> str:
        return f"<Contents [{len(self.values)} keys, {len(self.queues)} queues]>"

    def without_value(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of `keys` that have no value, in their order."""
        return tuple(key for key in keys if key not in self.values)

    def without_value_or_queue(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of `keys` that name neither a value nor a queue, in their order."""
        return tuple(key for key in keys if key not in self.values and key not in self.queues)

    def apply(self, change: Change) -> None:
        """Carries out a change. `OPENED` and `CLOSED` concern the file alone and change nothing here."""
        key, value = change.key, change.value
        match change.code:
            case Code.SET:
                self.values[key] = value
            case Code.APPEND:
                self.values[key] = self.values.get(key, b"") + value
            case Code.DELETE:
                del self.values[key]
            case Code.PUSH:
                self.queues.setdefault(key, deque()).append(value)
            case Code.POP:
                self.queues[key].popleft()
                if not self.queues[key]:
                    del self.queues[key]
