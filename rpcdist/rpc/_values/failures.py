"""Exceptions on the wire: encoded like other values, and as text for receivers that cannot rebuild all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final

import torch

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
    cut,
    described,
    text_of,
)
from rpcdist.rpc._values.exceptions import (
    args_of,
    rebuild_exception,
    reduction_of,
    restore_state,
    set_cause,
    state_of,
    traceback_of,
)
from rpcdist.rpc._values.function_names import FunctionLookupError, look_up_quietly
from rpcdist.rpc._values.pickled import PickledParts, read_pickle, write_pickle
from rpcdist.rpc._values.tensors import RRefType
from rpcdist.transport.memory_copies import LargeBuffer

Kind = rpc_pb2.Failure.Kind

MAX_EXCEPTION_BYTES: Final = 16 << 20
"""A failing call must not send a message of any size: larger exceptions are shortened."""

PART_BYTES: Final = (1 << 20, 64 << 10, 1 << 10)  # limits on parts, tried until the whole is small enough
MAX_DEPTH: Final = 8  # limit on nested containers and groups in which parts are shortened
MAX_REPR: Final = 1000
MAX_BASES: Final = 16
_TEXTS: Final = (str, bytes, bytearray)
MAX_TRIALS: Final = 1000
"""Limit on the parts of an exception that are tried; later parts are cut."""

Fill = Callable[[value_pb2.Value, PickledParts], list[LargeBuffer]]
"""Writes a pickle into a message, and returns the buffers beside it."""

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
    """The `__cause__` of an exception from another worker; its text is the traceback there."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"\nOn worker {self.worker!r}:\n{self.text}"


# ---------------------------------------------------------------- at the callee


def failure_of(
    exc: BaseException, worker: str, fill: Fill, *, rref_type: RRefType = (), by_value: bool = False
) -> tuple[rpc_pb2.Failure, list[LargeBuffer]]:
    """The wire form of an exception that was raised on `worker`, this worker; raises nothing.

    Args:
        exc: the exception. See [Note: hostile exceptions].
        fill: writes tensors, buffers and references as for other values.
        rref_type: recognizes remote references.
        by_value: see `write_pickle`.
    """
    failure = rpc_pb2.Failure(
        kind=_kind_of(exc),
        type_name=described("the name of the type", lambda: type(exc).__qualname__),
        type_module=described("the module of the type", lambda: type(exc).__module__),
        type_bases=[
            described("the name of a base", lambda base=base: f"{base.__module__}:{base.__qualname__}")  # type: ignore[misc]
            for base in islice(type.__dict__["__mro__"].__get__(type(exc)), 1, 1 + MAX_BASES)
        ],
        text=text_of(exc),
        traceback=traceback_of(exc),
        worker=worker,
    )
    if failure.kind == Kind.NOT_FOUND:
        return failure, []  # its type is private to the callee; the caller makes its own error
    trials = _Trials(worker, rref_type, by_value)
    try:
        return failure, fill(failure.exception, trials.usable(exc, MAX_EXCEPTION_BYTES))
    except BaseException as why:
        problem = cut(described("the reason", partial(repr, why)))
    for limit in PART_BYTES:
        try:
            shortened = _Shortened(exc, trials, limit)
            large = fill(failure.exception, trials.usable(shortened, MAX_EXCEPTION_BYTES))
        except BaseException:
            failure.ClearField("exception")
            continue
        if shortened.left_out:
            failure.traceback += f"\n(these parts of the exception cannot be sent: {', '.join(shortened.left_out)})"
        return failure, large
    failure.traceback += f"\n(the exception cannot be pickled: {problem})"
    return failure, []


def _kind_of(exc: BaseException) -> rpc_pb2.Failure.Kind:
    if issubclass(type(exc), RpcdistError):
        for base, kind in _KINDS:
            if issubclass(type(exc), base):
                return kind
    return Kind.USER


