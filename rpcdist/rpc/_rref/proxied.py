"""What runs at the owner when somebody calls a method through a reference. Calls find it by name."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from typing import Any, Final, Protocol

import torch

from rpcdist.rpc import functions

__all__ = [
    "CALLS_OF_METHODS",
    "CHECKPOINTED_METHOD",
    "INVOKERS",
    "ValueAtOwner",
    "called_method",
    "check_method",
    "invoker_of",
    "is_scripted",
]


class OwnedRRef(Protocol):
    """A reference at its owner, or what stands for it: a `ValueAtOwner`."""

    def local_value(self) -> Any: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


class HomeRRef(Protocol):
    """A reference that came home to its owner."""

    @property
    def _home(self) -> Any: ...


class BackwardRRef(Protocol):
    """A reference that a backward pass begins at."""

    def backward(self, dist_autograd_ctx_id: int, retain_graph: bool) -> None: ...


class TurnTable(Protocol):
    """The actors of this owner."""

    def turn(
        self, call: Any, value: object, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch._C.Future[Any]: ...


class ValueAtOwner:
    """The value of a reference that a call only named. It is there when the call runs."""

    __slots__ = ("_actors", "_call", "_value")

    def __init__(self, value: object, call: object, actors: TurnTable) -> None:
        self._value = value
        self._call = call
        self._actors = actors

    def local_value(self) -> Any:
        return self._value

    def in_turn(
        self, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch._C.Future[Any]:
        """Has a method run when its turn has come; see `rpcdist.rpc._actors`."""
        return self._actors.turn(self._call, self._value, order, method, args, kwargs)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield  # makes this a generator, as awaiting demands


def _rref_typeof_on_owner(rref: OwnedRRef) -> type:
    return type(rref.local_value())


def _backward(rref: BackwardRRef, context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _invoker_name(rref: OwnedRRef, method: str) -> str:
    """What runs a method of the value: for callers that take no pickles, and so cannot ask for its class."""
    name: str = invoker_of(type(rref.local_value()), method).__name__
    return name


def invoker_of(kind: type, method: str) -> Any:
    """The one of the functions below that runs a method of a class. Objects may have others than their class."""
    if is_scripted(kind):
        return _local_invoke
    function = getattr(kind, method, None)
    if function is None:
        return _local_invoke
    if functions.is_async_execution(function):
        return _local_invoke_async_execution
    if inspect.iscoroutinefunction(function):
        return _local_invoke_coroutine
    return _local_invoke


def is_scripted(kind: type) -> bool:
    """Whether it is TorchScript's: then nothing is found out about its methods by asking for them."""
    return issubclass(kind, torch.jit.ScriptModule | torch._C.ScriptModule)


def check_method(known: type | str, method: str) -> None:
    """Raises `AttributeError` where the class is known and has no such attribute: what `remote()` of it would create is
    never there, and nobody would hear why before the reference is used.
    """
    if isinstance(known, type) and not is_scripted(known):
        getattr(known, method)


def _local_invoke(rref: OwnedRRef, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = getattr(rref.local_value(), method)
    if not callable(found) and not args and not kwargs:  # an attribute: this reads it
        return found
    return found(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(rref: OwnedRRef, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


async def _local_invoke_coroutine(rref: OwnedRRef, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await getattr(await rref, method)(*args, **kwargs)


@functions.async_execution
def _invoke_in_turn(
    rref: ValueAtOwner, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return rref.in_turn(order, method, args, kwargs)


async def _turns_over(rref: HomeRRef, stream: int, numbers: tuple[int, ...]) -> None:
    """Calls of an actor have ended for their caller, which is who calls this, and may never come."""
    rref._home.turns_over(rref, stream, numbers)


INVOKERS: Final = {
    function.__name__: function for function in (_local_invoke, _local_invoke_async_execution, _local_invoke_coroutine)
}

CALLS_OF_METHODS: Final = frozenset((*INVOKERS.values(), _invoke_in_turn))
"""Those whose last arguments are a method's name, its arguments, and those by keyword."""

CHECKPOINTED_METHOD: Final = "invoke_checkpointed"
"""What calls of an actor with `max_restarts` name; the user's method is its first argument."""


def called_method(args: Sequence[Any]) -> str:
    """The user's method, in the arguments of one of `CALLS_OF_METHODS`."""
    *_, method, of_method, _ = args
    return str(of_method[0] if method == CHECKPOINTED_METHOD and of_method else method)
