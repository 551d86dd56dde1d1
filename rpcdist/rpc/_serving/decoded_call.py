"""The function that a call runs, and its arguments after the value that it was called on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdist.errors import RpcdistError, SerializationError
from rpcdist.rpc._rref.proxied import ValueAtOwner
from rpcdist.rpc._serving.active_call import ActiveCall
from rpcdist.rpc._serving.callables import Callables


def decoded_call(
    active: ActiveCall, callables: Callables
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function, and its positional and keyword arguments; decoding runs code of users.

    Whether the function may be called is decided before anything is decoded.
    """
    if active.is_by_value:
        callables.check_by_value()
        args, kwargs, function = _parts(active, 3)
        if not callable(function):
            raise SerializationError(
                f"what arrived as a function is a {type(function).__name__}, which cannot be called"
            )
    else:
        function = callables.find(active.function)
        args, kwargs = ((), {}) if active.arguments is None else _parts(active, 2)
    args = tuple(args)
    if active.target is not None:
        args = (ValueAtOwner(active.target_value()), *args)
    return function, args, kwargs


def _parts(active: ActiveCall, count: int) -> tuple[Any, ...]:
    parts = active.arguments.decode() if active.arguments is not None else None
    if not (isinstance(parts, tuple) and len(parts) == count and isinstance(parts[1], dict)):
        raise RpcdistError("the arguments of the call are not a tuple and a dict, with the function if that is a value")
    return parts
