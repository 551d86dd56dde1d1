"""The user's hook that synchronises the buffers of a data parallel model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class BufferHookLocation(Enum):
    """When a buffer hook is called."""

    PRE_FORWARD = 1
    POST_FORWARD = 2

    @classmethod
    def _missing_(cls, value: object) -> BufferHookLocation | None:
        """The one of torch's name: programs take torch's."""
        return cls.__members__.get(value.name) if isinstance(value, Enum) else None


@dataclass(frozen=True, slots=True)
class BufferHook:
    """A function that synchronises buffers; it replaces the broadcast.

    Attributes:
        state: its first argument.
        hook: gets the state and the buffers by name; returns futures to wait for, or None.
        location: before or after the forward pass.
    """

    state: object
    hook: Callable[[object, dict[str, torch.Tensor]], list[torch.futures.Future[object]] | None]
    location: BufferHookLocation

    def call(self, buffers: dict[str, torch.Tensor]) -> None:
        """Calls the hook and waits for its futures."""
        for future in self.hook(self.state, buffers) or ():
            future.wait()
