"""`rref.rpc_sync().method(...)`: calls on the value of a reference, run by its owner."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Literal, Protocol

import torch

from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import copy_outcome
from rpcdist.rpc._rref.host import RRefHome
from rpcdist.rpc.functions import is_async_execution
from rpcdist.rpc.future import Future

__all__ = ["Mode", "RRefProxy"]

Mode = Literal["rpc_sync", "rpc_async", "remote"]


class ProxiedRRef(Protocol):
    """What a proxy needs of its reference."""

    @property
    def _home(self) -> RRefHome: ...

    def _get_type(self, timeout: float, blocking: bool) -> Any: ...


class RRefProxy:
    """Its attributes are functions that call the method of that name at the owner. May be kept and used again."""

    def __init__(self, rref: ProxiedRRef, mode: Mode, timeout: float) -> None:
        self._rref = rref
        self._mode: Mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getitem__", "__len__"):
            raise AttributeError(name)  # copy, pickle and the like ask for these: no question for the owner
        return partial(_call, self._rref, self._mode, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself."""
        return _call(self._rref, self._mode, "__call__", self._timeout, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._mode} proxy of {self._rref!r}>"


def _call(rref: ProxiedRRef, mode: Mode, method: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    type_future = rref._get_type(timeout=timeout, blocking=False)
    if mode == "rpc_async" and not type_future.done():
        return _call_when_known(type_future, rref, method, timeout, args, kwargs)
    return _call_now(type_future.wait(), rref, mode, method, timeout, args, kwargs)


def _call_now(
    kind: type,
    rref: ProxiedRRef,
    mode: Mode,
    method: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    home = rref._home
    call = home.rpc_sync if mode == "rpc_sync" else home.rpc_async if mode == "rpc_async" else home.remote_on
    return call(rref, _invoker(kind, method), (method, args, kwargs), timeout)


def _call_when_known(
    type_future: Future[type],
    rref: ProxiedRRef,
    method: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Future[Any]:
    result: Future[Any] = Future()

    def known(future: Future[type]) -> None:
        try:
            call = _call_now(future.value(), rref, "rpc_async", method, timeout, args, kwargs)
        except Exception as exc:
            result._fail(exc)
            return
        result._on_cancel = call.cancel
        call.is_quiet = True
        call.add_done_callback(lambda done: copy_outcome(done, result))

    type_future.add_done_callback(known)
    return result


def _invoker(kind: type, method: str) -> Any:
    """How the owner has to run the method; raises `AttributeError` if the type has none of that name."""
    if issubclass(kind, torch.jit.ScriptModule | torch._C.ScriptModule):  # their methods cannot be asked
        return proxied._local_invoke
    function = getattr(kind, method)
    if is_async_execution(function):
        return proxied._local_invoke_async_execution
    if inspect.iscoroutinefunction(function):
        return proxied._local_invoke_coroutine
    return proxied._local_invoke
