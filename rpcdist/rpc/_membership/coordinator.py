"""The membership service: as the coordinator serves it, and as every worker reaches it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rpcdist._proto import membership_pb2
from rpcdist.collectives.rendezvous import job_attempt
from rpcdist.deadline import backoff
from rpcdist.errors import AuthenticationFailed, RpcdistError, TransportError, WorkerLost, listed
from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_messages import join_request, members_of, return_request
from rpcdist.rpc._membership.membership_service import MembershipService
from rpcdist.rpc._peers.connections import PROBE_ROLE
from rpcdist.rpc._peers.directory import COORDINATOR, Member, Roster
from rpcdist.rpc._peers.network import Network
from rpcdist.rpc._peers.reach_limit import ReachLimit
from rpcdist.time_limits import (
    ANSWER_GRACE_S,
    FIRST_PAUSE_S,
    INIT_NOTICE_S,
    LONGEST_PAUSE_S,
    LONGEST_WAIT_S,
    QUICK_ANSWER_LIMIT_S,
)
from rpcdist.transport.identities import identity_to_proto
from rpcdist.waiters import noticed

logger = logging.getLogger(__name__)

SERVICE = membership_pb2.DESCRIPTOR.services_by_name["Membership"]


def serve_membership(network: Network, me: Identity, peer_timeout_s: float) -> MembershipService:
    """Starts the service in this process; blocks.

    Args:
        network: where it is served.
        me: this worker, which answers for itself.
        peer_timeout_s: how long a member may take to show that it is alive.
    """

    async def answers(member: Member) -> bool:
        """Whether a member is alive; it is dead by the rules by which every worker judges its peers."""
        if member.identity == me:
            return True
        limit = ReachLimit(peer_timeout_s)
        for pause_s in backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S):
            try:
                link = await network.connect(
                    member.address, PROBE_ROLE, limit.attempt_s, expected=member.identity, retry=False
                )
            except (AuthenticationFailed, ValueError):  # somebody else listens there now, or that is no address at all
                return False
            except TransportError as exc:
                if limit.is_over(exc):
                    return False
            else:
                await link.close()
                return True
            await asyncio.sleep(pause_s)
        raise AssertionError("backoff without a deadline does not end")

    service = MembershipService(answers, job_attempt(), peer_timeout_s, me.id)
    network.add_service(SERVICE, {"Join": service.join, "Leave": service.leave, "Members": service.members})
    return service


@dataclass(slots=True, eq=False)
class Coordinator:
    """The membership service as this worker reaches it: in this process, or over the network.

    Args:
        address: where it is served.
        me: this worker.
        service: the service itself, if it is served here.
        rank: that of the worker that serves it.
        mark_left: tells the store, where the service is served here, that this worker has left as the last one.
    """

    _network: Network
    address: str
    _me: Identity
    service: MembershipService | None
    rank: int = COORDINATOR
    mark_left: Callable[[], object] = lambda: None

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        """A worker is declared dead: if the service is here, its place is free. On the I/O loop."""
        if self.service is not None:
            self.service.lost(identity, error.reason)

    def on_found(self, identity: Identity) -> None:
        """A worker lives; if the service is here and had it declared lost, it is in the job again. On the I/O loop."""
        if self.service is not None:
            self.service.found(identity)

    def join(
        self, me: Member, world_size: int | None, timeout_s: float, connect_s: float | None = None
    ) -> membership_pb2.JoinReply:
        """Asks to be taken in, and waits for the others; blocks.

        Args:
            me: this worker.
            world_size: None where workers come and go.
            timeout_s: limit, in seconds.
            connect_s: a shorter one for reaching the coordinator.

        Raises:
            ConnectFailed: nobody answered in time.
        """
        connect_s = timeout_s if connect_s is None else connect_s
        request = join_request(me, world_size, timeout_s)
        limit_s = None if timeout_s == float("inf") else timeout_s + ANSWER_GRACE_S
        if self.service is not None:
            joining = self.service.join(self._me, request)
        else:
            joining = self._ask("Join", request, connect_s, limit_s)
            limit_s = None if limit_s is None else limit_s + ANSWER_GRACE_S
        return self._network.run(noticed(joining, INIT_NOTICE_S, partial(self._log_missing, world_size)), limit_s)

    async def _log_missing(self, world_size: int | None) -> None:
        """Logs which ranks have not joined yet."""
        waits = f"init_rpc of {self._me.name!r} (rank {self._me.id}) still waits after {INIT_NOTICE_S:g} s"
        try:
            members = (await self.members_async()).members
        except RpcdistError as exc:
            logger.warning("%s for the coordinator (rank %d) at %s: %s", waits, self.rank, self.address, exc)
            return
        there = {member.identity.id: member.identity.name for member in members}
        missing = [rank for rank in range(world_size or 0) if rank not in there]
        if missing:
            silent = self._network.num_silent if self.service is not None else 0
            token = f". {silent} connections ended in TLS: do the missing have another job token?" if silent else ""
            logger.warning(
                "%s for rank %s of %d; those in the job so far: %s%s",
                waits, listed(missing), world_size, listed(there.values()), token,
            )  # fmt: skip
        else:
            logger.warning("%s for the workers of the job to hear of it: %s", waits, listed(there.values()))

    def members(self, limit_s: float | None = None) -> Roster:
        """The current members of the job; blocks."""
        return self._network.run(self.members_async(), 2 * ANSWER_GRACE_S if limit_s is None else limit_s)

    async def members_async(self) -> Roster:
        """As `members`, on the I/O loop. Cancellation leaves nothing behind."""
        request = membership_pb2.MembersRequest()
        if self.service is not None:
            reply = await self.service.members(self._me, request)
        else:
            reply = await self._ask("Members", request, ANSWER_GRACE_S, ANSWER_GRACE_S)
        return members_of(reply, self._me, self.address, 0.0)

    async def announce(
        self,
        address: str,
        me: Member,
        world_size: int | None,
        roster: Roster,
        before: Identity | None,
        limit_s: float,
        on_answer: Callable[[], object],
    ) -> tuple[Identity, membership_pb2.JoinReply | None]:
        """Tells the process at an address, if it is another coordinator than the one before, that this worker lives.

        Args:
            address: where it may be.
            me: this worker.
            world_size: None where workers come and go.
            roster: the members of the job, as this worker knows them.
            before: the coordinator that there was.
            limit_s: how long the coordinator may wait for others that were there.
            on_answer: called when another coordinator is there, before it has decided.

        Returns:
            The process that answered, and the verdict; no verdict if this is no other coordinator.

        Raises:
            TransportError, DeadlineExceeded: nobody answered, or not in time.
        """
        link = await self._network.connect(address, "membership", ANSWER_GRACE_S, retry=False)
        try:
            peer = link.session.peer
            if peer.id != self.rank or peer == before:
                return peer, None
            on_answer()
            request = return_request(me, world_size, limit_s, roster, job_attempt())
            limit_s += ANSWER_GRACE_S
            reply = await link.unary("Membership", "Join", request, membership_pb2.JoinReply, limit_s)
        finally:
            await link.close()
        if reply.outcome == membership_pb2.JoinReply.Outcome.OK:
            self.address = address
        return peer, reply

    def leave(self) -> None:
        """Says goodbye; blocks."""
        request = membership_pb2.LeaveRequest(identity=identity_to_proto(self._me))
        if self.service is not None:
            self._network.run(self.service.leave(self._me, request), ANSWER_GRACE_S)
        else:
            self._network.run(self._ask_leave(request), 2 * ANSWER_GRACE_S)

    async def _ask(
        self,
        method: str,
        request: membership_pb2.JoinRequest | membership_pb2.MembersRequest,
        connect_s: float,
        limit_s: float | None,
    ) -> membership_pb2.JoinReply:
        link = await self._network.connect(self.address, "membership", min(connect_s, LONGEST_WAIT_S))
        try:
            return await link.unary("Membership", method, request, membership_pb2.JoinReply, limit_s)
        finally:
            await link.close()

    async def _ask_leave(self, request: membership_pb2.LeaveRequest) -> None:
        link = await self._network.connect(self.address, "membership", QUICK_ANSWER_LIMIT_S, retry=False)
        try:
            await link.unary("Membership", "Leave", request, membership_pb2.LeaveReply, ANSWER_GRACE_S)
        finally:
            await link.close()
