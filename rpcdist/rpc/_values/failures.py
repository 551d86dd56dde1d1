"""Exceptions on the wire: the original type and arguments where they can be pickled, else what is left of them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import (
    CallRefused,
    Cancelled,
    DeadlineExceeded,
    FunctionNotFound,
    RemoteError,
    RpcdistError,
    RRefError,
    SerializationError,
)
from rpcdist.rpc._values import decode, encode_into
from rpcdist.rpc._values.exceptions import WithoutConstructor, rebuild_exception
from rpcdist.rpc._values.function_names import FunctionLookupError

__all__ = ["RemoteTraceback", "exception_of", "failure_of", "text_of", "traceback_of"]

Kind = rpc_pb2.Failure.Kind
MAX_TEXT: Final = 64 * 1024  # of a traceback or message; a failing call must not become a large one

_KINDS: Final[list[tuple[type[BaseException], rpc_pb2.Failure.Kind]]] = [
    (FunctionNotFound, Kind.NOT_FOUND),
    (FunctionLookupError, Kind.NOT_FOUND),
    (DeadlineExceeded, Kind.DEADLINE),
    (Cancelled, Kind.CANCELLED),
    (SerializationError, Kind.SERIALIZATION),
    (CallRefused, Kind.REFUSED),
    (RRefError, Kind.RREF),
]


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that came from another worker; its text is the traceback there."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"\nOn worker {self.worker!r}:\n{self.text}"


# [Note: hostile exceptions] An exception is an object of the user: its `str`, its attributes, its pickling and its
# constructor may raise anything, `SystemExit` included, and its text may hold what UTF-8 does not (half of a surrogate
# pair, as in names of files). Whoever waits hears of the failure all the same.


def failure_of(exc: BaseException, worker: str) -> rpc_pb2.Failure:
    """The wire form of an exception that was raised on `worker`, which is this one; raises nothing."""
    failure = rpc_pb2.Failure(
        kind=_kind_of(exc),
        type_name=_described("the name of the type", lambda: type(exc).__qualname__),
        type_module=_described("the module of the type", lambda: type(exc).__module__),
        text=text_of(exc),
        traceback=traceback_of(exc),
        worker=worker,
    )
    if failure.kind == Kind.NOT_FOUND:
        return failure  # its type belongs to the callee's machinery; the caller makes its own
    try:
        _encode_exception(exc, failure)
    except BaseException as why:
        try:
            stripped = WithoutConstructor(exc, _can_be_sent)
            _encode_exception(stripped, failure)
            if stripped.left_out:
                failure.traceback += f"\n(these parts of it cannot be sent: {', '.join(stripped.left_out)})"
        except BaseException:
            failure.ClearField("exception")
            failure.traceback += f"\n(the exception cannot be pickled: {_repr_of(why)})"
    return failure


def _encode_exception(exc: BaseException | WithoutConstructor, failure: rpc_pb2.Failure) -> None:
    large = encode_into(failure.exception, exc, None)
    if large:
        raise SerializationError("the exception carries large tensors")
    # One that pickles may still break at the other end, where `__setstate__` or `__reduce__` of its class say so.
    _check_usable(decode(failure.exception, (), None))


def _can_be_sent(part: object) -> bool:
    try:
        value = value_pb2.Value()
        large = encode_into(value, part, None)
        if not large:
            decode(value, (), None)
        return not large
    except BaseException:  # [Note: hostile exceptions]
        return False


def _check_usable(exc: object) -> None:
    """Raises if the object is no exception, or one whose attributes cannot be read: nobody could handle it."""
    if not isinstance(exc, BaseException):
        raise SerializationError(f"a {type(exc).__name__} arrived in the place of an exception")
    _ = exc.args, exc.__traceback__, exc.__cause__


def _kind_of(exc: BaseException) -> rpc_pb2.Failure.Kind:
    # Not `isinstance`, which asks the exception for its `__class__`.
    if issubclass(type(exc), RpcdistError):
        for base, kind in _KINDS:
            if issubclass(type(exc), base):
                return kind
    return Kind.USER


def text_of(exc: BaseException) -> str:
    """The text of any exception, cut to `MAX_TEXT`, without what UTF-8 does not have; raises nothing."""
    return _described("str() of the exception", lambda: str(exc)[:MAX_TEXT])


def traceback_of(exc: BaseException) -> str:
    """The end of the traceback, like `text_of`."""
    return _described("formatting the traceback", lambda: "".join(traceback.format_exception(exc))[-MAX_TEXT:])


def _repr_of(exc: BaseException) -> str:
    return _described("repr() of the reason", lambda: repr(exc))


def _described(what: str, describe: Callable[[], str]) -> str:
    """What `describe` returns, in a form that can be sent, or that it failed. [Note: hostile exceptions]"""
    try:
        return describe().encode("utf-8", "backslashreplace").decode()
    except BaseException as why:
        return f"<{what} failed: {type.__repr__(type(why))}>"


def exception_of(failure: rpc_pb2.Failure, *, may_unpickle: bool = True) -> Exception:
    """The exception to raise at the caller: the original one with the remote traceback as `__cause__`.

    Runs user code (the exception's constructor): never on the I/O loop.
    """
    exc: BaseException | None = None
    if failure.HasField("exception") and may_unpickle:
        try:
            found = decode(failure.exception, (), None)
            _check_usable(found)
            exc = found  # type: ignore[assignment]
        except (Exception, SystemExit, GeneratorExit) as why:  # [Note: hostile exceptions]
            failure.text += f" (it could not be rebuilt here: {_repr_of(why)})"
    if not isinstance(exc, BaseException):
        exc = _substitute(failure)
    if not isinstance(exc, Exception):  # SystemExit or KeyboardInterrupt there must not end this process
        exc = _remote_error(failure)
    exc.__cause__ = RemoteTraceback(failure.worker, failure.traceback)
    return exc


def _substitute(failure: rpc_pb2.Failure) -> Exception:
    if failure.kind == Kind.NOT_FOUND:
        return FunctionNotFound(failure.worker, failure.type_name, failure.text, failure.traceback)
    for base, kind in _KINDS:
        if kind == failure.kind and base is not FunctionNotFound:
            exc = base(f"On worker {failure.worker!r}: {failure.text}")
            assert isinstance(exc, Exception)
            return exc
    return _remote_error(failure)


def _remote_error(failure: rpc_pb2.Failure) -> RemoteError:
    """A `RemoteError`, which is also of the original class where this process has that already."""
    args = (failure.worker, failure.type_name, failure.text, failure.traceback)
    try:
        cls = _exception_class(failure.type_module, failure.type_name)
        if cls is not None:
            return _also(cls, args)
    except (Exception, SystemExit, GeneratorExit):  # the class does not want it, or cannot; [Note: hostile exceptions]
        pass
    return RemoteError(*args)


def _exception_class(module_name: str, qualname: str) -> type[Exception] | None:
    """A class by its name, if it is a loaded one that an `except` clause may name. Nothing is imported for a peer."""
    found: Any = sys.modules.get("__main__" if module_name == "__mp_main__" else module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception) or issubclass(RemoteError, found):
        return None
    return None if issubclass(found, RpcdistError) else found


def _also(cls: type[Exception], args: tuple[str, str, str, str]) -> RemoteError:
    def reduce(exc: RemoteError) -> Any:
        return remote_error_again, (cls, exc.args)

    both = type(f"RemoteError_{cls.__name__}", (RemoteError, cls), {"__reduce__": reduce, "__module__": __name__})
    exc = rebuild_exception(both, args)
    assert isinstance(exc, RemoteError)
    exc.worker, exc.type_name, exc.text, exc.traceback = args
    _check_usable(exc)
    str(exc)
    return exc


def remote_error_again(cls: type[Exception], args: tuple[str, str, str, str]) -> RemoteError:
    """A `RemoteError` that is also a `cls`, from its pickle."""
    return _also(cls, args)
