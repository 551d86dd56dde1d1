"""The coordinator's service `Membership`.

The rules are in `roster.py`; this file waits for their outcome. The whole service runs on the I/O loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import CallRefused, listed
from rpcdist.ids import Identity
from rpcdist.rpc._membership.recovery import Probe, Recovery
from rpcdist.rpc._membership.roster import MembershipTable, Verdict
from rpcdist.rpc._membership.roster_messages import departures_to_proto, member_from_proto, members_to_bytes
from rpcdist.rpc._peers.directory import COORDINATOR, Event, Member
from rpcdist.time_limits import ANSWER_LIMIT_S, PARKED_LIMIT_S, PEER_TIMEOUT_S
from rpcdist.transport.identities import identity_from_proto

logger = logging.getLogger(__name__)

Outcome = pb.JoinReply.Outcome
NEWS_AT_ONCE = 64  # up to this number of members, each change is sent at once; in larger worlds, several together
MAX_VERSION = 1 << 60  # a peer may claim any version; later ones must fit into 64 bits


async def _is_alive(member: Member) -> bool:
    return True


class MembershipService:
    """Answers `Join`, `Leave` and `Members`; register it with `Node.add_service`. I/O loop only.

    Args:
        probe: asks a member whether it lives: one whose name or rank a newcomer has, and, after the loss of another
            coordinator, one that does not return. Only a member that does not answer is declared lost.
        attempt: the start of the job's processes to which this one belongs.
        recovery_s: how long the members of the previous coordinator have to return, in seconds, once the first has;
            members that live then stay in the job in any case. In a static world, the new list is not complete before
            half of that has passed since the start of the service: if the whole job was restarted, its new processes
            join in that time, and take precedence.

    Attributes:
        table: the list of workers; read it, and change it through this service.
        changed: published when the list has changed, with whether that is urgent, as a loss or a replacement is.
        is_closed: whether no more workers are admitted; workers that try to join look for the coordinator again.
    """

    def __init__(
        self, probe: Probe = _is_alive, attempt: str = "", recovery_s: float = PEER_TIMEOUT_S, rank: int = COORDINATOR
    ) -> None:
        self.table = MembershipTable()
        self.changed: Event[[bool]] = Event()
        self.is_closed = False
        self._probe = probe
        self._attempt = attempt
        self._rank = rank
        self._recovery_s = recovery_s
        self._started = time.monotonic()
        self._recovery: Recovery | None = None
        self._has_recovered = False
        self._absent: Mapping[Identity, str] = {}  # the workers that had not returned when the recovery ended
        self._waiting: set[asyncio.Future[Verdict]] = set()
        self._latest: dict[Identity, asyncio.Future[Verdict]] = {}
        self._encoded = (-1, b"")  # the version of the list, and the list
        self._answered: set[int] = set()  # incarnations that were notified of the broken world
        self._changed = asyncio.Event()  # set when the list, the versions that members know, or `_answered` has changed
        self._announces = False

    async def join(self, peer: Identity, request: pb.JoinRequest) -> pb.JoinReply:
        """Registers a worker and waits until the world is complete.

        If others are at work already, it also waits until they know the newcomer, so that their next calls reach it,
        but at most `ANSWER_LIMIT_S`. In a world of more than `NEWS_AT_ONCE` members it waits only if the newcomer takes
        the place of another process: calls to a new name ask the coordinator.

        Args:
            peer: the proven caller.
            request: `timeout_ms` bounds the wait; 0 does not wait.

        Returns:
            The verdict, and the workers; TIMED_OUT with the missing ranks if the time limit has expired.

        Raises:
            CallRefused: the caller names another worker.
            ConfigError: the name or the world size is malformed.

        Cancellation (the caller's connection has ended) removes the worker again, unless the world has formed.
        """
        identity = identity_from_proto(request.member.identity)
        if identity != peer:
            raise CallRefused(f"{peer.name!r} cannot join as worker {identity.name!r}: each process joins as itself")
        takes_place = self.table.had_place(identity)
        self.table.joins(identity)
        try:
            reply = await self._join(identity, request)
            if reply.outcome in (Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID) and await self._free_place(request):
                reply = await self._join(identity, request)
            if reply.outcome == Outcome.OK:
                if takes_place or len(self.table) <= NEWS_AT_ONCE:
                    await self._until_known(reply.version)
                reply = self._reply(Verdict(Outcome.OK))
                self.note_known(identity, reply.version)
        finally:
            self.table.has_joined(identity)
        if reply.outcome != Outcome.OK:  # not before: the coordinator ends when all processes have been answered
            self._answered.add(identity.incarnation)
            self._changed.set()
        return reply

    async def _until_known(self, version: int) -> None:
        """Waits until every member knows this version of the list, except those that are joining."""
        if self._announces and not await self._until(lambda: not any(self.table.unaware_of(version)), ANSWER_LIMIT_S):
            names = [identity.name for identity in self.table.unaware_of(version)]
            logger.info("these workers have not confirmed the new list of members yet: %s", listed(names))

    def announce_to(self, listener: Callable[[bool], object], me: Identity) -> None:
        """Registers a listener that notifies the members of every change, and reports the versions that they know."""
        self.changed.listen(listener)
        self._announces = True
        self.note_known(me, self.table.version)

    def note_known(self, identity: Identity, version: int) -> None:
        if self.table.confirmed(identity, version):
            self._changed.set()

    def _has_changed(self, is_urgent: bool = True) -> None:
        self._changed.set()
        self.changed.publish(is_urgent)

    async def _free_place(self, request: pb.JoinRequest) -> bool:
        """Declares members lost that have the newcomer's place and do not answer. Returns whether there was one."""
        newcomer = identity_from_proto(request.member.identity)
        found = False
        for member in self.table.members:
            old = member.identity
            same_place = newcomer.name == old.name or newcomer.id == old.id
            if same_place and newcomer.incarnation != old.incarnation and not await self._probe(member):
                self.lost(old, "it did not answer when another process claimed its place")
                found = True  # even if its loss was noticed in another way meanwhile
        return found

    async def _join(self, identity: Identity, request: pb.JoinRequest) -> pb.JoinReply:
        if self.is_closed:
            return self._reply(Verdict(Outcome.TIMED_OUT, "the coordinator is leaving the job"))
        version, is_urgent = self.table.version, self.table.had_place(identity)
        member = Member(identity, request.member.address, request.member.role)
        if request.known_version:
            verdict = self._take_back(member, request)
        else:
            self._give_way_to(identity)
            verdict = self.table.join(member, request.world_size)
        if verdict.ok:
            if self.table.version != version:
                self._has_changed(is_urgent=is_urgent)
            if self._recovery is not None:
                self._recovery.review()
            # In a dynamic world the coordinator itself does not wait: it need not know whether it is the first one.
            recovers = self._recovery is not None and (request.world_size > 0 or identity.id != self._rank)
            if recovers or (request.world_size and not self.table.formed):
                verdict = await self._formed(identity, min(request.timeout_ms / 1000, PARKED_LIMIT_S))
            elif self._recovery is None:
                self._decide(verdict)
        elif self.table.broken is not None:
            self._decide(self.table.broken)
        return self._reply(verdict)

    # ------------------------------------------------------------ after another coordinator

    @property
    def has_predecessor(self) -> bool:
        """Whether another coordinator served the job before this one, as far as is known here; any thread."""
        return self._has_recovered or self._recovery is not None

    def _take_back(self, member: Member, request: pb.JoinRequest) -> Verdict:
        """Takes back a worker that was in the job before this coordinator started, and announces itself."""
        if request.known_version > MAX_VERSION:
            raise CallRefused(f"{member} sent version {request.known_version} of the list of workers, which is invalid")
        if request.attempt != self._attempt:
            return Verdict(
                Outcome.INCARNATION_GONE,
                f"it belongs to start {request.attempt!r} of the job, but the coordinator to start {self._attempt!r}",
            )
        was_there = member.identity in self.table
        verdict = self.table.take_back(member, request.world_size, request.known_version)
        if not verdict.ok or was_there:
            return verdict
        logger.warning("%s was in this job before this coordinator started, and is taken back", member)
        if self._has_recovered:
            return verdict  # it returned after the end of the recovery
        if self._recovery is None:
            newcomers_until = self._started + self._recovery_s / 2
            end = self._end_recovery
            self._recovery = Recovery(self.table, self._probe, self._recovery_s, newcomers_until, end, self._rank)
        self._recovery.take_back(member.identity, map(member_from_proto, request.known))
        return verdict

    def _give_way_to(self, newcomer: Identity) -> None:
        """Dismisses a returned worker whose name or rank a new process claims during the recovery: that process proves
        that the job was restarted, so the returned worker belongs to the old job."""
        recovery = self._recovery
        if recovery is None:
            return
        for old in list(recovery.returned):
            if (newcomer.name == old.name or newcomer.id == old.id) and newcomer.incarnation != old.incarnation:
                reason = f"the job was restarted, and another process joined as {newcomer.name!r} (rank {newcomer.id})"
                self.table.dismiss(old, reason)
                if recovery.forget(old):
                    self._recovery = None  # the job was restarted, and no other worker is expected
                    recovery.close()
                self._has_changed()
                if (waits := self._latest.get(old)) is not None and not waits.done():
                    waits.set_result(Verdict(Outcome.INCARNATION_GONE, reason))

    def _end_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        assert recovery is not None  # it calls this
        self._has_recovered = True
        self._keep(recovery.survivors())
        self._absent = recovery.departures()
        self.table.end_restoring()
        for identity, reason in self._absent.items():
            logger.warning("worker %r (rank %d) is lost: %s", identity.name, identity.id, reason)
        self._decide(Verdict(Outcome.OK))

    def _keep(self, survivors: Sequence[Member]) -> None:
        """Takes back the workers that live and have not announced themselves yet; they are notified of changes."""
        world_size = self.table.world_size
        if world_size is None:
            return  # no member is left that could be notified of them
        for member in survivors:
            if self.table.take_back(member, world_size, self.table.version).ok:
                logger.warning("%s was in this job before this coordinator started, lives, and stays in it", member)
        if survivors:
            self._has_changed()

    # ------------------------------------------------------------ workers that leave

    async def leave(self, peer: Identity, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Removes a worker from the list; unknown workers are ignored, so it may be repeated.

        Raises:
            CallRefused: the caller is not the process that joined as this worker.
        """
        identity = identity_from_proto(request.identity)
        if identity != peer:
            raise CallRefused(
                f"{peer.name!r} cannot remove worker {identity.name!r} from the job: only its own process may"
            )
        self.left(identity)
        return pb.LeaveReply()

    def left(self, identity: Identity) -> None:
        if self.table.leave(identity):
            self._has_changed(is_urgent=False)

    async def members(self, peer: Identity, request: pb.MembersRequest) -> pb.JoinReply:
        """The living workers.

        Raises:
            CallRefused: the list is being rebuilt, after another coordinator was lost.
        """
        if self._recovery is not None:
            raise CallRefused("the list of workers is being rebuilt after the loss of the coordinator; try again later")
        reply = self._reply(Verdict(Outcome.OK))
        self.note_known(peer, reply.version)
        return reply

    def lost(self, identity: Identity, reason: str) -> bool:
        """Declares an incarnation dead, so that a replacement may join. False if it is not in the list."""
        if not self.table.lost(identity, reason):
            return False
        self._has_changed()
        return True

    def found(self, identity: Identity) -> None:
        """Restores a worker that lives, if it was declared lost and its place is free."""
        if self.table.found(identity):
            self.table.confirmed(identity, 0)
            self._has_changed()

    def others(self, me: Identity) -> list[Member]:
        return [member for member in self.table.members if member.identity != me]

    async def alone(self, me: Identity, timeout_s: float) -> bool:
        """Waits until all other workers have left or are lost; from then on no more workers are admitted.

        Returns:
            False if the time limit expired first; then workers may still join.
        """
        self.is_closed = await self._until(lambda: len(self.table) <= (me in self.table), timeout_s)
        return self.is_closed

    async def all_answered(self, timeout_s: float) -> bool:
        """Waits until as many processes as the world's size know that it is broken; False on timeout.

        The coordinator waits here before it ends, so that workers that join a moment later get the reason, too.
        """
        return await self._until(lambda: len(self._answered) >= (self.table.world_size or 1), timeout_s)

    async def give_up(self, reply: pb.JoinReply, timeout_s: float) -> None:
        """Answers all that wait as the coordinator, which ends now, was answered: it has waited too long; bounded."""
        gave_up = f"rank {self._rank}, through which all join, gave up"
        detail = f"{reply.detail}; {gave_up}" if reply.detail else gave_up
        self._decide(Verdict(reply.outcome, detail, tuple(reply.missing)))
        await self._until(lambda: not self._latest, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until a condition holds, which is checked when `_changed` is set."""
        try:
            async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _formed(self, identity: Identity, timeout_s: float) -> Verdict:
        decided: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.add(decided)
        self._latest[identity] = decided
        try:
            async with asyncio.timeout(timeout_s):
                return await decided
        except TimeoutError:
            if self.table.broken is not None:
                return self.table.broken
            if self.table.formed:  # between the timeout and this line: the others count on this worker
                return Verdict(Outcome.OK)
            verdict = self.table.timed_out
            self._stop_waiting(identity, decided)
            return verdict
        except asyncio.CancelledError:
            self._stop_waiting(identity, decided)
            raise
        finally:
            self._waiting.discard(decided)
            if self._latest.get(identity) is decided:
                del self._latest[identity]

    def _stop_waiting(self, identity: Identity, decided: asyncio.Future[Verdict]) -> None:
        """Applies rule 5 of the table, unless the worker has asked a second time, and still waits there."""
        if self._latest.get(identity) is decided and self.table.withdraw(identity):
            self._has_changed()

    def _decide(self, verdict: Verdict) -> None:
        for decided in self._waiting:
            if not decided.done():
                decided.set_result(verdict)

    def _reply(self, verdict: Verdict) -> pb.JoinReply:
        if self._encoded[0] != self.table.version:
            self._encoded = self.table.version, members_to_bytes(self.table.members)
        return pb.JoinReply(
            outcome=verdict.outcome,
            detail=verdict.detail,
            members=self._encoded[1],
            version=self.table.version,
            missing=verdict.missing,
            departures=departures_to_proto(self._absent),
        )
