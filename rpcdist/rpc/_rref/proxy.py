"""`rref.rpc_sync().method(...)`: calls on the value of a reference, run by its owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from rpcdist.errors import RRefError
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import Handle, copy_outcome
from rpcdist.rpc._rref.host import RRefHome
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.future import Future

__all__ = ["KnownMethod", "Mode", "RRefProxy", "RemoteMethod", "method_name"]

R = TypeVar("R")
Mode = Literal["rpc_sync", "rpc_async", "remote"]


class KnownMethod(NamedTuple):
    """What was found out about a method: good as long as the class has the same function under the name.

    Attributes:
        kind: the class of the value.
        function: the method, as an attribute of the class.
        invoker: the one of `proxied.INVOKERS` that runs it.
    """

    kind: type
    function: FunctionType
    invoker: Any


class ProxiedRRef(Protocol):
    """What a proxy needs of its reference."""

    _known_methods: dict[str, KnownMethod]

    @property
    def _home(self) -> RRefHome: ...

    @property
    def _handle(self) -> Handle: ...

    def _get_type(self, timeout: float, blocking: bool) -> Any: ...

    def _get_invoker_name(self, method: str, timeout: float) -> Future[str]: ...

    def _forget_question(self, known: Future[Any]) -> None: ...


class RemoteMethod(partial[Any]):
    """What an attribute of a proxy is: nothing has been asked yet, so it may be a method of the value or not.

    Its arguments are the reference or actor, the mode, the name and the timeout in seconds.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        target, mode, name, _ = self.args
        return f"<{name!r} of {target!r}: call it to run it at the owner, or to read it: .{mode}().{name}()>"


class RRefProxy(Generic[R]):
    """Its attributes are functions that call the method of that name at the owner; one that is no method is read by a
    call without arguments. May be kept and used again. `R` is what the calls return, as far as checkers can know it.
    """

    def __init__(self, rref: ProxiedRRef, mode: Mode, timeout: float) -> None:
        self._rref = rref
        self._mode: Mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getitem__", "__len__"):
            raise AttributeError(name)  # copy, pickle and the like ask for these: no question for the owner
        return RemoteMethod(_call, self._rref, self._mode, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Calls the value itself."""
        return cast(R, _call(self._rref, self._mode, "__call__", self._timeout, *args, **kwargs))

    def __repr__(self) -> str:
        return f"<{self._mode} proxy of {self._rref!r}>"


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


def _call(rref: ProxiedRRef, mode: Mode, method: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    known: Future[type] | Future[str]
    if rref._handle.state.is_serial:
        return rref._home.in_turn(rref, mode, method, args, kwargs, timeout)
    way = rref._known_methods.get(method)
    if way is not None and getattr(way.kind, method, None) is way.function:
        return _start(rref, mode, way.invoker, method, timeout, args, kwargs)
    if rref._home.allow_pickle:
        known = rref._get_type(timeout=timeout, blocking=False)
    else:
        known = rref._get_invoker_name(method, timeout)
    if mode == "rpc_async" and not known.done():
        return _call_when_known(known, rref, method, timeout, args, kwargs)
    try:
        answer = known.wait()
    except BaseException:
        rref._forget_question(known)
        raise
    finally:
        del known  # it has the error, and that has this frame: see the note "frames" in future.py
    return _call_now(answer, rref, mode, method, timeout, args, kwargs)


def _call_now(
    known: type | str,
    rref: ProxiedRRef,
    mode: Mode,
    method: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if mode == "remote":
        proxied.check_method(known, method)
    invoker = _invoker(known, method)
    if isinstance(known, type) and not proxied.is_scripted(known):
        function = getattr(known, method, None)
        if type(function) is FunctionType:
            rref._known_methods[method] = KnownMethod(known, function, invoker)
    return _start(rref, mode, invoker, method, timeout, args, kwargs)


def _start(
    rref: ProxiedRRef,
    mode: Mode,
    invoker: Any,
    method: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    home = rref._home
    call = home.rpc_sync if mode == "rpc_sync" else home.rpc_async if mode == "rpc_async" else home.remote_on
    return call(rref, invoker, (method, args, kwargs), timeout)


def _call_when_known(
    known: Future[type] | Future[str],
    rref: ProxiedRRef,
    method: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Future[Any]:
    result: Future[Any] = Future()

    def on_known(future: Future[Any]) -> None:
        if (error := future.exception()) is not None:
            rref._forget_question(future)
            result._fail(copied(error))
            return
        try:
            call = _call_now(future.value(), rref, "rpc_async", method, timeout, args, kwargs)
        except Exception as exc:
            result._fail(copied(exc))  # without this frame, which has the result
            return
        result._on_cancel = call.cancel
        call.is_quiet = True
        call.add_done_callback(lambda done: copy_outcome(done, result))

    known.add_done_callback(on_known)
    return result


def _invoker(known: type | str, method: str) -> Any:
    """How the owner has to run the method, from the class of the value, or from the owner's word for it."""
    if isinstance(known, str):
        if known not in proxied.INVOKERS:
            raise RRefError(f"the owner runs the method {method!r} by {known!r}, which this version does not know")
        return proxied.INVOKERS[known]
    return proxied.invoker_of(known, method)
