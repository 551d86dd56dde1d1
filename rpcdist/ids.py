"""Names of things that cross process boundaries."""

from __future__ import annotations

import os
import re
import secrets
from typing import Final, NamedTuple

from rpcdist.errors import ConfigError

__all__ = ["Identity", "ProcessId", "UniqueId", "check_worker_name", "new_incarnation", "new_number"]

_COUNT_BITS: Final = 24
_MAX_COUNT: Final = (1 << _COUNT_BITS) - 1
MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_:\-]+\Z")


class ProcessId(NamedTuple):
    """A worker process: its id in the job, not that of the system. A replacement has another incarnation."""

    worker: int
    incarnation: int

    def __repr__(self) -> str:
        return f"w{self.worker}"


class Identity(NamedTuple):
    """A process as its peers know it. A replacement under the same name has another incarnation."""

    name: str
    id: int
    incarnation: int

    @property
    def process(self) -> ProcessId:
        """The process, without its name."""
        return ProcessId(self.id, self.incarnation)


class UniqueId(NamedTuple):
    """An id that is unique in a job: the process that made it, and a number from `new_number` of that process.

    It includes the incarnation: another process may join under the id of a dead worker, while references that the dead
    one made are still alive elsewhere.
    """

    created_on: int
    local_id: int
    incarnation: int

    def __str__(self) -> str:
        """Like torch's, which numbers 0, 1, 2 at each worker; without the secret part of the number."""
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id & _MAX_COUNT})"

    def __repr__(self) -> str:
        return f"{self.created_on}.{self.local_id & _MAX_COUNT}"

    @property
    def creator(self) -> ProcessId:
        """The process that made it."""
        return ProcessId(self.created_on, self.incarnation)


def new_number(count: int) -> int:
    """A number that is never reused and cannot be guessed: a worker that names a reference or a share has received it.

    Args:
        count: the number of earlier ids of this process, which texts show.
    """
    return int.from_bytes(os.urandom(5)) >> 1 << _COUNT_BITS | count & _MAX_COUNT


def new_incarnation() -> int:
    """A random 63-bit number, never 0, that distinguishes a process from its predecessor of the same name."""
    return secrets.randbits(63) | 1


def check_worker_name(name: str) -> str:
    """Returns `name`, or raises `ConfigError`, which explains how a worker name may look."""
    if not isinstance(name, str):
        raise ConfigError(f"Worker name must be a str, not {name!r}.")
    if not name:
        raise ConfigError("Worker name must be non-empty.")
    if len(name) >= MAX_NAME_LENGTH:
        raise ConfigError(f"Worker name must be shorter than 128 characters, but {name[:20]!r}... has {len(name)}.")
    if not _NAME.match(name):
        raise ConfigError(
            f"Worker name must match ^[A-Za-z0-9-_:]*$ (letters, digits, '-', '_' and ':'), but it is {name!r}."
        )
    return name
