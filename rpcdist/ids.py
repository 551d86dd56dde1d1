"""Names of things that cross process boundaries."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple, NewType

from rpcdist.errors import ConfigError

__all__ = ["Identity", "Incarnation", "check_worker_name", "new_incarnation"]

Incarnation = NewType("Incarnation", int)
"""The random number that tells a process from its predecessor of the same name and rank."""

MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_:\-]+\Z")


class Identity(NamedTuple):
    """A process as its peers know it. A replacement under the same name has another incarnation."""

    name: str
    id: int
    incarnation: int


def new_incarnation() -> Incarnation:
    """A random 63-bit number; 0 is never returned."""
    return Incarnation(secrets.randbits(63) | 1)


def check_worker_name(name: str) -> str:
    """Returns `name`, or raises `ConfigError` saying what a worker name may look like."""
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
