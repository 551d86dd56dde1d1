"""Where a launcher put this process: its rank and the world size, read from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rpcdist.errors import ConfigError

__all__ = ["Placement", "placement_from_environment"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a process in its job."""

    rank: int
    world_size: int


def placement_from_environment() -> Placement | None:
    """The rank and world size that torchrun, another launcher or `launch` gave this process; None without a launcher.

    Raises:
        ConfigError: only one of RANK and WORLD_SIZE is set, or they are not a rank and a world size.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        placement = Placement(int(rank or ""), int(world_size or ""))
    except ValueError as exc:
        raise ConfigError(
            f"RANK={rank!r} and WORLD_SIZE={world_size!r} in the environment: a launcher sets both to whole numbers. "
            "Unset both if no launcher started this process."
        ) from exc
    if not 0 <= placement.rank < placement.world_size:
        raise ConfigError(f"RANK={rank} in the environment is not from 0 to {placement.world_size - 1} (WORLD_SIZE)")
    return placement
