"""Values of victims that cannot be sent, found or rebuilt. All processes import this module by the same name."""

from __future__ import annotations

import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from rpc_functions import LockedError
from rpc_victim_functions import make, pid

from rpcdist import rpc

UNPICKLABLE = ("lock", "lambda", "generator", "local class", "socket")


def make_unpicklable(kind: str) -> Any:
    class Local:
        pass

    match kind:
        case "lock":
            return {"deep": [threading.Lock()]}
        case "lambda":
            return lambda: 1
        case "generator":
            return [item for item in [(number for number in range(3))]]
        case "local class":
            return Local()
        case "socket":
            return [socket.socket()]
    raise ValueError(kind)


def send_unpicklable(how: str, to: str, kind: str) -> None:
    value = make_unpicklable(kind)
    match how:
        case "rpc_sync":
            rpc.rpc_sync(to, make, (value,))
        case "rpc_async":
            rpc.rpc_async(to, make, (value, rpc.RRef(1))).wait()
        case "remote":
            rpc.remote(to, make, ([rpc.RRef(1), value],)).to_here()


def fetch_remote(to: str, function: Any, *args: Any) -> Any:
    return rpc.remote(to, function, args).to_here()


def fetch_remote_with(to: str, function: Any, args: Any) -> Any:
    return fetch_remote(to, function, *args)


def call_by_name(to: str, name: str) -> Any:
    """A call of a function that the caller would not name so."""
    from rpcdist.rpc._calling import new_calls

    honest: Any = new_calls.function_reference  # type: ignore[attr-defined]
    new_calls.function_reference = lambda *args, **kwargs: name  # type: ignore[attr-defined]
    try:
        return rpc.rpc_sync(to, pid)
    finally:
        new_calls.function_reference = honest  # type: ignore[attr-defined]


def _refuse_to_be_built(*args: Any) -> Any:
    raise ValueError("on purpose")


class Unbuildable:
    def __reduce__(self) -> Any:
        return _refuse_to_be_built, ()


def make_unbuildable() -> Unbuildable:
    return Unbuildable()


def send_unbuildable(to: str) -> None:
    rpc.rpc_sync(to, make, (Unbuildable(),))


class NeedsTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class UnbuildableError(Exception):
    def __reduce__(self) -> Any:
        return _refuse_to_be_built, ()


class StrFails(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Touching(Exception):
    """Creates a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        super().__init__("touching")
        self.path = path

    def __reduce__(self) -> Any:
        return _touch, (self.path,)


def _touch(path: str) -> None:
    with open(path, "a") as file:
        print(os.getpid(), file=file)


def raise_odd(kind: str, path: str = "") -> None:
    class LocalError(Exception):
        pass

    match kind:
        case "local class":
            raise LocalError("here")
        case "needs two arguments":
            raise NeedsTwo(1, 2)
        case "holds a lock":
            raise LockedError
        case "breaks when rebuilt":
            raise UnbuildableError
        case "str fails":
            raise StrFails
        case "touches":
            raise Touching(path)


def type_of_error(call: Callable[..., object], to: str, kind: str) -> str:
    """The error of a call that raises, as a text, because the error itself cannot be pickled."""
    try:
        call(to, raise_odd, (kind,))
    except Exception as exc:
        return type(exc).__name__
    return "nothing"


def raise_huge() -> None:
    raise ValueError("x" * 50_000_000)


def stream_unpicklable() -> Iterator[Any]:
    yield 1
    yield threading.Lock()


def read_stream(to: str, function: Any) -> list[Any]:
    return list(rpc.rpc_stream(to, function))


def call_a_function_that_only_exists_here(to: str) -> None:
    def only_here() -> None: ...

    only_here.__qualname__ = "only_here"
    globals()["only_here"] = only_here
    rpc.rpc_sync(to, only_here)


def call_a_module_that_only_exists_here(to: str) -> None:
    module = types.ModuleType("module_only_here")
    exec("def f(): pass", module.__dict__)
    sys.modules["module_only_here"] = module
    rpc.rpc_sync(to, module.f)


def call_nameless(to: str, kind: str) -> None:
    def nested() -> None: ...

    rpc.rpc_sync(to, nested if kind == "nested" else lambda: 1)


def send_touching(to: str, path: str) -> None:
    rpc.rpc_sync(to, make, (Touching(path),))


def make_touching(path: str) -> Touching:
    return Touching(path)


def send_function_by_value(to: str) -> None:
    rpc.rpc_sync(to, lambda: 1)
