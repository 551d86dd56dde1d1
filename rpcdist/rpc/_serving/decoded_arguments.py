"""What the function of a call gets: its arguments, after the value that it was called on."""

from __future__ import annotations

from typing import Any

from rpcdist.errors import RpcdistError
from rpcdist.rpc._rref.proxied import ValueAtOwner
from rpcdist.rpc._serving.active_call import ActiveCall

__all__ = ["decoded_arguments"]


def decoded_arguments(active: ActiveCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments; decoding runs code of users."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if active.arguments is not None:
        pair = active.arguments.decode()
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
            raise RpcdistError("the arguments of the call are not a pair of a tuple and a dict")
        args, kwargs = tuple(pair[0]), pair[1]
    if active.target is not None:
        args = (ValueAtOwner(active.target_value()), *args)
    return args, kwargs
