"""The processes that save or load together: the ranks of a group, or this one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.errors import CheckpointError, ConfigError

T = TypeVar("T")


class Ranks:
    """Does a step on all ranks, or on the first; where it fails on one, it fails on all.

    Args:
        group: by default the default group, if there is one.

    Raises:
        ConfigError: it is not a group of ours with this rank in it.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None and collectives.is_initialized():
            group = collectives.group.WORLD
        if group is not None and not isinstance(group, ProcessGroup):
            raise ConfigError(
                f"group is {group!r}: give a group of rpcdist.collectives with this rank in it; groups of torch save "
                "by torch.distributed.checkpoint"
            )
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0

    def all(self, what: str, step: Callable[[], T]) -> list[T]:
        """The results of all ranks. `what` is for the error."""
        if self._group is None:
            return [step()]
        error: Exception | None = None
        own: tuple[bool, T | str]
        try:
            own = (True, step())
        except Exception as exc:
            error = exc
            own = (False, f"{type(exc).__name__}: {exc}")
        outcomes: list[object] = [None] * self._group.size()
        collectives.all_gather_object(outcomes, own, group=self._group)
        found = cast("list[tuple[bool, T | str]]", outcomes)
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(found) if not succeeded]:
            raise CheckpointError(f"{what} failed on {'; '.join(failed)}")
        return [cast(T, result) for _, result in found]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """The result of the first rank, which alone does the step."""
        return cast(T, self.all(what, lambda: step() if self.is_first else None)[0])
