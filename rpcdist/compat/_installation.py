"""`install`: puts rpcdist in torch's place in this process, and in the processes that it starts."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from typing import Any, Final

from rpcdist.compat._aliases import install_aliases
from rpcdist.compat._replaced_names import ALIASES, LATE_VIEWS, MISSING, TAKES_GROUPS, VIEWS
from rpcdist.compat._views import install_late, install_views, refuse_torch_groups
from rpcdist.errors import ConfigError

_MARK: Final = "rpcdist_compat"
"""The entry of what `multiprocessing` prepares its children with."""


def install() -> None:
    """Makes `torch.distributed`, its RPC, autograd, optimizers and algorithms, and torch's DDP, sampler and
    `SyncBatchNorm` mean ours in this process, and in processes that `multiprocessing`, `torch.multiprocessing` and
    `rpcdist.launch` start from it. torch's own code still finds torch's names. Calling it again does nothing.

    Call it before the modules are imported that use these names: `from torch.distributed import all_reduce` binds what
    the name means then.

    Raises:
        ConfigError: this torch has no `torch.distributed`, or its process group is initialized already.
    """
    if is_installed():
        return
    import torch.distributed
    from torch import nn

    if not torch.distributed.is_available():
        raise ConfigError("this torch was built without torch.distributed; use rpcdist itself instead")
    if torch.distributed.is_initialized():
        raise ConfigError(
            "torch's process group is initialized: call rpcdist.compat.install() before the program starts"
        )
    from rpcdist.parallel.sync_batch_norm import SyncBatchNorm

    install_views(VIEWS)  # first: these modules of torch import some of the others
    install_aliases(ALIASES, MISSING)
    install_late(LATE_VIEWS, TAKES_GROUPS)
    refuse_torch_groups()
    places: list[Any] = [nn, nn.modules, nn.modules.batchnorm]
    for place in places:
        place.SyncBatchNorm = SyncBatchNorm  # for torch, too: it is of torch's class
    _prepare_children()


def is_installed() -> bool:
    """Whether `install` has been called in this process."""
    return hasattr(multiprocessing.spawn.get_preparation_data, _MARK)


def _prepare_children() -> None:
    """Has each child of `multiprocessing` call `install`, before it imports the main module."""
    original: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _MARK: _InstallWhenRead()}

    setattr(get_preparation_data, _MARK, True)
    multiprocessing.spawn.get_preparation_data = get_preparation_data


class _InstallWhenRead:
    """Calls `install` in the process that unpickles it: children read their preparation before anything else."""

    def __reduce__(self) -> tuple[Callable[[list[str]], None], tuple[list[str]]]:
        return _install_in_child, (list(sys.path),)


def _install_in_child(path: list[str]) -> None:
    sys.path[:] = path
    install()
