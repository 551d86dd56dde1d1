"""Starting the processes of a job on this machine, one per rank.

    def train(rank: int) -> float:
        init_process_group()  # finds the other ranks without arguments
        ...

    if __name__ == "__main__":
        losses = launch(train, workers=4)

The same program also runs under torchrun, which then starts the processes instead.
"""

from __future__ import annotations

from rpcdist._launch.job_plan import Role
from rpcdist._launch.launching import launch
from rpcdist._launch.placement import Placement, placement_from_environment

__all__ = ["Placement", "Role", "launch", "placement_from_environment"]
