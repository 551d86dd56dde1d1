"""Calls through a reference, such as `rref.rpc_sync().method(...)`: functions at the owner, and proxies at the caller.

Calls find the functions by name. Their first argument is the reference at its owner; where the call only names a
reference, it is the future of the value, which is done when the call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast

from rpcdist.rpc.future import Future


def _rref_typeof_on_owner(target: Future[Any]) -> type:
    return type(target.value())


def _backward(rref: Any, context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _local_invoke(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Names a call of a method. The dispatcher runs `method_of` instead: whether a method runs in a thread, as a
    coroutine, or in the turn of an actor depends on the value, which only the owner knows.
    """
    raise AssertionError("the dispatcher runs methods")


def _invoke_in_turn(target: Any, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    rref._calls.turns_over(rref, stream, numbers)


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


R = TypeVar("R")
Mode = Literal["rpc_sync", "rpc_async", "remote"]

_OPERATORS: Final = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_OTHERS: Final = (
    "call len length_hint getitem setitem delitem missing contains iter reversed next aiter anext "
    "enter exit aenter aexit neg pos abs invert bool bytes int float complex index round trunc floor ceil"
).split()
_OF_OBJECTS: Final = frozenset(
    f"__{name}__" for name in "eq ne lt le gt ge hash str repr format dir sizeof setattr delattr getattribute".split()
)
"""Special methods that a proxy has itself, as every object: only those that are written out run at the owner."""

_SPECIAL: Final = _OF_OBJECTS.union(
    (f"__{name}__" for name in _OTHERS), (f"__{kind}{name}__" for name in _OPERATORS for kind in ("", "r", "i"))
)
"""Those that run at the owner. Python and its libraries ask any object for others, to copy, pickle or inspect it."""


class RemoteMethod(partial[Any]):
    """An attribute of a proxy. The owner has not been asked yet, so the value may have no such method.

    Its arguments are the reference or actor, the mode, the name and the timeout in seconds.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        target, mode, name, _ = self.args
        return f"<{name!r} of {target!r}: call it to run it at the owner, or to read it: .{mode}().{name}()>"


class MethodProxy(Generic[R]):
    """Its attributes are functions that call the method of that name at the owner; one that is no method is read by a
    call without arguments. May be kept and used again. `R` is what the calls return, as far as checkers can know it.

    Special methods are called by their names, such as `proxy.__setitem__(key, value)`: Python's operators do not ask
    the attributes of an object, so `proxy[key] = value` is an error, and `repr(proxy)` that of the proxy.

    Args:
        call: gets the target, the mode, the name of the method and the timeout, and then the method's arguments.
        timeout: of each call, in seconds.
    """

    __slots__ = ("_call", "_mode", "_target", "_timeout")

    def __init__(self, call: Callable[..., Any], target: object, mode: Mode, timeout: float) -> None:
        self._call = call
        self._target = target
        self._mode: Mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            raise AttributeError(f"{name} is not called through a reference")
        return RemoteMethod(self._call, self._target, self._mode, name, self._timeout)

    if not TYPE_CHECKING:  # checkers know these methods with the arguments that `object` gives them

        def __getattribute__(self, name: str) -> Any:
            if name in _OF_OBJECTS:
                return MethodProxy.__getattr__(self, name)
            return object.__getattribute__(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Calls the value itself."""
        return cast(R, self._call(self._target, self._mode, "__call__", self._timeout, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<{self._mode} proxy of {self._target!r}>"


def method_name(method: Callable[..., object]) -> str:
    """The name of a method that was written as `Class.method`, by which it is found in the value's own class.

    Raises:
        TypeError: it is no method.
    """
    scope, _, name = getattr(method, "__qualname__", "").rpartition(".")
    if not scope or scope.endswith("<locals>") or hasattr(method, "__self__"):
        raise TypeError(
            f"rref.call takes a method, such as Counter.add, but not {method!r}; a function runs at the owner by "
            "rpc.call(rref.owner(), function, rref)"
        )
    return name
