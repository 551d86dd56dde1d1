"""Notices in the store: a rank that lacks gradients says so to the ranks that wait for it.

A rank whose backward pass ended without some gradients does not take part in the reduction of their buckets. The other
ranks see only that it is late. So it writes the names of the missing gradients into the group's store, and ranks that
have waited long read them there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rpcdist.collectives import ProcessGroup
from rpcdist.errors import RpcdistError
from rpcdist.parallel._ddp._ddp_errors import list_names

logger = logging.getLogger(__name__)
MAX_TOLD: Final = 50


@dataclass(frozen=True, slots=True)
class Notice:
    """The notice of one rank: gradients are missing.

    Attributes:
        rank: rank in the world.
        iteration: number of the backward pass, from 1.
        missing: names of the parameters without gradients.
        final: whether the rank has raised an error; else the gradients may still become ready.
        problem: the error, where it is not about missing gradients.
    """

    rank: int
    iteration: int
    missing: tuple[str, ...]
    final: bool
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"rank {self.rank} has given up iteration {self.iteration}: {self.problem}"
        end = "has gone on without" if self.final else "ended a backward pass without"
        return f"rank {self.rank} {end} gradients of {list_names(self.missing)} in iteration {self.iteration}"


class Notices:
    """The notices about one reducer, in the store of its group.

    Args:
        group: the ranks that reduce.
        key: prefix of the store's keys: the same on all ranks, and different for each reducer.
    """

    def __init__(self, group: ProcessGroup, key: str) -> None:
        self._group = group
        self._key = key

    def post(self, iteration: int, missing: Sequence[str], final: bool, problem: str = "") -> Notice:
        """Writes this rank's notice. Errors of the store are ignored: only the explanation is lost."""
        group = self._group
        notice = Notice(group.world_rank(group.rank()), iteration, tuple(missing), final, problem)
        try:
            text = json.dumps({**asdict(notice), "missing": list(missing[:MAX_TOLD])})
            group.get_group_store().set(f"{self._key}/{group.rank()}", text)
        except (RpcdistError, RuntimeError, OSError) as exc:
            logger.debug("no notice could be left for the other ranks: %s", exc)
        return notice

    def read(self, iteration: int) -> list[Notice]:
        """The notices of the other ranks about an iteration."""
        group, found = self._group, []
        try:
            store = group.get_group_store()
            for rank in range(group.size()):
                key = f"{self._key}/{rank}"
                if rank != group.rank() and store.check([key]):
                    fields = json.loads(store.get(key))
                    found.append(Notice(**{**fields, "missing": tuple(fields["missing"])}))
        except (RpcdistError, RuntimeError, OSError) as exc:
            logger.debug("the notices of the other ranks cannot be read: %s", exc)
        return [notice for notice in found if notice.iteration == iteration]
