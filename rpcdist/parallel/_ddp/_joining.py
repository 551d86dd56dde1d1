"""What a rank without data does for a model whose other ranks still train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcdist.parallel.algorithms import JoinHook

if TYPE_CHECKING:
    from rpcdist.parallel.distributed import DistributedDataParallel

__all__ = ["DataParallelJoinHook"]


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
