"""What a rank without data does for a model whose other ranks still train."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp
from rpcdist.parallel.algorithms import JoinHook

if TYPE_CHECKING:
    from rpcdist.parallel.distributed import DistributedDataParallel

__all__ = ["DataParallelJoinHook", "count_ranks", "highest_rank"]


class DataParallelJoinHook(JoinHook):
    """Mirrors the communication of one iteration.

    Args:
        model: the model.
        divide_by_initial_world_size: whether gradients are divided by the size of the group, and not by the number of
            ranks that still train.
    """

    def __init__(self, model: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._model = model
        model._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        self._model._shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._model._sync_final_model(is_last_joiner)


def count_ranks(mine: bool, group: ProcessGroup, device: torch.device) -> int:
    """How many ranks say yes; all ranks ask together."""
    flag = torch.tensor([float(mine)], device=device)
    collectives.all_reduce(flag, group=group)
    return int(flag.item())


def highest_rank(candidate: bool, group: ProcessGroup, device: torch.device) -> int:
    """The highest rank that is a candidate; all ranks ask together."""
    rank = torch.tensor([group.rank() if candidate else -1], device=device)
    collectives.all_reduce(rank, ReduceOp.MAX, group=group)
    return int(rank.item())
