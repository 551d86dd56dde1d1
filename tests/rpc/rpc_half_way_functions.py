"""The functions of the workers of `test_rpc_half_way`: calls with large payloads, and peers that stop or die in
them.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from rpcdist import rpc
from rpcdist.testing import LIMIT_S
from rpcdist.transport._framing.incoming import Incoming
from rpcdist.transport._framing.outgoing import _OutgoingTransfer

NUM_FLOATS = 4 << 20
"""16 MiB: twice what a sender may send without credit, so that it waits for a peer that stands still."""

NUM_CHUNKS = 3

kept: list[torch.Tensor] = []


def total(value: torch.Tensor) -> float:
    return float(value.sum())


def ones(number: float) -> torch.Tensor:
    return torch.full((NUM_FLOATS,), number)


def send(to: str, timeout_s: float = LIMIT_S) -> float:
    return rpc.rpc_sync(to, total, (ones(1.0),), timeout=timeout_s)


def fetch(to: str, timeout_s: float = LIMIT_S) -> float:
    return total(rpc.rpc_sync(to, ones, (1.0,), timeout=timeout_s))


def signal_half_way(how: str, number: int) -> None:
    """This process sends itself a signal, once, after some chunks of the next payload that it reads or writes."""
    owner: Any
    owner, name = {"send": (Incoming, "placed"), "fetch": (_OutgoingTransfer, "next_chunk")}[how]
    original = getattr(owner, name)
    num_chunks = 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_chunks
        result = original(*arguments)
        num_chunks += 1
        if num_chunks == NUM_CHUNKS:
            setattr(owner, name, original)
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, counted)


def stop_half_way(how: str) -> None:
    signal_half_way(how, signal.SIGSTOP)


def kill_half_way(how: str) -> None:
    signal_half_way(how, signal.SIGKILL)


# ---------------------------------------------------------------- lent memory


def keep(value: torch.Tensor) -> None:
    kept.append(value)


def lend(to: str, number: float) -> None:
    """Has the other worker keep a tensor that lies in memory of this one."""
    rpc.rpc_sync(to, keep, (ones(number),))


def totals_of_kept() -> list[float]:
    return [total(value) for value in kept]
