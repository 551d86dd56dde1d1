"""Tells the generators among the results of functions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeGuard

_CLASSES = (Generator, AsyncGenerator)


def is_generator(value: object) -> TypeGuard[Generator[Any, Any, Any] | AsyncGenerator[Any, Any]]:
    """Whether a value produces items, one after the other.

    Both kinds have a method to throw into them. Nearly no other value has; the classes, which are abstract, take
    microseconds to be asked.
    """
    kind = type(value)
    return (hasattr(kind, "throw") or hasattr(kind, "athrow")) and isinstance(value, _CLASSES)
