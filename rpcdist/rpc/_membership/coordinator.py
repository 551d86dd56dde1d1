"""The membership service: as rank 0 serves it, and as every worker reaches it."""

from __future__ import annotations

import asyncio
import logging

from rpcdist._proto import membership_pb2
from rpcdist.errors import TransportError
from rpcdist.ids import Identity
from rpcdist.rpc._membership.directory import Member
from rpcdist.rpc._membership.service import MemberRecord, MembershipService, join_request, members_of
from rpcdist.time_limits import COORDINATOR_CONNECT_LIMIT_S, COORDINATOR_GRACE_S, LEAVE_CONNECT_LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport.identities import identity_to_proto

__all__ = ["Coordinator", "ProbingService", "serve_membership"]

logger = logging.getLogger(__name__)

SERVICE = membership_pb2.DESCRIPTOR.services_by_name["Membership"]
Outcome = membership_pb2.JoinReply.Outcome


class ProbingService(MembershipService):
    """Gives the place of a worker that died to the process that was started in its stead.

    When a newcomer has the name or rank of a member, the member is called at its address; only one that does not answer
    in its old incarnation is declared lost.
    """

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._changed = asyncio.Event()

    async def join(self, peer: Identity, request: membership_pb2.JoinRequest) -> membership_pb2.JoinReply:
        reply = await super().join(peer, request)
        if reply.outcome not in (Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID):
            return reply
        newcomer = request.member.identity
        lost = False
        for record in self.table.members:
            old = record.identity
            same_place = newcomer.name == old.name or newcomer.id == old.id
            if same_place and newcomer.incarnation != old.incarnation and not await self._answers(old, record.address):
                logger.info("worker %s does not answer any more; its place is free", old.name)
                lost = self.lost(old) or lost
        return await super().join(peer, request) if lost else reply

    async def leave(self, peer: Identity, request: membership_pb2.LeaveRequest) -> membership_pb2.LeaveReply:
        reply = await super().leave(peer, request)
        self._changed.set()
        return reply

    def lost(self, identity: Identity) -> bool:
        self._changed.set()
        return super().lost(identity)

    def others(self) -> list[MemberRecord]:
        """The members beside this process."""
        return [record for record in self.table.members if record.identity != self._node.identity]

    async def alone(self, timeout_s: float) -> bool:
        """Waits until all others have left or are lost; False when the time is over."""
        try:
            async with asyncio.timeout(None if timeout_s == float("inf") else timeout_s):
                while self.others():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _answers(self, identity: Identity, address: str) -> bool:
        if identity == self._node.identity:
            return True
        timeout_s = self._node.options.peer_timeout_s
        try:
            link = await self._node.connect(address, "probe", timeout_s, expected=identity, retry=False)
        except TransportError:
            return False
        await link.close()
        return True


def serve_membership(node: Node) -> ProbingService:
    """Starts the service in this process; blocks."""
    service = ProbingService(node)
    node.add_service(SERVICE, {"Join": service.join, "Leave": service.leave, "Members": service.members})
    return service


class Coordinator:
    """The membership service as this worker reaches it: in this process, or over the network."""

    def __init__(self, node: Node, address: str, me: Identity, service: ProbingService | None) -> None:
        self.address = address
        self.service = service
        self._node = node
        self._me = me

    def join(self, my_address: str, world_size: int | None, timeout_s: float) -> membership_pb2.JoinReply:
        request = join_request(self._me, my_address, world_size, timeout_s)
        limit_s = None if timeout_s == float("inf") else timeout_s + COORDINATOR_GRACE_S
        if self.service is not None:
            return self._node.run(self.service.join(self._me, request), limit_s)
        return self._node.run(
            self._ask("Join", request, timeout_s, limit_s), None if limit_s is None else limit_s + COORDINATOR_GRACE_S
        )

    def members(self) -> list[Member]:
        """Everybody who is in the job now; blocks."""
        return self._node.run(self.members_async(), 2 * COORDINATOR_GRACE_S)

    async def members_async(self) -> list[Member]:
        """As `members`, on the I/O loop. Cancellation leaves nothing behind."""
        request = membership_pb2.MembersRequest()
        if self.service is not None:
            reply = await self.service.members(self._me, request)
        else:
            reply = await self._ask("Members", request, COORDINATOR_GRACE_S, COORDINATOR_GRACE_S)
        records = members_of(reply, self._me, self.address, 0.0)
        return [Member(record.identity, record.address) for record in records]

    def leave(self) -> None:
        """Says goodbye; blocks. A coordinator that is gone by now is nobody's error."""
        request = membership_pb2.LeaveRequest(identity=identity_to_proto(self._me))
        if self.service is not None:
            self._node.run(self.service.leave(self._me, request), COORDINATOR_GRACE_S)
        else:
            self._node.run(self._ask_leave(request), 2 * COORDINATOR_GRACE_S)

    async def _ask(
        self,
        method: str,
        request: membership_pb2.JoinRequest | membership_pb2.MembersRequest,
        connect_s: float,
        limit_s: float | None,
    ) -> membership_pb2.JoinReply:
        link = await self._node.connect(self.address, "membership", min(connect_s, COORDINATOR_CONNECT_LIMIT_S))
        try:
            return await link.unary("Membership", method, request, membership_pb2.JoinReply, limit_s)
        finally:
            await link.close()

    async def _ask_leave(self, request: membership_pb2.LeaveRequest) -> None:
        link = await self._node.connect(self.address, "membership", LEAVE_CONNECT_LIMIT_S, retry=False)
        try:
            await link.unary("Membership", "Leave", request, membership_pb2.LeaveReply, COORDINATOR_GRACE_S)
        finally:
            await link.close()
