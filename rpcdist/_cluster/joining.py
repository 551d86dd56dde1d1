"""How each process of a `LocalCluster` becomes its worker."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rpcdist._launch.rank_call import main_has_a_file

if TYPE_CHECKING:
    from rpcdist.rpc import RpcOptions


def join_cluster(rank: int, names: Sequence[str], address: str, given: RpcOptions | None, serve: bool = False) -> None:
    """Joins as worker `rank` of `names` at `address`, with the options that the user gave; `serve` until the end."""
    from rpcdist import rpc  # this module is imported before the new processes start; torch, after

    options = rpc.RpcOptions() if given is None else copy.copy(given)
    options.init_method = address
    if not main_has_a_file():
        options.by_value = True
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if serve:
        rpc.shutdown()