class _Trials:
    """Finds out which parts can be sent: an object that can be pickled may still fail at the other end.

    The trials read the tensors, buffers and references themselves, so nothing is copied.
    """

    def __init__(self, worker: str, rref_type: RRefType, by_value: bool) -> None:
        self.worker = worker
        self.left = MAX_TRIALS
        self._rref_type = rref_type
        self._by_value = by_value

    def usable(self, exc: object, limit_bytes: int) -> PickledParts:
        """The pickle of an exception; raises if it is too large, or if the receiver could not use the result."""
        parts, found = self._both_ways(exc, limit_bytes)
        _check_usable(found)
        return parts

    def fits(self, part: Any, limit_bytes: int) -> bool:
        """Whether a part of an exception can be sent."""
        self.left -= 1
        if any(type(one) in _TEXTS and len(one) > limit_bytes for one in (part if type(part) is tuple else (part,))):
            return False  # the most common case; the others must be pickled
        try:
            self._both_ways(part, limit_bytes)
        except BaseException:
            return False
        return True

    def _both_ways(self, obj: object, limit_bytes: int) -> tuple[PickledParts, object]:
        parts = write_pickle(obj, self._rref_type, self._by_value)
        size = len(parts.body) + sum(view.nbytes for view in parts.buffers) + sum(map(_num_bytes, parts.tensors))
        if size > limit_bytes:
            raise SerializationError(f"it has {size} bytes; the limit is {limit_bytes}")
        return parts, read_pickle(parts.body, parts.tensors, parts.buffers, parts.rrefs.__getitem__, is_trial=True)


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return _num_bytes(tensor._indices()) + _num_bytes(tensor._values())
    return tensor.numel() * tensor.itemsize


def _check_usable(exc: object) -> None:
    """Raises if the object is not an exception, or its attributes cannot be read, so that no code could handle it."""
    if not isinstance(exc, BaseException):
        raise SerializationError(f"a {type(exc).__name__} arrived in place of an exception")
    _ = exc.args, exc.__traceback__, exc.__cause__


class _Shortened:
    """Pickles as an exception with some parts shortened or left out.

    Strings, bytes, lists, dicts and the members of groups are cut at a limit, with a mark. Other arguments are replaced
    by their `repr`; other attributes are left out.

    Args:
        trials: finds out what can be sent.
        limit_bytes: limit on the size of a part.

    Attributes:
        left_out: names of the missing parts.
    """

    def __init__(self, exc: BaseException, trials: _Trials, limit_bytes: int, depth: int = 0) -> None:
        self.left_out: list[str] = []
        self._trials = trials
        self._limit_bytes = limit_bytes
        args = args_of(exc)
        if not trials.fits(args, limit_bytes):
            args = tuple(self._item(f"args[{index}]", part, depth) for index, part in enumerate(args))
        slots, attributes = (self._attributes(part, depth) for part in state_of(exc))
        self._reduction = reduction_of(exc, args, (slots, attributes))

    def __reduce__(self) -> Any:
        return self._reduction

    def _attributes(self, attributes: dict[str, Any], depth: int) -> dict[str, Any]:
        kept = {}
        for name, value in attributes.items():
            found, part = self._part(value, depth)
            if found:
                kept[name] = part
            else:
                self.left_out.append(name)
        return kept

    def _item(self, name: str, value: object, depth: int) -> object:
        found, part = self._part(value, depth)
        if found:
            return part
        self.left_out.append(name)
        return described(f"the repr() of {name}", lambda: cut(repr(value), MAX_REPR))

    def _part(self, value: Any, depth: int) -> tuple[bool, object]:
        """Whether a part, or its beginning, can be sent; and that part or beginning."""
        kind, limit = type(value), self._limit_bytes
        if self._trials.fits(value, limit):
            return True, value
        if kind is str:
            return True, cut(value, limit)
        if kind is bytes or kind is bytearray:
            return True, value[:limit] + f"... [{len(value) - limit} bytes cut]".encode()
        if depth >= MAX_DEPTH:
            return False, None
        if issubclass(kind, BaseException):
            return True, self._exception(value, depth + 1)
        if kind is list or kind is tuple:
            return True, kind(self._items(value, depth + 1))
        if kind is dict:
            pairs = self._items(list(value.items()), depth + 1)
            return True, dict(pair for pair in pairs if type(pair) is tuple)
        return False, None

    def _items(self, items: Any, depth: int) -> list[object]:
        """The items until the limit is reached."""
        kept: list[object] = []
        size = 0
        for index, item in enumerate(items):
            if size >= self._limit_bytes or self._trials.left <= 0:
                return [*kept, f"... [{len(items) - index} items cut]"]
            part = self._item(f"an item of type {type.__repr__(type(item))}", item, depth)
            size += 64 + (len(part) if isinstance(part, str | bytes | bytearray) else 0)
            kept.append(part)
        return kept

    def _exception(self, exc: BaseException, depth: int) -> object:
        shortened = _Shortened(exc, self._trials, self._limit_bytes, depth)
        if not self._trials.fits(shortened, MAX_EXCEPTION_BYTES):  # because of its class
            name = described("the name of the type", lambda: type(exc).__qualname__)
            return RemoteError(self._trials.worker, name, text_of(exc), traceback_of(exc))
        self.left_out += shortened.left_out
        return shortened


