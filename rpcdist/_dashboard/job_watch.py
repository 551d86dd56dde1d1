"""Queries the workers of a job periodically while there is a viewer."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from rpcdist._dashboard.job_history import JobHistory
from rpcdist._inspect.asking import Asker
from rpcdist.errors import RpcdistError, text_of
from rpcdist.inspection import WorkerFacts
from rpcdist.inspection.facts import JobFacts
from rpcdist.waiters import ends_within, run_in_thread

logger = logging.getLogger(__name__)


class JobWatch:
    """Queries a job once in a period while there are viewers; on one event loop.

    Args:
        asker: queries the workers; its calls block, so a thread makes them.
        address: the address of a worker of the job. If it stops answering, other workers are queried.
        period_s: the time between two queries, in seconds.
    """

    def __init__(self, asker: Asker, address: str, period_s: float) -> None:
        self.history = JobHistory()
        self.num_queries = 0
        self._asker = asker
        self._addresses = [address]
        self._period_s = period_s
        self.num_viewers = 0
        self._wanted = asyncio.Event()
        self._queried = asyncio.Condition()

    async def run(self) -> None:
        """Queries the job until it is cancelled."""
        while True:
            await self._wanted.wait()
            began = time.monotonic()
            try:
                answers = await run_in_thread(partial(ask, self._asker, self._addresses), _nothing, "rpcdist-query")
                self.history.add(answers, time.time())
            except Exception as error:  # shown in the view, which continues
                logger.exception("the query of the job failed")
                answers = JobFacts(error=f"the query of the job failed: {text_of(error)}")
                self.history.add(answers, time.time())
            if not answers.error:
                others = [facts.address for facts in answers.workers if facts.address != self._addresses[0]]
                self._addresses[1:] = others[:3]
            self.num_queries += 1
            async with self._queried:
                self._queried.notify_all()
            await asyncio.sleep(max(0.0, self._period_s - (time.monotonic() - began)))

    async def ask(self, worker: str) -> WorkerFacts | None:
        """All facts of a worker now; without an answer, the last ones, if there are any."""
        last = self.history.facts_of(worker)
        if last is None:
            return None
        try:
            return await run_in_thread(partial(self._asker.facts_at, last.address), _nothing, "rpcdist-query")
        except RpcdistError as error:
            logger.debug("%s does not answer: %s", worker, error)
            return last

    async def next_query(self, after: int, limit_s: float) -> int:
        """Waits until there were more queries than `after`, or for `limit_s`; returns the number of queries."""
        async with self._queried:
            await ends_within(self._queried.wait_for(lambda: self.num_queries > after), limit_s)
        return self.num_queries

    def enter(self) -> None:
        self.num_viewers += 1
        self._wanted.set()

    def leave(self) -> None:
        """Removes a viewer from the count. Without viewers there are no queries."""
        self.num_viewers -= 1
        if self.num_viewers == 0:
            self._wanted.clear()


def _nothing() -> None:
    """Cancels nothing: an abandoned query ends by itself, because its waits have limits."""


def ask(asker: Asker, addresses: list[str]) -> JobFacts:
    """The facts of the job at the first address that answers; blocks."""
    reason = ""
    for address in addresses:
        try:
            job = asker.job_at(address)
        except RpcdistError as error:
            reason = reason or str(error)
            continue
        if job.workers or job.silent:
            return job
    return JobFacts(error=reason or "no worker of the job answers")
