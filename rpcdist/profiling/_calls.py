"""The kinds of calls that can be profiled, and the functions that they call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from rpcdist import rpc

CALLEE: Final = "callee"


def noop() -> None:
    """Does nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Sends its argument back."""
    return tensor


class Counter:
    """An object that lives on the callee."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        """Counts one more."""
        self.count += 1
        return self.count


def make_call(kind: str, size_bytes: int) -> Callable[[], object]:
    """A call of that kind; it returns when its answer is there.

    Args:
        kind: one of `rpcdist.profiling._command.KINDS`.
        size_bytes: of the tensor of an echo.
    """
    if kind == "noop":
        return partial(rpc.rpc_sync, CALLEE, noop)
    if kind == "echo":
        return partial(rpc.rpc_sync, CALLEE, echo, args=(torch.zeros(max(1, size_bytes // 4)),))
    if kind == "remote":
        return lambda: rpc.remote(CALLEE, noop).to_here()
    counter = rpc.remote(CALLEE, Counter)
    return lambda: counter.rpc_sync().increment()
