"""How one worker of a static world takes part in the rounds in which all agree that everybody may go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._membership.departures import DEPART, ENDED, LEAVES, NOT_ARRIVED, POINTS
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.lifetime import Lifetime
from rpcdist.time_limits import (
    CONNECT_FIRST_PAUSE_S,
    CONNECT_LONGEST_PAUSE_S,
    MIN_WAIT_S,
    MISSING_NAMES_LIMIT_S,
)

logger = logging.getLogger(__name__)


class RoundOutcome(NamedTuple):
    """How a round has ended.

    Attributes:
        had_work: whether anybody had work, or the round was begun anew under another leader.
        losses: who is lost and was not waited for, and why, by name.
        led_here: whether this worker led it.
    """

    had_work: bool
    losses: Mapping[str, str]
    led_here: bool


class Departing:
    """The participating side of `Departures`; one per agent; its method blocks.

    Args:
        caller: makes the calls to the leader.
        directory: who is in the job, and who lives.
        lifetime: when it is over, another thread has closed RPC, and nobody is asked any more.
        silence_out_of_reach: see `Router.silence_out_of_reach`.
    """

    def __init__(
        self,
        caller: Caller,
        directory: Directory,
        lifetime: Lifetime,
        silence_out_of_reach: Callable[[Identity], float | None],
    ) -> None:
        self._caller = caller
        self._directory = directory
        self._lifetime = lifetime
        self._silence_out_of_reach = silence_out_of_reach

    def __repr__(self) -> str:
        return f"<Departing {self._directory.me.name}>"

    def take_part(self, had_work: bool, deadline: Deadline) -> RoundOutcome:
        """Says whether this worker had work since the last round, and waits until all living workers have said it.

        Raises:
            DeadlineExceeded: the time is over; the text says who is missing.
            WorkerLost: another worker leads, and lives, and cannot be reached. Its round waits for this worker, and one
                that this worker led would wait for those that the other one leads.
            RpcdistError: another thread has closed RPC in this process.
        """
        me = self._directory.me
        pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, deadline)
        pointed_to: int | None = None
        missing: list[str] | None = None
        is_new = False
        while True:
            leader = pointed_to if pointed_to is not None else self._directory.leader().id
            pointed_to = None
            self._check_leader_in_reach()
            limit_s = max(deadline.remaining_s(), MIN_WAIT_S) if deadline.is_finite else 0
            try:
                # What was said to a leader that is lost counts for nothing: so this worker was not idle for a round.
                answer = self._caller.gather(leader, DEPART, (me.name, had_work or is_new), limit_s)
            except DeadlineExceeded as exc:
                raise self._late(leader, missing) from exc
            except RpcdistError as exc:
                if self._lifetime.is_closed:
                    raise
                # Also a leader that just closes. Who leads next is asked in the next round of this loop.
                logger.debug("%s could not lead the shutdown: %s", self._directory.name_of(leader), exc)
                answer = [None]
            match answer:
                case [kind, bool(any_work), dict(losses)] if kind == ENDED:
                    return RoundOutcome(any_work or is_new, losses, leader == me.id)
                case [kind, int(other)] if kind == POINTS:
                    pointed_to = other
                case [kind, list(names)] if kind == LEAVES:
                    missing = [name for name in names if name != me.name]
            is_new = True
            if deadline.expired():
                raise self._late(leader, missing)
            time.sleep(next(pauses))  # its detector, or the leader's, decides meanwhile; a Ctrl-C ends it

    def _check_leader_in_reach(self) -> None:
        leader = self._directory.leader().id
        for identity in self._directory.suspected():
            if identity.id < leader and (silence_s := self._silence_out_of_reach(identity)) is not None:
                what = f"the shutdown of {self._directory.me.name!r}, which {identity.name!r} leads"
                raise WorkerLost(identity.name, what, silence_s, self._directory.losses().get(identity.name, ""))

    def _late(self, leader: int, missing: list[str] | None) -> DeadlineExceeded:
        name = self._directory.name_of(leader)
        text = f"shutdown of {self._directory.me.name!r} timed out"
        if missing is None:
            try:
                missing = self._caller.gather(leader, NOT_ARRIVED, (), MISSING_NAMES_LIMIT_S)
            except RpcdistError as exc:
                return DeadlineExceeded(f"{text}, and {name!r}, which leads it, did not say who is missing: {exc}")
        return DeadlineExceeded(f"{text}; these workers have not called it: {missing}")
