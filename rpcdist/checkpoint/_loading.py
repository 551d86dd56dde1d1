"""`load`: every process reads what it needs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import rpcdist.rpc as rpc
from rpcdist.checkpoint._entries import restore
from rpcdist.checkpoint._folders import checkpoint_path
from rpcdist.checkpoint._owners import by_owner, load_at_owner
from rpcdist.checkpoint._participants import Ranks
from rpcdist.checkpoint._storage import StoredEntries
from rpcdist.collectives import ProcessGroup
from rpcdist.rpc._executors.async_forms import async_form, off_loop


@off_loop("await checkpoint.load_async(...)")
def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, object],
    *,
    group: ProcessGroup | None = None,
    timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
) -> None:
    """Loads what `save` wrote, on any number of ranks and owners. All ranks of the group call it.

    The keys say what is loaded; a checkpoint may have more. Tensors, modules and objects with `load_state_dict` get
    their values in place, at the owner where they are behind a reference. Other values are replaced in `state`.
    The index and non-tensors are unpickled: load only checkpoints that you trust.

    Args:
        path, group, timeout: as for `save`.
        state: the values by key; changed.

    Raises:
        ConfigError: there is no checkpoint, or it does not fit; values may have been changed by then.
        CheckpointError: files are damaged, or it failed on another rank.
        WorkerLost: an owner died. RankLost: a rank died.
    """
    folder = str(checkpoint_path(path).resolve())  # all read the same one, even if a newer one is published meanwhile

    def read() -> None:
        here, there = by_owner(state)
        calls = [rpc.rpc_async(owner, load_at_owner, (folder, each), timeout=timeout) for owner, each in there.items()]
        stored = StoredEntries(folder)
        for key, value in here.items():
            state[key] = restore(key, value, stored)
        rpc.wait_all(calls)

    Ranks(group).all("loading", read)


load_async = async_form(load)
