"""The functions of the workers of `call_cost.py`: each counts the Python functions that an operation runs on the thread
that begins it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from rpcdist import autograd, rpc

__all__ = [
    "functions_of_a_call",
    "functions_of_a_creation",
    "functions_of_a_method",
    "functions_of_a_pass",
    "functions_of_a_turn",
]

NUM_CALLS = 50
NUM_WARM_UP = 20  # names are known, and the connection stands


class Box:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


def nothing() -> None:
    pass


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x * factor


def functions_of(operation: Callable[[], object]) -> Counter[str]:
    """By name: how often one operation calls a Python function on this thread, on average."""
    for _ in range(NUM_WARM_UP):
        operation()
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        for _ in range(NUM_CALLS):
            operation()
    finally:
        sys.setprofile(None)
    return Counter({name: round(count / NUM_CALLS) for name, count in counts.items()})


def functions_of_a_call(to: str) -> Counter[str]:
    return functions_of(lambda: rpc.rpc_sync(to, nothing))


def functions_of_a_method(to: str) -> Counter[str]:
    box = rpc.remote(to, Box)
    return functions_of(box.rpc_sync().add)


def functions_of_a_creation(to: str) -> Counter[str]:
    """And of the value, which its reply brings along."""
    return functions_of(lambda: rpc.remote(to, nothing).to_here())


def functions_of_a_turn(to: str) -> Counter[str]:
    box = rpc.remote(to, Box, serial=True)
    return functions_of(lambda: box.rpc_sync().add())


def functions_of_a_pass(to: str) -> Counter[str]:
    """Forward and backward of one call, in a context."""
    x, factor = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)

    def step() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync(to, scaled, (x, factor)).sum()])

    return functions_of(step)
