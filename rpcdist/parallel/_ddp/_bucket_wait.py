"""Waiting for the reductions of a bucket: explains why they fail or take long."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn

from rpcdist.collectives import ProcessGroup, Work
from rpcdist.errors import CollectiveError
from rpcdist.parallel._ddp._ddp_errors import explained, list_names
from rpcdist.parallel._ddp._notices import Notices
from rpcdist.time_limits import DDP_NOTICE_POLL_S


class BucketWait:
    """Waits for the reductions of a bucket, and explains why they fail or take long.

    Args:
        group: the ranks that reduce.
        notices: where the ranks say which gradients they lack.
    """

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
