"""Calls through a reference, such as `rref.rpc_sync().method(...)`: the owner's functions and the caller's proxies.

Calls find the functions by name. The first argument is the owner's reference, or, if the call only names the reference,
the future of its value, which is done when the function runs.
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
    """A placeholder for the dispatcher, which calls `method_of` instead: only the owner's value determines whether the
    method runs in a thread, as a coroutine, or in an actor's turn.
    """
    raise AssertionError("the dispatcher runs methods")


def _invoke_in_turn(target: Any, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Like `_local_invoke`, with the caller's number for the call: the value is, or may be, an actor."""
    raise AssertionError("the dispatcher runs methods")


def method_of(
    value: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the value's method with its arguments, or a function that reads an attribute."""
    found = getattr(value, method)
    if not callable(found) and not args and not kwargs:
        return (lambda: found), (), {}
    return found, args, kwargs


async def _turns_over(rref: Any, stream: int, numbers: tuple[int, ...]) -> None:
    """Records that these calls have ended at the calling worker, and may never arrive."""
    rref._calls.turns_over(rref, stream, numbers)


CALLS_OF_METHODS: Final[frozenset[Callable[..., Any]]] = frozenset((_local_invoke, _invoke_in_turn))
"""Functions whose last arguments are a method's name, its positional arguments and its keyword arguments."""

MAX_METHOD_CHARS: Final = 200

CHECKPOINTED_METHOD: Final = "invoke_checkpointed"
"""The method that a call of a restartable actor names; its first argument is the user's method."""


def called_method(args: Sequence[Any]) -> str:
    """Returns the user's method in the arguments of one of `CALLS_OF_METHODS`, cut because a peer may choose it."""
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
"""Special methods that every object has: `proxy.__eq__(x)` runs at the owner, but `proxy == x` compares proxies."""

_SPECIAL: Final = _OF_OBJECTS.union(
    (f"__{name}__" for name in _OTHERS), (f"__{kind}{name}__" for name in _OPERATORS for kind in ("", "r", "i"))
)
"""Special methods that run at the owner. Python looks up others on any object, to copy, pickle or inspect it."""


class RemoteMethod(partial[Any]):
    """An attribute of a proxy; whether the value has it only turns out at the call.

    The arguments are the reference or actor, the mode, the name and the timeout in seconds.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        target, mode, name, _ = self.args
        return f"<{name!r} of {target!r}: call it to run it, or read it, at the owner: .{mode}().{name}()>"


class MethodProxy(Generic[R]):
    """Calls the methods of a remote value: `proxy.name(...)` calls the method `name` at the owner.

    To read an attribute that is not a method, call it without arguments. A proxy can be reused. Special methods are
    called by name, such as `proxy.__setitem__(key, value)`, since Python's operators bypass `__getattr__`:
    `proxy[key] = value` is an error, and `repr(proxy)` shows the proxy. `R` is the type that calls return, for
    checkers.

    Args:
        call: called with the target, the mode, the method's name, the timeout, and then the method's arguments.
        timeout: for each call, in seconds.
    """

    __slots__ = ("_call", "_mode", "_target", "_timeout")

    def __init__(self, call: Callable[..., Any], target: object, mode: Mode, timeout: float) -> None:
        self._call = call
        self._target = target
        self._mode: Mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            raise AttributeError(f"{name} cannot be called through a reference")
        return RemoteMethod(self._call, self._target, self._mode, name, self._timeout)

    if not TYPE_CHECKING:  # checkers take these methods' signatures from `object`

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
    """Returns the name of a method given as `Class.method`; the value's own class may override it.

    Raises:
        TypeError: not a method of a class.
    """
    scope, _, name = getattr(method, "__qualname__", "").rpartition(".")
    if not scope or scope.endswith("<locals>") or hasattr(method, "__self__"):
        raise TypeError(
            f"rref.call needs a method, such as Counter.add, not {method!r}; to run a function at the owner, use "
            "rpc.call(rref.owner(), function, rref)"
        )
    return name
