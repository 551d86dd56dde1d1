"""The functions that run at the owner for a call through a reference. Calls find them by name.

Their first argument is the reference at its owner, or the `ValueAtOwner` that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final


class ValueAtOwner:
    """The value of a reference that a call only named. It is there when the call runs."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def local_value(self) -> Any:
        return self._value


def _rref_typeof_on_owner(rref: Any) -> type:
    return type(rref.local_value())


def _backward(rref: Any, context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _local_invoke(rref: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Names a call of a method. The dispatcher runs `method_of` instead: whether a method runs in a thread, as a
    coroutine, or in the turn of an actor depends on the value, which only the owner knows.
    """
    raise AssertionError("the dispatcher runs methods")


def _invoke_in_turn(rref: Any, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, with a number that the caller gave the call: the value is, or may be, an actor."""
    raise AssertionError("the dispatcher runs methods")


def method_of(
    value: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function that a call of a method through a reference runs, with its arguments; other attributes are read."""
    found = getattr(value, method)
    if not callable(found) and not args and not kwargs:
        return (lambda: found), (), {}
    return found, args, kwargs


async def _turns_over(rref: Any, stream: int, numbers: tuple[int, ...]) -> None:
    """Calls of an actor have ended for the worker that calls this, which made them, and may never come."""
    rref._home.turns_over(rref, stream, numbers)


CALLS_OF_METHODS: Final[frozenset[Callable[..., Any]]] = frozenset((_local_invoke, _invoke_in_turn))
"""The functions whose last arguments are a method's name, its arguments, and those by keyword."""

MAX_METHOD_CHARS: Final = 200

CHECKPOINTED_METHOD: Final = "invoke_checkpointed"
"""The method that calls of an actor with `max_restarts` name; the user's method is its first argument."""


def called_method(args: Sequence[Any]) -> str:
    """The user's method, in the arguments of one of `CALLS_OF_METHODS`; cut, since a peer may have chosen it."""
    *_, method, of_method, _ = args
    name = of_method[0] if method == CHECKPOINTED_METHOD and of_method else method
    return name[:MAX_METHOD_CHARS] if isinstance(name, str) else "?"
