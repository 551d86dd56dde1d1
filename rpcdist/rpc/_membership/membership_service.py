"""The coordinator's service `Membership`, and what a worker makes of its answers.

The rules are in `membership_table.py`; here is only the waiting. Everything of the service runs on the I/O loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import CallRefused, DuplicateName, RendezvousError, WorldMismatch
from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_table import MembershipTable, Verdict
from rpcdist.rpc._peers.directory import Member
from rpcdist.time_limits import PARKED_LIMIT_S
from rpcdist.transport.identities import identity_from_proto, identity_to_proto

__all__ = [
    "MembershipService",
    "Probe",
    "join_request",
    "members_of",
]

logger = logging.getLogger(__name__)

Outcome = pb.JoinReply.Outcome


Probe = Callable[[Member], Awaitable[bool]]
"""Asks a worker whether it is alive, in the incarnation that is known."""


async def _is_alive(member: Member) -> bool:
    return True


class MembershipService:
    """Answers `Join`, `Leave` and `Members`; register it with `Node.add_service`. I/O loop only.

    Args:
        probe: is asked about the member whose name or rank a newcomer has: only one that does not answer is declared
            lost, and gives its place to the newcomer.

    Attributes:
        table: the list of workers; read it, and change it through this service.
    """

    def __init__(self, probe: Probe = _is_alive) -> None:
        self.table = MembershipTable()
        self._probe = probe
        self._waiting: set[asyncio.Future[Verdict]] = set()
        self._latest: dict[Identity, asyncio.Future[Verdict]] = {}
        self._joined_by: dict[Identity, int] = {}  # the incarnation of the process that speaks for a worker
        self._answered: set[int] = set()  # incarnations that were told of the broken world
        self._answer_came = asyncio.Event()
        self._changed = asyncio.Event()  # the list of workers did

    def __repr__(self) -> str:
        return f"<MembershipService {self.table!r}, {len(self._waiting)} waiting>"

    async def join(self, peer: Identity, request: pb.JoinRequest) -> pb.JoinReply:
        """Registers a worker and waits until the world is complete.

        Args:
            peer: the proven caller.
            request: `timeout_ms` bounds the wait; 0 does not wait.

        Returns:
            The verdict, and the workers; TIMED_OUT with the missing ranks when the time was over.

        Raises:
            ConfigError: the name or the world size is malformed.

        Cancellation (the caller's connection has ended) takes the worker out again, unless the world has formed.
        """
        reply = await self._join(peer, request)
        if reply.outcome in (Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID) and await self._free_place(request):
            reply = await self._join(peer, request)
        return reply

    async def _free_place(self, request: pb.JoinRequest) -> bool:
        """Declares the members lost that have the newcomer's place and do not answer; whether there was one."""
        newcomer = identity_from_proto(request.member.identity)
        found = False
        for member in self.table.members:
            old = member.identity
            same_place = newcomer.name == old.name or newcomer.id == old.id
            if same_place and newcomer.incarnation != old.incarnation and not await self._probe(member):
                logger.info("worker %s does not answer any more; its place is free", old.name)
                found = self.lost(old) or found
        return found

    async def _join(self, peer: Identity, request: pb.JoinRequest) -> pb.JoinReply:
        identity = identity_from_proto(request.member.identity)
        verdict = self.table.join(Member(identity, request.member.address), request.world_size)
        if verdict.ok:
            self._joined_by[identity] = peer.incarnation
            if request.world_size and not self.table.formed:
                verdict = await self._formed(identity, min(request.timeout_ms / 1000, PARKED_LIMIT_S))
            else:
                self._decide(verdict)
        elif self.table.broken is not None:
            self._decide(self.table.broken)
        if not verdict.ok:
            self._answered.add(identity.incarnation)
            self._answer_came.set()
        return self._reply(verdict)

    async def leave(self, peer: Identity, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Takes a worker out of the list; unknown ones are ignored, so it may be repeated.

        Raises:
            CallRefused: the caller is not the process that joined as this worker.
        """
        identity = identity_from_proto(request.identity)
        if self._joined_by.get(identity, peer.incarnation) != peer.incarnation:
            raise CallRefused(f"{peer.name!r} cannot take worker {identity.name!r} out: only its own process may")
        self._joined_by.pop(identity, None)
        self.table.leave(identity)
        self._changed.set()
        return pb.LeaveReply()

    async def members(self, peer: Identity, request: pb.MembersRequest) -> pb.JoinReply:
        """The living workers."""
        return self._reply(Verdict(Outcome.OK))

    def lost(self, identity: Identity) -> bool:
        """Declares an incarnation dead, so that a replacement may join. False if it is not in the list."""
        self._joined_by.pop(identity, None)
        self._changed.set()
        return self.table.lost(identity)

    def others(self, me: Identity) -> list[Member]:
        """The members beside one worker."""
        return [member for member in self.table.members if member.identity != me]

    async def alone(self, me: Identity, timeout_s: float) -> bool:
        """Waits until all but this worker have left or are lost; False when the time is over."""
        try:
            async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
                while self.others(me):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def all_answered(self, timeout_s: float) -> bool:
        """Waits until as many processes as the world's size were told that it broke; False when the time is over.

        The coordinator waits here before it ends, so that those who come a moment later learn the reason, too.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._answered) < (self.table.world_size or 1):
                    self._answer_came.clear()
                    await self._answer_came.wait()
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
            if self.table.formed:  # between the end of the time and this line: the others count on this worker
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
        """Rule 5 of the table; but a worker that asked a second time still waits there."""
        if self._latest.get(identity) is decided and self.table.withdraw(identity):
            self._joined_by.pop(identity, None)

    def _decide(self, verdict: Verdict) -> None:
        for decided in self._waiting:
            if not decided.done():
                decided.set_result(verdict)

    def _reply(self, verdict: Verdict) -> pb.JoinReply:
        members = [
            pb.Member(identity=identity_to_proto(member.identity), address=member.address)
            for member in self.table.members
        ]
        return pb.JoinReply(
            outcome=verdict.outcome,
            detail=verdict.detail,
            members=members,
            version=self.table.version,
            missing=verdict.missing,
        )


def join_request(me: Identity, address: str, world_size: int | None, timeout_s: float) -> pb.JoinRequest:
    """What a worker sends to join; `world_size` None where workers come and go."""
    member = pb.Member(identity=identity_to_proto(me), address=address)
    timeout_ms = round(min(max(timeout_s, 0.0), PARKED_LIMIT_S) * 1000)
    return pb.JoinRequest(member=member, world_size=world_size or 0, timeout_ms=timeout_ms)


def members_of(reply: pb.JoinReply, me: Identity, coordinator: str, waited_s: float) -> list[Member]:
    """Takes the coordinator's answer apart.

    Args:
        reply: the answer to `Join` or `Members`.
        me: the worker that asked.
        coordinator: its address, for the error.
        waited_s: how long this worker waited, in seconds, for the error.

    Returns:
        The workers, by rank.

    Raises:
        DuplicateName: two workers have the same name or rank.
        WorldMismatch: the workers disagree about the size or kind of the world, or it is complete without this one.
        RendezvousError: not everybody came in time, or this process was declared lost.
    """
    members = [Member(identity_from_proto(member.identity), member.address) for member in reply.members]
    outcome = reply.outcome
    if outcome == Outcome.OK:
        return members
    text = f"worker {me.name!r} (rank {me.id}) could not join the job at {coordinator}: "
    if outcome == Outcome.TIMED_OUT:
        raise RendezvousError(text + _timed_out(reply, me, members, waited_s))
    if outcome in (Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID):
        raise DuplicateName(text + reply.detail)
    if outcome == Outcome.INCARNATION_GONE:
        raise RendezvousError(text + reply.detail)
    raise WorldMismatch(text + (reply.detail or f"outcome {outcome}"))


def _timed_out(reply: pb.JoinReply, me: Identity, members: Sequence[Member], waited_s: float) -> str:
    if not reply.missing:
        return reply.detail or f"the world was not complete after {waited_s:.1f} s"
    missing = list(reply.missing)
    ranks = ", ".join(str(rank) for rank in missing[:16]) + (" ..." if len(missing) > 16 else "")
    others = ", ".join([member.identity.name for member in members if member.identity != me][:16]) or "nobody"
    return (
        f"after {waited_s:.1f} s, these ranks have not come: {ranks} (waiting with it: {others}"
        f"{'; ' + reply.detail if reply.detail else ''}). Check that they were started, with the same MASTER_ADDR, "
        "MASTER_PORT and WORLD_SIZE, and look at their logs"
    )
