"""Hooks of a data parallel model: for its buffers (the user's), and for ranks that join because they have no inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp
from rpcdist.parallel.algorithms import JoinHook


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


class DataParallelJoinHook(JoinHook):
    """Hands the two steps of a joined rank to the model.

    Args:
        shadow_iteration: takes part in the communication of one iteration of the other ranks.
        sync_final_model: copies the final model to all ranks; gets whether this rank is one that trained longest.
    """

    def __init__(self, shadow_iteration: Callable[[], None], sync_final_model: Callable[[bool], None]) -> None:
        self._shadow_iteration = shadow_iteration
        self._sync_final_model = sync_final_model

    def main_hook(self) -> None:
        self._shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._sync_final_model(is_last_joiner)


def count_ranks(mine: bool, group: ProcessGroup, device: torch.device) -> int:
    """Number of ranks that pass True. All ranks of the group must call it together."""
    flag = torch.tensor([float(mine)], device=device)
    collectives.all_reduce(flag, group=group)
    return int(flag.item())


def highest_rank(candidate: bool, group: ProcessGroup, device: torch.device) -> int:
    """The highest rank that is a candidate. All ranks of the group must call it together."""
    rank = torch.tensor([group.rank() if candidate else -1], device=device)
    collectives.all_reduce(rank, ReduceOp.MAX, group=group)
    return int(rank.item())
