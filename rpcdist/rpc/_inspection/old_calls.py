"""Logs each call that has not ended for long, once, with the stacks of those who serve it or wait for it here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rpcdist.inspection import WorkerFacts, describe, explain
from rpcdist.rpc._calling.call_table import CallTable
from rpcdist.rpc._serving.active_calls import ActiveCalls
from rpcdist.time_limits import OLD_CALLS_LOOK_S

logger = logging.getLogger(__name__)

MAX_NAMED: Final = 10


class OldCalls:
    """One per agent; on the I/O loop.

    Both tables are in the order in which calls came, so a look costs nothing while the first call of each is young.

    Args:
        limit_s: the age at which a call is logged; 0 for never.
        made: the calls that this worker has made.
        served: the calls that it handles.
        facts: says what it does.
    """

    def __init__(self, limit_s: float, made: CallTable, served: ActiveCalls, facts: Callable[[], WorkerFacts]) -> None:
        self._limit_s = limit_s
        self._made = made
        self._served = served
        self._facts = facts
        self._seen_until = 0.0  # calls that began before were old at the last look
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Logs the calls that have become old since the last look; `now` is a time of the monotonic clock."""
        if not self._limit_s or now < self._next_look:
            return
        self._next_look = now + OLD_CALLS_LOOK_S
        old_before, seen_until = now - self._limit_s, self._seen_until
        self._seen_until = old_before
        made = ((call.made, call.what) for call in self._made.by_age() if call.flags.counts_as_work)
        served = ((call.arrived, call.__repr__) for call in self._served.by_age() if call.counts_as_work)
        found = [*_new_ones(made, seen_until, old_before), *_new_ones(served, seen_until, old_before)]
        if not found:
            return
        facts = self._facts()
        more = f" and {len(found) - MAX_NAMED} others" if len(found) > MAX_NAMED else ""
        logger.warning(
            "these calls have not ended on %s for %.0f s: %s%s. `python -m rpcdist stacks %s` follows them to other "
            "workers; RpcOptions(log_calls_after=...) sets the limit\n%s",
            facts.worker,
            self._limit_s,
            "; ".join(found[:MAX_NAMED]),
            more,
            facts.address,
            describe(explain([facts], older_than_s=self._limit_s)),
        )


def _new_ones(calls: Iterable[tuple[float, Callable[[], str]]], seen_until: float, old_before: float) -> Iterator[str]:
    """The calls that began in a span of time, of those in the order in which they began."""
    for began, what in calls:
        if began > old_before:
            return
        if began > seen_until:
            yield what()
