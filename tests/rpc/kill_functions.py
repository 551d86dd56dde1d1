"""The functions of the server and the trainers of `test_kill_trainers.py`."""

from __future__ import annotations

import threading

from rpcdist import rpc

__all__ = ["num_steps", "release", "reset", "train"]

_lock = threading.Lock()
_steps: dict[str, int] = {}
_released = threading.Event()


def reset() -> None:
    """On the server: a new round of the test begins."""
    _released.clear()
    with _lock:
        _steps.clear()


def step(name: str) -> bool:
    """On the server: counts a step of a trainer, and says whether it shall go on."""
    with _lock:
        _steps[name] = _steps.get(name, 0) + 1
    return not _released.is_set()


def num_steps() -> int:
    """On the server: of all trainers."""
    with _lock:
        return sum(_steps.values())


def release() -> None:
    """On the server: the trainers shall come to an end."""
    _released.set()


def train() -> int:
    """On a trainer: steps until the server says that it is enough."""
    name, steps = rpc.get_worker_info().name, 1
    while rpc.rpc_sync("server", step, (name,)):
        steps += 1
    return steps
