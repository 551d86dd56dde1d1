"""Notices in the store: a rank that lacks gradients says so to the ranks that wait for it.

A rank whose backward pass ended without some gradients does not take part in the reduction of their buckets. The other
ranks see only that it is late. So it writes the names of the missing gradients into the group's store, and ranks that
have waited long read them there.

`BucketWait` waits for the reductions of a bucket, and explains why they fail or take long.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

from rpcdist.collectives import ProcessGroup, Work
from rpcdist.errors import CollectiveError, RpcdistError
from rpcdist.parallel._ddp._ddp_errors import explained, list_names
from rpcdist.time_limits import DDP_NOTICE_POLL_S

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


class BucketWait:
    """Waits for the reductions of a bucket, and explains why they fail or take long."""

    def __init__(self, group: ProcessGroup, notices: Notices) -> None:
        self._group = group
        self._notices = notices
        self._told = 0

    def wait(self, work: Work, number: int, names: Sequence[str], iteration: int) -> None:
        """Returns when the operation is done.

        Raises:
            CollectiveError: it failed, or another rank has given up on it; names that rank and the parameters.
        """
        try:
            while not work.is_completed():
                self._wait_a_while(work)
                if not work.is_completed():
                    self._look(work, number, iteration)
            work.wait()
        except CollectiveError as exc:
            self.fail(exc, number, names, iteration)

    @staticmethod
    def _wait_a_while(work: Work) -> None:
        try:
            work.wait(DDP_NOTICE_POLL_S)
        except CollectiveError:
            if work.is_completed():
                raise

    def _look(self, work: Work, number: int, iteration: int) -> None:
        for notice in self._notices.read(iteration):
            if notice.final:
                backend = self._group.backend(self._group.object_device)
                backend.abort(f"the reduction of bucket {number} cannot end: {notice}")
                work.wait()
            elif self._told != iteration:
                self._told = iteration
                warnings.warn(f"still waiting in bucket {number}: {notice}", RuntimeWarning, stacklevel=2)

    def fail(self, error: CollectiveError, number: int, names: Sequence[str], iteration: int) -> NoReturn:
        """Raises the error with details: which gradients were reduced, and the notices of other ranks about them."""
        rank = self._group.world_rank(self._group.rank())
        told = "".join(f"; {notice}" for notice in self._notices.read(iteration))
        raise explained(
            error,
            f"rank {rank} reduced bucket {number} of iteration {iteration}, with the gradients of {list_names(names)}"
            f"{told}. If a rank ran out of data, train under `with model.join():`",
        ) from error.__cause__  # the text of the error itself is in that of the new one
