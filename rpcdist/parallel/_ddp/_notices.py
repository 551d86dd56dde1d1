"""What ranks leave in the store for those that wait for them in vain.

A rank whose backward pass ended without some gradients does not take part in the reduction of their buckets. The others
cannot see why: to them it is only late. So it writes down what is missing, and they look when they have waited long.
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

__all__ = ["Notice", "Notices"]

logger = logging.getLogger(__name__)
MAX_TOLD: Final = 50


@dataclass(frozen=True, slots=True)
class Notice:
    """What one rank says.

    Attributes:
        rank: in the world.
        iteration: which backward pass, from 1.
        missing: the parameters without gradients.
        final: whether the rank gave up on them, with an error; else they may still come.
    """

    rank: int
    iteration: int
    missing: tuple[str, ...]
    final: bool

    def __str__(self) -> str:
        end = "has gone on without" if self.final else "ended a backward pass without"
        return f"rank {self.rank} {end} gradients of {list_names(self.missing)} in iteration {self.iteration}"


class Notices:
    """The board of one reducer.

    Args:
        group: its ranks.
        key: the same on all ranks, and of no other reducer.
    """

    def __init__(self, group: ProcessGroup, key: str) -> None:
        self._group = group
        self._key = key

    def post(self, iteration: int, missing: Sequence[str], final: bool) -> Notice:
        """Tells the others; a store that is gone only loses the explanation."""
        group = self._group
        notice = Notice(group.world_rank(group.rank()), iteration, tuple(missing), final)
        try:
            text = json.dumps({**asdict(notice), "missing": list(missing[:MAX_TOLD])})
            group.get_group_store().set(f"{self._key}/{group.rank()}", text)
        except (RpcdistError, RuntimeError, OSError) as exc:
            logger.debug("no notice could be left for the other ranks: %s", exc)
        return notice

    def read(self, iteration: int) -> list[Notice]:
        """What the other ranks said about this iteration."""
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