# ---------------------------------------------------------------- at the caller


def exception_of(failure: rpc_pb2.Failure, decode: Callable[[], object] | None = None) -> Exception:
    """The exception to raise at the caller: the original one with the remote traceback as `__cause__`.

    Runs user code (`__setstate__` of the exception): never on the I/O loop.

    Args:
        decode: makes the original exception; None if there is none, or if it must not be unpickled.
    """
    exc: Any = None
    if decode is not None:
        try:
            exc = decode()
            _check_usable(exc)
        except KeyboardInterrupt:
            raise
        except BaseException as why:  # [Note: hostile exceptions]
            exc = None
            failure.text += f" (it could not be rebuilt here: {described('the reason', partial(repr, why))})"
    if exc is None:
        exc = _substitute(failure)
    if not issubclass(type(exc), Exception):  # SystemExit or KeyboardInterrupt there must not end this process
        exc = _remote_error(failure)
    set_cause(exc, RemoteTraceback(failure.worker, failure.traceback))
    return exc  # type: ignore[no-any-return]


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
    """A `RemoteError` that is also an instance of the original class, or of its nearest base that this process has."""
    args = (failure.worker, failure.type_name, failure.text, failure.traceback)
    bases = (name.partition(":") for name in failure.type_bases[:MAX_BASES])
    for module, name in ((failure.type_module, failure.type_name), *((module, name) for module, _, name in bases)):
        try:
            cls = _exception_class(module, name)
            if cls is not None:
                return also_remote_error(cls, args)
        except KeyboardInterrupt:
            raise
        except BaseException:  # the class does not allow it; [Note: hostile exceptions]
            continue
    return RemoteError(*args)


def _exception_class(module_name: str, qualname: str) -> type[Exception] | None:
    """A loaded class by its name, if an `except` clause may name it, and deriving from it runs none of its code. This
    imports nothing, and runs no code of a module.
    """
    try:
        found = look_up_quietly(module_name, qualname)
    except AttributeError:
        return None
    if type(found) is not type or not issubclass(found, Exception) or issubclass(RemoteError, found):
        return None
    if issubclass(found, RpcdistError) or any("__init_subclass__" in vars(base) for base in found.__mro__[:-1]):
        return None
    return found


def also_remote_error(cls: type[Exception], args: tuple[str, str, str, str]) -> RemoteError:
    """A `RemoteError` that is also a `cls`; its pickle names this function."""

    def reduce(exc: RemoteError) -> Any:
        return also_remote_error, (cls, exc.args)

    both = type(f"RemoteError_{cls.__name__}", (RemoteError, cls), {"__reduce__": reduce, "__module__": __name__})
    exc = rebuild_exception(both, args)
    assert isinstance(exc, RemoteError)
    restore_state(exc, ({}, dict(zip(("worker", "type_name", "text", "traceback"), args, strict=True))))
    _check_usable(exc)
    str(exc)
    return exc
