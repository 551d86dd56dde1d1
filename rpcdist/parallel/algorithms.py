"""`Join`: training with uneven inputs. Ranks without more data continue to take part in the others' communication.

The names are those of `torch.distributed.algorithms`; `JoinHook` and `Joinable` are torch's own classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Final

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, Work
from rpcdist.errors import ConfigError, RpcdistError

__all__ = ["Join", "JoinHook", "Joinable", "UnevenInputs"]

SKEW_WARNING: Final = 1000


class UnevenInputs(RpcdistError):
    """Some rank ran out of inputs, and `throw_on_early_termination` was set.

    Attributes:
        ranks: ranks in the group that have no inputs left.
        me: this rank in the group.
    """

    def __init__(self, ranks: tuple[int, ...], me: int) -> None:
        super().__init__(ranks, me)
        self.ranks = ranks
        self.me = me

    def __str__(self) -> str:
        if self.me in self.ranks:
            return f"Rank {self.me} exhausted all inputs."
        names = ", ".join(map(str, self.ranks))
        return (
            f"Detected at least one rank that exhausted inputs. Throwing across all ranks. It was rank {names}; train "
            "without throw_on_early_termination, or give all ranks as many inputs"
        )


class CallingJoinHook(JoinHook):
    """Calls functions: `main` for each iteration of the other ranks, and `post` when all have joined."""

    def __init__(self, main: Callable[[], object], post: Callable[[bool], object] | None = None) -> None:
        self._main = main
        self._post = post

    def main_hook(self) -> None:
        self._main()

    def post_hook(self, is_last_joiner: bool) -> None:
        if self._post is not None:
            self._post(is_last_joiner)


class Join:
    """A context for loops of different lengths on the ranks. All ranks enter it.

    In each iteration the ranks count those that still train (one small all_reduce). Within the context, until all have
    joined, communicate only through the joinables.

    Args:
        joinables: in the same order on all ranks; all of one group.
        enable: False switches it off, if inputs are known to be even.
        throw_on_early_termination: whether to raise on every rank when the first rank runs out of inputs.
        kwargs: arguments of the joinables' hooks, e.g. `divide_by_initial_world_size`.

    Raises:
        ConfigError: no joinables, or several groups.
        UnevenInputs: at the end of the loop of the rank that ran out of inputs, and in the others' next iteration.
    """

    def __init__(
        self, joinables: list[Joinable], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: object
    ) -> None:
        if not joinables:
            raise ConfigError("The join context manager requires at least one joinable")
        groups = {id(joinable.join_process_group): joinable.join_process_group for joinable in joinables}
        if len(groups) > 1:
            raise ConfigError("Using join context manager with multiple process groups")
        self._joinables = joinables
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        self._process_group = joinables[0].join_process_group
        self._device = joinables[0].join_device
        for joinable in joinables:
            joinable._join_config = _JoinConfig(enable, throw_on_early_termination, joinable is joinables[0])

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._enable and kind is None:
                self._join()
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()

    def _join(self) -> None:
        is_last_joiner = True
        num_shadowed = 0
        while self._count_training():
            if self._throw:
                raise UnevenInputs(*_exhausted(self._process_group, self._device, True))
            for hook in self._join_hooks:
                hook.main_hook()
            is_last_joiner = False
            num_shadowed += 1
            if num_shadowed == SKEW_WARNING:
                warnings.warn(
                    f"Detected uneven input skew of greater than {SKEW_WARNING}: rank {self._process_group.rank()} has "
                    "that many fewer inputs than others, and only mirrors their communication",
                    stacklevel=3,
                )
        for hook in self._join_hooks:
            hook.post_hook(is_last_joiner)

    def _count_training(self) -> int:
        """Returns the number of ranks that began another iteration."""
        count = torch.zeros(1, device=self._device)
        collectives.all_reduce(count, group=self._process_group)
        return int(count.item())

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Announces another iteration of this rank. Call it before the iteration's communication.

        Returns:
            Work whose result is one tensor, the number of ranks that began an iteration; None if the joinable is not
            the first of an enabled `Join`.

        Raises:
            UnevenInputs: some rank has joined, and `throw_on_early_termination` was set.
        """
        config = joinable._join_config
        if not (config.enable and config.is_first_joinable):
            return None
        group, device = joinable.join_process_group, joinable.join_device
        work = collectives.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
        if config.throw_on_early_termination:
            exhausted, me = _exhausted(group, device, False)
            if exhausted:
                raise UnevenInputs(exhausted, me)
        return work


def _exhausted(group: ProcessGroup, device: torch.device, mine: bool) -> tuple[tuple[int, ...], int]:
    """Returns the ranks in the group that have no inputs left, and this rank."""
    flags = torch.zeros(group.size(), device=device)
    flags[group.rank()] = mine
    collectives.all_reduce(flags, group=group)
    return tuple(rank for rank, flag in enumerate(flags.tolist()) if flag), group.rank()
