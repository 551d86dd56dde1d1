"""Names of `torch.distributed` that scripts use beside the documented ones."""

from __future__ import annotations

import pdb
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NewType, NoReturn

import torch

from rpcdist.collectives._api.operations import all_gather_single, barrier, reduce_scatter_single
from rpcdist.collectives._group.creation import open_group
from rpcdist.collectives._group.world import Group, current_world, default_group, member_group
from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.constants import default_pg_timeout
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError
from rpcdist.time_limits import DEBUGGER_LIMIT_S

__all__ = [
    "GroupName",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupNCCL2",
    "ProcessGroupNCCLLazy",
    "_all_gather_base",
    "_coalescing_manager",
    "_reduce_scatter_base",
    "breakpoint",
]

GroupName = NewType("GroupName", str)
"""The type of `ProcessGroup.group_name`."""


class _GlooNames(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroup) and instance.name() in ("gloo", "tcp")

    def __call__(cls, store: Store, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> ProcessGroup:
        return open_group(
            "ProcessGroupGloo",
            rank,
            tuple(range(size)),
            store,
            backend="gloo",
            timeout=timeout,
            options=None,
            device=None,
            description="made by its class",
        )


class ProcessGroupGloo(metaclass=_GlooNames):
    """torch's class: `ProcessGroupGloo(store, rank, size, timeout)` makes a group on its own, with a store on its own.

    Groups of the backend `tcp`, which answers to the name "gloo", are instances of it. End one by `shutdown()`.
    """


class _NcclNames(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__name__ == "ProcessGroupNCCL" and isinstance(instance, ProcessGroup) and instance.name() == "nccl"

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__} is a class of torch's, of which there are no objects here; make the group by "
            "init_process_group('nccl') or new_group(backend='nccl') (docs/nccl.md)"
        )

    @property
    def Options(cls) -> NoReturn:
        raise ConfigError(
            f"{cls.__name__}.Options are options of torch's communicator; pg_options here are "
            "rpcdist.collectives.nccl.NcclOptions (docs/nccl.md)"
        )


class ProcessGroupNCCL(metaclass=_NcclNames):
    """torch's class, for `isinstance`: groups of the backend `nccl` are instances of it. It makes none."""


class ProcessGroupNCCL2(metaclass=_NcclNames):
    """torch's class (2.14), for `isinstance`: no group is an instance of it."""


class ProcessGroupNCCLLazy(metaclass=_NcclNames):
    """torch's class (2.14), for `isinstance`: no group is an instance of it."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = DEBUGGER_LIMIT_S) -> None:
    """Starts the debugger on one rank, in the caller's frame; the others wait until it goes on. All ranks call it.

    Args:
        rank: the rank in the world to stop on.
        skip: pass over the first calls from this line.
        timeout_s: from now on the limit of the operations of all groups, so that none ends while somebody debugs; None
            leaves the limits.
    """
    caller = sys._getframe(1)
    group = default_group()
    if group.next_number(f"breakpoint at {caller.f_code.co_filename}:{caller.f_lineno}") <= skip:
        return
    if timeout_s is not None:
        for known in current_world().groups.values():
            known.set_timeout(timedelta(seconds=timeout_s))
    if group.rank() == rank:
        print(f"rank {rank} stops here; the other ranks wait for it", file=sys.stderr)
        _Debugger().set_trace(caller)
    barrier()


class _Debugger(pdb.Pdb):
    """A debugger for processes whose `sys.stdin` is not the terminal, as those of `multiprocessing`."""

    def interaction(self, *args: object, **kwargs: object) -> None:
        before = sys.stdin
        try:
            with open("/dev/stdin") as sys.stdin:
                super().interaction(*args, **kwargs)  # type: ignore[arg-type]  # its arguments differ between versions
        finally:
            sys.stdin = before


class _CoalescedWorks:
    """The works that `_coalescing_manager` yields."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None) -> None:
        """Adds an operation to wait for."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Waits for the operations that were added; those called inside without `async_op` are done."""
        for work in self.works:
            work.wait()


@contextmanager
def _coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[_CoalescedWorks]:
    """For scripts of torch: each operation inside runs when it is called, so nothing is coalesced.

    Small operations are cheap here; `all_reduce_coalesced` joins several into one.
    """
    member_group(group, "_coalescing_manager")
    yield _CoalescedWorks()


def _all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """The old name of `all_gather_into_tensor`."""
    _renamed("_all_gather_base", "all_gather_into_tensor")
    return all_gather_single(output_tensor, input_tensor, group, async_op)


def _reduce_scatter_base(
    output: torch.Tensor,
    input: torch.Tensor,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """The old name of `reduce_scatter_tensor`."""
    _renamed("_reduce_scatter_base", "reduce_scatter_tensor")
    return reduce_scatter_single(output, input, op, group, async_op)


def _renamed(name: str, instead: str) -> None:
    warnings.warn(f"`{name}` is deprecated; please use `{instead}`", FutureWarning, stacklevel=3)
