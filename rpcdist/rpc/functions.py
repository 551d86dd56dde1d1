"""Decorators for functions that are called over RPC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

__all__ = ["ASYNC_MARK", "IDEMPOTENT_MARK", "async_execution", "idempotent", "is_async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

ASYNC_MARK: Final = "_wrapped_async_rpc_function"
"""The attribute of functions that return a future for which their caller waits."""

IDEMPOTENT_MARK: Final = "_rpcdist_idempotent"
"""The attribute of functions that may run twice without harm."""


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that returns a `torch.futures.Future` and whose caller waits for that future's value.

    The worker's thread is free as soon as the function returns; the thread that completes the future sends the reply.
    The function may also return a future of `rpc_async` or of `then`.

    For static and class methods, this is the inner decorator (below `@staticmethod`); for `torch.jit.script`, the outer
    one.

    Args:
        fn: a function that returns a `torch.futures.Future`. Anything else fails the call with a `RuntimeError`.

    Returns:
        The wrapped function; called locally, it returns the future itself.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, fn)
    return wrapper


def is_async_execution(fn: object) -> bool:
    """Whether the function, or the function of a method, has the mark of `async_execution`."""
    return hasattr(fn, ASYNC_MARK)


def idempotent(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that may run twice, or on a replacement of its worker, without harm.

    Examples are reads, and writes of a value that does not depend on the previous one.

    If its worker is lost, `rpc_sync` and `rpc_async` call it again until the call's timeout, after random pauses that
    grow. For static and class methods, this is the inner decorator.
    """
    setattr(fn, IDEMPOTENT_MARK, True)
    return fn
