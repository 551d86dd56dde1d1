"""Which callable a call names, and whether this worker lets others call it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from rpcdist.errors import CallRefused, RpcdistError, SerializationError
from rpcdist.rpc._rref.proxied import ValueAtOwner
from rpcdist.rpc._serving.active_calls import ActiveCall
from rpcdist.rpc._values.function_names import decode_function, function_name, loaded_function, names_itself
from rpcdist.rpc.options import RpcOptions

MAX_KNOWN: Final = 4096  # names; a peer may send any


class Callables:
    """One per agent.

    Args:
        options: the allow-list, and whether pickles are accepted.
        always: what every peer may call, by the name on the wire, whatever the allow-list says: without these no job
            can shut down.
    """

    def __init__(self, options: RpcOptions, always: Mapping[str, Callable[..., Any]], worker_name: str) -> None:
        self._options = options
        self._always = always
        self._worker_name = worker_name
        self._known: dict[str, tuple[str, str]] = {}  # module and function, by the name on the wire

    def find(self, name: str) -> Callable[..., Any]:
        """The callable that "module:qualified.name" names here.

        Its module is imported, and asked for it (`__getattr__`), where peers may run any code, or where the allow-list
        has the whole name. Else it is one that a loaded module holds.

        Raises:
            CallRefused: it may not be called.
        """
        if name in self._always:
            return self._always[name]
        if self._options.allow_functions is not None:
            return self._allowed(name, self._options.allow_functions)
        if not self._options.allow_pickle:
            return loaded_function(name)
        parts = self._known.get(name)  # not the function: what the module holds now is meant
        if parts is not None and (module := sys.modules.get(parts[0])) is not None:
            function = getattr(module, parts[1], None)
            if callable(function):
                return function  # type: ignore[no-any-return]
        return self._found(name)

    def check(self, name: str) -> None:
        """Raises `CallRefused` if a peer may not call this function, which is one of ours."""
        if self._options.allow_functions is not None:
            self._allowed(name, self._options.allow_functions)

    def _found(self, name: str) -> Callable[..., Any]:
        function = decode_function(name)
        module_name, _, path = name.partition(":")
        if "." not in path and len(self._known) < MAX_KNOWN:
            self._known[name] = module_name, path
        return function

    def check_by_value(self) -> None:
        """Raises `CallRefused` if functions without a name, which come as values, may not be called."""
        if self._options.allow_functions is not None or not self._options.allow_pickle:
            raise CallRefused(
                f"worker {self._worker_name!r} accepts functions by name only (allow_functions or "
                "allow_pickle=False is set there); call a module-level function"
            )

    def _allowed(self, name: str, patterns: tuple[str, ...]) -> Callable[..., Any]:
        module, _, qualname = name.partition(":")
        if not self._options.allows(module, qualname):
            raise CallRefused(
                f"worker {self._worker_name!r} does not allow calls of {name}; "
                "add it to RpcOptions(allow_functions=...) there"
            )
        if name in patterns:
            return decode_function(name)
        function = loaded_function(name, any(pattern.partition(":")[0] == module for pattern in patterns))
        home = function_name(function, is_quiet=True) if names_itself(function) else None
        # A pattern names what a module defines, not what it imports: "tools:*" must not lead to "tools:os.system".
        if not (home and self._options.allows(*home.split(":", 1))):
            raise CallRefused(
                f"worker {self._worker_name!r} does not allow calls of {name}, which is "
                f"{home or 'a callable without a name of its own'}; to allow it, add it to "
                "RpcOptions(allow_functions=...) there, without wildcards"
            )
        return function


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
