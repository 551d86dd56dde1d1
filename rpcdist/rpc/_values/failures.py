"""Exceptions on the wire: the original type and arguments where they can be pickled, else what is left of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Final

from rpcdist._proto import rpc_pb2
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
        text=text_of(exc),
        traceback=traceback_of(exc),
        worker=worker,
    )
    if failure.kind == Kind.NOT_FOUND:
        return failure  # its type belongs to the callee's machinery; the caller makes its own
    try:
        _encode_exception(exc, failure)
    except BaseException as why:
        failure.ClearField("exception")
        failure.traceback += f"\n(the exception cannot be pickled: {_repr_of(why)})"
    return failure


def _encode_exception(exc: BaseException, failure: rpc_pb2.Failure) -> None:
    large = encode_into(failure.exception, exc, None)
    if large:
        raise SerializationError("the exception carries large tensors")
    # An exception whose constructor does not take its args pickles, and then breaks at the other end.
    decode(failure.exception, (), None)


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


def exception_of(failure: rpc_pb2.Failure, *, may_unpickle: bool = True) -> BaseException:
    """The exception to raise at the caller: the original one with the remote traceback as `__cause__`.

    Runs user code (the exception's constructor): never on the I/O loop.
    """
    exc: BaseException | None = None
    if failure.HasField("exception") and may_unpickle:
        try:
            exc = decode(failure.exception, (), None)  # type: ignore[assignment]
        except (Exception, SystemExit, GeneratorExit) as why:  # [Note: hostile exceptions]
            failure.text += f" (it could not be rebuilt here: {_repr_of(why)})"
    if not isinstance(exc, BaseException):
        exc = _substitute(failure)
    if not isinstance(exc, Exception):  # SystemExit or KeyboardInterrupt there must not end this process
        exc = RemoteError(failure.worker, failure.type_name, failure.text, failure.traceback)
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
    return RemoteError(failure.worker, failure.type_name, failure.text, failure.traceback)
