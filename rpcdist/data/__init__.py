"""Distributes a data set over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

from torch.utils.data import distributed

from rpcdist import collectives
from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from rpcdist.collectives import ProcessGroup


__all__ = ["DistributedSampler"]


T_co = TypeVar("T_co", covariant=True)


class DistributedSampler(distributed.DistributedSampler[T_co]):
    """Gives each rank its own, equally large part of a data set.

    Call `set_epoch(epoch)` before each epoch: with `shuffle`, all ranks draw the same new order from it.

    Args:
        dataset: any object with a length.
        num_replicas: number of parts; by default the size of the group.
        rank: rank that gets the part; by default this one.
        shuffle: draw a new order in every epoch; else ranks take turns through the data set.
        seed: seed of the order, the same on all ranks.
        drop_last: drop the elements that do not divide evenly; else some elements occur twice.
        process_group: its size and rank are the defaults; the default group by default.

    Raises:
        ConfigError: there is no group and the numbers are not given, or the rank does not exist.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if num_replicas is None:
            num_replicas = collectives.get_world_size(process_group)
        if rank is None:
            rank = collectives.get_rank(process_group)
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]  # only `len` is used
