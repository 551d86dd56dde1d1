"""`rref.rpc_sync().method(...)`: calls on the value of a reference, run by its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast

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
        target: a reference or an actor.
        mode: how its methods are called.
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
