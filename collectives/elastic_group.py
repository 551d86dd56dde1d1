"""`ElasticGroup`: a default group whose ranks may die and be replaced while the others continue.

Each time that a rank is lost, leaves or wants to join, the processes form the default group again, in numbered rounds.
They need only a store that outlives the ranks: any rank may die, including rank 0.
`rpcdist.parallel.ElasticDataParallel` uses it for training.

Guarantees:

 1. A process is in at most one group, and all members of a round agree on the members and their ranks, because the
    store accepts the outcome of a round only once.
 2. The others do not wait for a process whose address refuses connections, or that said that it leaves. For a process
    that does not join because it is stopped or computes, they wait up to `timeout`; it may join later.
 3. Records are signed with the job's token. A wrong signature raises `AuthenticationFailed`, and an invalid record
    raises `RendezvousError`.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from rpcdist.collectives._group.creation import GroupSettings, open_group
from rpcdist.collectives._group.elastic_rounds import (
    Candidate,
    ClosedRound,
    ElasticRecords,
    awaited,
    close,
    is_complete,
)
from rpcdist.collectives._group.local_process import bind_host
from rpcdist.collectives._group.state import LEFT
from rpcdist.collectives._group.world import current_world
from rpcdist.collectives._operations.operation import check_timeout
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._stores.store_base import Store
from rpcdist.collectives.backends import Backend
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import (
    AuthenticationFailed,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    DistNetworkError,
    JobEnded,
    RankLost,
    RendezvousError,
    RpcdistError,
    StoreTimeout,
    TransportError,
)
from rpcdist.time_limits import (
    CHECK_INTERVAL_S,
    ELASTIC_TIMEOUT_S,
    FIRST_PAUSE_S,
    GROUP_TIMEOUT_S,
    LONGEST_PAUSE_S,
    QUICK_ANSWER_LIMIT_S,
)
from rpcdist.transport.hub_connector import HubAddress

__all__ = ["ElasticGroup"]

logger = logging.getLogger(__name__)

_ATTEMPT_FAILED = (CollectiveError, RendezvousError, DistNetworkError, StoreTimeout, TransportError)
"""The errors of creating a group if one of its ranks ends meanwhile."""


class ElasticGroup:
    """This process's part in a default group that is formed repeatedly; use it from one thread.

    Args:
        store: a store that outlives the ranks, e.g. a `FileStore`, or a `TCPStore` that the launcher serves. All
            processes of the job pass the same store, or the same part of one, which has no other users.
        num_ranks: the number of ranks that must join before the first group is formed.
        min_ranks: the number of ranks for later groups; with fewer, the remaining ranks wait for others.
        timeout: limit of each operation of the group, and of the wait for a living rank that does not join.
        backend: as in `init_process_group`.
        description: the work of the processes; a process with another description is refused.

    Attributes:
        round: the last group's members; None before the first.

    Raises (constructor):
        ConfigError: an argument is wrong.
        TransportError: this process cannot listen for others.
    """

    def __init__(
        self,
        store: Store,
        *,
        num_ranks: int,
        min_ranks: int = 1,
        timeout: timedelta | None = None,
        backend: str = "tcp",
        description: str = "",
    ) -> None:
        if not 1 <= min_ranks <= num_ranks:
            raise ConfigError(f"min_ranks must be from 1 to num_ranks, but {min_ranks=} and {num_ranks=}")
        self._store = PrefixStore("elastic", store)
        self._num_ranks = num_ranks
        self._min_ranks = min_ranks
        self._timeout = timedelta(seconds=ELASTIC_TIMEOUT_S) if timeout is None else check_timeout(timeout)
        self._backend = Backend(backend)
        self._description = description
        self._identity = uuid.uuid4().hex
        self._world = current_world()
        if self._world.default is not None:
            raise ConfigError("the default group exists already; ElasticGroup replaces init_process_group")
        self._records = ElasticRecords(self._store, self._world.process.credentials())
        self._world.process.acquire_sockets(bind_host(store))
        self._has_left = False
        self._address = self._world.process.hub.address
        self._number = -1
        self.round: ClosedRound | None = None
        self._world.process.close_at_exit(self)

    def __repr__(self) -> str:
        size = 0 if self.round is None else len(self.round.members)
        return f"<ElasticGroup: round {self._number} of {size} ranks in {self._store.address}>"

    # ------------------------------------------------------------ forming

    def form(self, progress: int, *, is_new: bool) -> ProcessGroup:
        """Leaves the old group and makes the next default group; blocks until enough processes have joined.

        Args:
            progress: the number of steps of this process's state; see `round.source` and `round.behind`.
            is_new: whether this process has neither taken over nor given the state of a group yet.

        Raises:
            JobEnded: the other ranks have finished.
            RendezvousError: too few ranks joined in time, or the others have another description.
            AuthenticationFailed: a process without the job's token writes to the store.
            DistStoreError: the store cannot be reached.
        """
        self._leave_group()
        deadline = Deadline.after(GROUP_TIMEOUT_S)
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        own = Candidate(self._identity, self._address, progress, is_new, self._description)
        while True:
            number = self._records.first_open_round(self._number)
            previous = self._records.closed_round(number - 1).members if number else ()
            self._records.register(number, own)
            closed = self._outcome(number, own, previous, deadline)
            self._number = number
            if self._identity in closed.refused:
                raise RendezvousError(
                    f"this process is refused: it has {self._description}, but the present ranks have "
                    f"{closed.refused[self._identity]}. Start it with the same program and options."
                )
            rank = closed.rank_of(self._identity)
            if rank is None:  # this process joined after the round was closed
                if deadline.expired():
                    raise RendezvousError(
                        f"round {number} and all rounds of the last {GROUP_TIMEOUT_S:g} s were closed without this "
                        "process"
                    )
                continue
            try:
                group = self._open(number, closed, rank)
            except (AuthenticationFailed, CollectiveMismatch):
                raise
            except _ATTEMPT_FAILED as exc:
                if deadline.expired():
                    raise
                logger.info("the group of round %d could not be made: %s", number, exc)
                time.sleep(next(pauses))  # a rank was lost meanwhile; it is not in the next round
                continue
            self.round = closed
            return group

    def others_wait(self) -> bool:
        """Whether a process waits to join the next group. Costs one small request to the store."""
        return self._records.has_candidates(self._number + 1)

    def _outcome(self, number: int, own: Candidate, previous: tuple[Candidate, ...], deadline: Deadline) -> ClosedRound:
        patience = Deadline.after(self._timeout.total_seconds())
        gone: set[str] = set()
        while True:
            if self._records.is_closed(number):
                return self._records.closed_round(number)
            if self._records.has_ended():
                raise JobEnded(f"the job in {self._store.address} has finished; this process can end")
            candidates = self._records.candidates(number, own)
            missing = [each for each in awaited(previous, candidates) if each.identity not in gone]
            gone.update(each.identity for each in missing if not deadline.expired() and self._is_gone(each))
            everybody = all(each.identity in gone for each in missing)
            if (everybody or patience.expired()) and is_complete(candidates, self._num_ranks, self._min_ranks):
                return self._records.close_round(number, close(candidates, previous))
            if deadline.expired():
                raise RendezvousError(
                    f"only {len(candidates)} processes have joined round {number} within {GROUP_TIMEOUT_S:g} s; "
                    f"{self._num_ranks} are needed at the start, and {self._min_ranks} later"
                )
            with suppress(StoreTimeout):
                self._records.wait_until_closed(number, CHECK_INTERVAL_S)

    def _open(self, number: int, closed: ClosedRound, rank: int) -> ProcessGroup:
        def check() -> None:
            if self.others_wait():
                raise RankLost(f"making the group of round {number}", "a rank gave up and forms the next group", ())
            for other, each in enumerate(closed.members):
                if other != rank and self._is_gone(each):
                    raise RankLost(f"making the group of round {number}", f"rank {other} was lost", (other,))

        store = PrefixStore(f"{number}/group", self._store)
        title = f"the group of round {number}"
        settings = GroupSettings(self._backend, self._timeout, title, outlives_ranks=True)
        group = open_group("0", rank, tuple(range(len(closed.members))), store, settings, check=check)
        self._world.begin(group, store)
        return group

    def _is_gone(self, member: Candidate) -> bool:
        """Whether a process has left or died. A host that does not answer may only be slow, so it counts as alive."""
        if self._records.has_left(member.identity):
            return True
        place = HubAddress.parse(member.address)
        try:
            socket.create_connection((place.host, place.port), QUICK_ANSWER_LIMIT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    # ------------------------------------------------------------ leaving

    def close(self, timeout_s: float) -> None:
        """Runs the steps at the end of the process."""
        del timeout_s  # each step is bounded
        self.leave()

    def end(self) -> None:
        """Records that the job has finished, so that a process that wants to join later gets `JobEnded`."""
        self._records.end()

    def leave(self) -> None:
        """Leaves the group, if any, and the job; the other ranks continue at once. Idempotent, bounded."""
        if self._has_left:
            return
        self._has_left = True
        try:
            with suppress(RpcdistError):  # without the store, the others notice that the address refuses connections
                self._records.leave(self._identity)
            self._leave_group()
        finally:
            self._world.process.release_sockets()

    def _leave_group(self) -> None:
        if self._world.default is None:
            return
        for group in reversed(list(self._world.groups.values())):
            lost = group.lost_ranks()
            if lost:
                group.abort()
            reasons = [reason for reason in dict.fromkeys(lost.values()) if reason != LEFT]
            if reasons and group is self._world.default:
                logger.warning("%s; the others continue without it", "; ".join(reasons))
            group.shutdown()
        self._world.end()
