"""The coordinator's gRPC service `Membership`, and what a worker makes of its answers.

The rules are in `_membership_table.py`; here is only the waiting. Everything of the service runs on the I/O loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import CallRefused, DuplicateName, RendezvousError, WorldMismatch
from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_table import MemberRecord, MembershipTable, Verdict
from rpcdist.time_limits import PARKED_LIMIT_S
from rpcdist.transport.identities import identity_from_proto, identity_to_proto

__all__ = [
    "MemberRecord",
    "MembershipService",
    "MembershipTable",
    "join_request",
    "members_of",
]

Outcome = pb.JoinReply.Outcome


class MembershipService:
    """Answers `Join`, `Leave` and `Members`; register it with `Node.add_service`. I/O loop only.

    Attributes:
        table: the list of workers; read it, and change it through this service.
    """

    def __init__(self, table: MembershipTable | None = None) -> None:
        self.table = MembershipTable() if table is None else table
        self._waiting: set[asyncio.Future[Verdict]] = set()
        self._latest: dict[Identity, asyncio.Future[Verdict]] = {}
        self._joined_by: dict[Identity, int] = {}  # the incarnation of the process that speaks for a worker
        self._answered: set[int] = set()  # incarnations that were told of the broken world
        self._answer_came = asyncio.Event()
        self._closed: Verdict | None = None

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
        identity = identity_from_proto(request.member.identity)
        if self._closed is not None:
            return self._reply(self._closed)
        verdict = self.table.join(MemberRecord(identity, request.member.address), request.world_size)
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
        return pb.LeaveReply()

    async def members(self, peer: Identity, request: pb.MembersRequest) -> pb.JoinReply:
        """The living workers."""
        return self._reply(Verdict(Outcome.OK))

    def lost(self, identity: Identity) -> bool:
        """Declares an incarnation dead, so that a replacement may join. False if it is not in the list."""
        self._joined_by.pop(identity, None)
        return self.table.lost(identity)

    def close(self, detail: str) -> None:
        """Answers everybody who waits, and everybody who comes later, that the coordinator has given up."""
        self._closed = Verdict(Outcome.TIMED_OUT, detail)
        self._decide(self._closed)

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


def members_of(reply: pb.JoinReply, me: Identity, coordinator: str, waited_s: float) -> list[MemberRecord]:
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
    members = [MemberRecord(identity_from_proto(member.identity), member.address) for member in reply.members]
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


def _timed_out(reply: pb.JoinReply, me: Identity, members: Sequence[MemberRecord], waited_s: float) -> str:
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
