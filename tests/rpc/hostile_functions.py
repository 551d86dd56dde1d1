"""Exceptions whose class does its worst, and every way in which a call may raise one."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from rpcdist import autograd, rpc


def refuse(*_: object, **__: object) -> Any:
    raise LookupError("code of the exception ran")


def leave(*_: object, **__: object) -> Any:
    sys.exit(7)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    key: str


@dataclasses.dataclass(frozen=True, eq=True)
class FrozenRuntimeError(RuntimeError):
    key: str


class SetattrExits(Exception):
    __setattr__ = leave


class DelattrRaises(Exception):
    __delattr__ = refuse


class NoAttributes(Exception):
    __getattribute__ = refuse


class GetattrRaises(Exception):
    __getattr__ = refuse


class StrRaises(Exception):
    __str__ = refuse
    __repr__ = refuse


class StrExits(Exception):
    __str__ = leave
    __repr__ = leave


class StrIsNone(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class ReduceRaises(Exception):
    __reduce__ = refuse


class ReduceExits(Exception):
    __reduce_ex__ = leave


class ReducesToNothing(Exception):
    def __reduce__(self) -> Any:
        return int, (3,)


class SetstateRaises(Exception):
    def __reduce__(self) -> Any:
        return SetstateRaises, self.args, {"x": 1}

    __setstate__ = refuse


class GetstateRaises(Exception):
    __getstate__ = refuse


class ClassRaises(Exception):
    __class__ = property(refuse)


class CauseRaises(Exception):
    __cause__ = property(refuse)
    __context__ = property(refuse)
    __suppress_context__ = property(refuse)


class TracebackRaises(Exception):
    __traceback__ = property(refuse)
    with_traceback = refuse


class NotesAreHostile(Exception):
    __notes__ = property(refuse)
    add_note = refuse


class ArgsRaise(Exception):
    args = property(refuse)


class DictRaises(Exception):
    __dict__ = property(refuse)


class CompareRaises(Exception):
    __eq__ = refuse
    __ne__ = refuse
    __hash__ = refuse
    __bool__ = refuse
    __len__ = refuse


class ConstructorOnce(Exception):
    """Its constructor makes the text from the arguments; calling it with the text again fails, or makes it longer."""

    def __init__(self, key: str, *, code: int) -> None:
        super().__init__(f"[{code}] {key}")
        self.code = code


class NewRaises(Exception):
    """Can be made once."""

    made = False

    def __new__(cls, *args: object) -> NewRaises:
        if cls.made and not hasattr(_may_make, "yes"):
            raise LookupError("made again")
        cls.made = True
        return super().__new__(cls, *args)


class DelRuns(Exception):
    def __del__(self) -> None:
        _deleted.append(1)


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class WithLock(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.lock = threading.Lock()


class Childless(Exception):
    def __init_subclass__(cls) -> None:
        raise LookupError("no children")

    __reduce__ = refuse


class HostileMeta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(_may_make, "yes"):
            raise LookupError("made again")
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        raise LookupError("isinstance")


class OfHostileMeta(Exception, metaclass=HostileMeta):
    pass


class NotAnException(BaseException):
    pass


_may_make = threading.local()
_deleted: list[int] = []


def _in_a_function() -> Exception:
    class Local(Exception):
        __setattr__ = refuse

    return Local("k")


KINDS: dict[str, Callable[[], BaseException]] = {
    "frozen": lambda: Frozen("k"),
    "frozen runtime error": lambda: FrozenRuntimeError("k"),
    "__setattr__ exits": lambda: SetattrExits("k"),
    "__delattr__": lambda: DelattrRaises("k"),
    "__getattribute__": lambda: NoAttributes("k"),
    "__getattr__": lambda: GetattrRaises("k"),
    "__str__": lambda: StrRaises("k"),
    "__str__ exits": lambda: StrExits("k"),
    "__str__ is None": lambda: StrIsNone("k"),
    "__reduce__": lambda: ReduceRaises("k"),
    "__reduce_ex__ exits": lambda: ReduceExits("k"),
    "__reduce__ to an int": lambda: ReducesToNothing("k"),
    "__setstate__": lambda: SetstateRaises("k"),
    "__getstate__": lambda: GetstateRaises("k"),
    "__class__": lambda: ClassRaises("k"),
    "__cause__": lambda: CauseRaises("k"),
    "__traceback__": lambda: TracebackRaises("k"),
    "__notes__": lambda: NotesAreHostile("k"),
    "args": lambda: ArgsRaise("k"),
    "__dict__": lambda: DictRaises("k"),
    "__eq__, __hash__, __bool__": lambda: CompareRaises("k"),
    "__init__": lambda: ConstructorOnce("k", code=4),
    "__new__": lambda: NewRaises("k"),
    "__del__": lambda: DelRuns("k"),
    "slots": lambda: Slotted(4),
    "a lock": lambda: WithLock("k"),
    "__init_subclass__": lambda: Childless("k"),
    "a metaclass": lambda: OfHostileMeta("k"),
    "a local class": _in_a_function,
    "a group": lambda: ExceptionGroup("k", [Frozen("a"), WithLock("b")]),
    "a long text": lambda: ValueError("k" * 200_000),
    "a huge text": lambda: ValueError("k" * (17 << 20)),
    "a surrogate": lambda: ValueError("k\udce9"),
    "a base exception": lambda: NotAnException("k"),
    "SystemExit": lambda: SystemExit("k"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("k"),
    "GeneratorExit": lambda: GeneratorExit("k"),
    "StopIteration": lambda: StopIteration("k"),
    "StopAsyncIteration": lambda: StopAsyncIteration("k"),
    "CancelledError": lambda: asyncio.CancelledError("k"),
}


def raised(kind: str) -> BaseException:
    """The exception to raise."""
    _may_make.yes = True
    try:
        return KINDS[kind]()
    finally:
        del _may_make.yes


def fail(kind: str) -> Any:
    raise raised(kind)


async def fail_later(kind: str) -> Any:
    await asyncio.sleep(0)
    raise raised(kind)


def items(kind: str) -> Iterator[int]:
    yield 1
    raise raised(kind)


async def async_items(kind: str) -> AsyncIterator[int]:
    yield 1
    raise raised(kind)


@rpc.functions.async_execution
def fail_in_future(kind: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    error = raised(kind)
    if issubclass(type(error), Exception):
        future.set_exception(error)
        return future
    future.set_result(None)  # torch takes no other error; it makes a RuntimeError of what a callback raises
    return future.then(lambda _: fail(kind))


@rpc.functions.async_execution
def fail_before_future(kind: str) -> torch.futures.Future[Any]:
    raise raised(kind)


def value() -> int:
    return 1


class Failing:
    """An object whose constructor or methods raise."""

    def __init__(self, kind: str = "") -> None:
        if kind:
            raise raised(kind)

    def fail(self, kind: str) -> Any:
        raise raised(kind)

    async def fail_later(self, kind: str) -> Any:
        raise raised(kind)


def _then(to: str, kind: str) -> Any:
    return rpc.rpc_async(to, value).then(lambda future: fail(kind)).wait(20.0)


def _awaited(to: str, kind: str) -> Any:
    async def run() -> Any:
        return await rpc.rpc_async(to, fail, (kind,))

    return asyncio.run(run())


def _async_stream(to: str, kind: str) -> Any:
    async def run() -> Any:
        return [item async for item in rpc.rpc_stream(to, async_items, (kind,))]

    return asyncio.run(run())


def _wait_all(to: str, kind: str) -> Any:
    return rpc.wait_all([rpc.rpc_async(to, value), rpc.rpc_async(to, fail, (kind,))])


def _actor(to: str, kind: str, method: str) -> Any:
    actor = rpc.remote(to, Failing, serial=True)
    try:
        return getattr(actor.rpc_sync(), method)(kind)
    finally:
        del actor


def _restarting_actor(to: str, kind: str, method: str) -> Any:
    actor: Any = rpc.remote(to, Failing, serial=True, max_restarts=1)
    try:
        return getattr(actor.rpc_sync(), method)(kind)
    finally:
        del actor


def _reference(to: str, kind: str, mode: str) -> Any:
    rref = rpc.remote(to, Failing)
    try:
        if mode == "rpc_sync":
            return rref.rpc_sync().fail(kind)
        if mode == "rpc_async":
            return rref.rpc_async().fail_later(kind).wait(20.0)
        return rref.remote().fail(kind).to_here()
    finally:
        del rref


def hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: fail(kind))
    return y.sum()


def _backward(to: str, kind: str) -> Any:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(to, hook, (x, kind))])


WAYS: dict[str, Callable[[str, str], Any]] = {
    "rpc_sync": lambda to, kind: rpc.rpc_sync(to, fail, (kind,)),
    "rpc_async": lambda to, kind: rpc.rpc_async(to, fail, (kind,)).wait(20.0),
    "await": _awaited,
    "wait_all": _wait_all,
    "coroutine": lambda to, kind: rpc.rpc_sync(to, fail_later, (kind,)),
    "to_here": lambda to, kind: rpc.remote(to, fail, (kind,)).to_here(),
    "to_here of a coroutine": lambda to, kind: rpc.remote(to, fail_later, (kind,)).to_here(),
    "constructor": lambda to, kind: rpc.remote(to, Failing, (kind,)).rpc_sync().fail(kind),
    "constructor of an actor": lambda to, kind: rpc.remote(to, Failing, (kind,), serial=True).rpc_sync().fail(kind),
    "stream": lambda to, kind: list(rpc.rpc_stream(to, items, (kind,))),
    "async stream": lambda to, kind: list(rpc.rpc_stream(to, async_items, (kind,))),
    "async for": _async_stream,
    "async_execution": lambda to, kind: rpc.rpc_sync(to, fail_in_future, (kind,)),
    "async_execution before": lambda to, kind: rpc.rpc_sync(to, fail_before_future, (kind,)),
    "then": _then,
    "actor": lambda to, kind: _actor(to, kind, "fail"),
    "coroutine of an actor": lambda to, kind: _actor(to, kind, "fail_later"),
    "actor that is made again": lambda to, kind: _restarting_actor(to, kind, "fail"),
    "coroutine of an actor that is made again": lambda to, kind: _restarting_actor(to, kind, "fail_later"),
    "method": lambda to, kind: _reference(to, kind, "rpc_sync"),
    "rpc_async method": lambda to, kind: _reference(to, kind, "rpc_async"),
    "remote method": lambda to, kind: _reference(to, kind, "remote"),
    "backward": _backward,
}
