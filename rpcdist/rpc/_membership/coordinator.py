"""The membership service: as the coordinator serves it, and as every worker reaches it.

When the coordinator is lost, each worker looks for its successor and announces itself to it (`CoordinatorSearch`).
Calls between the remaining workers continue meanwhile. The successor takes the workers back, and sends the members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import Message

from rpcdist._proto import membership_pb2
from rpcdist.collectives.rendezvous import job_attempt
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import (
    AuthenticationFailed,
    CoordinatorLost,
    DistStoreError,
    RpcdistError,
    TransportError,
    WorkerLost,
    described_error,
    listed,
)
from rpcdist.ids import Identity
from rpcdist.rpc._membership.roster_messages import Outcome, join_request, members_of, return_request
from rpcdist.rpc._membership.roster_service import NEWS_AT_ONCE, MembershipService
from rpcdist.rpc._peers.connections import PROBE_ROLE
from rpcdist.rpc._peers.directory import COORDINATOR, Directory, Member, Roster
from rpcdist.rpc._peers.network import Lifetime, Network, ReplyT
from rpcdist.rpc._peers.peer import ReachLimit
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc.future import Future
from rpcdist.time_limits import (
    ANSWER_GRACE_S,
    FIRST_PAUSE_S,
    INIT_NOTICE_S,
    LONGEST_PAUSE_S,
    LONGEST_WAIT_S,
    QUICK_ANSWER_LIMIT_S,
    RETURN_LONGEST_PAUSE_S,
)
from rpcdist.transport.identities import identity_to_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.waiters import ends_within, noticed

logger = logging.getLogger(__name__)

SERVICE = membership_pb2.DESCRIPTOR.services_by_name["Membership"]


def serve_membership(network: Network, me: Identity, peer_timeout_s: float) -> MembershipService:
    """Starts the service in this process; blocks.

    Args:
        me: this worker, which is always alive.
        peer_timeout_s: limit on the time in which a member must show that it is alive.
    """

    async def answers(member: Member) -> bool:
        """Whether a member is alive, by the rule that every worker applies to its peers (`ReachLimit`)."""
        if member.identity == me:
            return True
        limit = ReachLimit(peer_timeout_s)
        for pause_s in backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S):
            try:
                link = await network.connect(
                    member.address, PROBE_ROLE, limit.attempt_s, expected=member.identity, retry=False
                )
            except (AuthenticationFailed, ValueError):  # another process listens there now, or it is not an address
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
        rank: the rank of the worker that serves it.
        mark_left: records in the store, if the service is served here, that this worker has left as the last one.
    """

    _network: Network
    address: str
    _me: Identity
    service: MembershipService | None
    rank: int = COORDINATOR
    mark_left: Callable[[], object] = lambda: None

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        if self.service is not None:
            self.service.lost(identity, error.reason)

    def on_found(self, identity: Identity) -> None:
        """Restores a worker that lives, if the service is here and had declared it lost. On the I/O loop."""
        if self.service is not None:
            self.service.found(identity)

    def join(
        self, me: Member, world_size: int | None, timeout_s: float, connect_s: float | None = None
    ) -> membership_pb2.JoinReply:
        """Asks to join, and waits for the other workers; blocks.

        Args:
            connect_s: a shorter limit for reaching the coordinator.

        Raises:
            ConnectFailed: no process answered in time.
        """
        connect_s = timeout_s if connect_s is None else connect_s
        request = join_request(me, world_size, timeout_s)
        limit_s = None if timeout_s == float("inf") else timeout_s + ANSWER_GRACE_S
        if self.service is not None:
            joining = self.service.join(self._me, request)
        else:
            joining = self._ask("Join", request, membership_pb2.JoinReply, connect_s, limit_s)
            limit_s = None if limit_s is None else limit_s + ANSWER_GRACE_S
        waiting = noticed(joining, INIT_NOTICE_S, partial(self._log_missing, world_size))
        return self._network.run(waiting, limit_s, may_give_up=True)

    async def _log_missing(self, world_size: int | None) -> None:
        waits = f"init_rpc of {self._me.name!r} (rank {self._me.id}) still waits after {INIT_NOTICE_S:g} s"
        if world_size and self._me.id >= NEWS_AT_ONCE:  # the lists for all of a large world would delay the coordinator
            logger.warning(
                "%s for other workers, or for the coordinator (rank %d) at %s; the logs of the ranks below %d name the "
                "missing workers",
                waits, self.rank, self.address, NEWS_AT_ONCE,
            )  # fmt: skip
            return
        try:
            members = (await self.members_async()).members
        except RpcdistError as exc:
            logger.warning("%s for the coordinator (rank %d) at %s: %s", waits, self.rank, self.address, exc)
            return
        there = {member.identity.id: member.identity.name for member in members}
        missing = [rank for rank in range(world_size or 0) if rank not in there]
        if missing:
            silent = self._network.strangers.silent if self.service is not None else 0
            token = (
                f". {silent} connections failed in TLS; check that the missing workers have the same job token, "
                "and clocks that differ from this one by less than a day"
                if silent
                else ""
            )
            logger.warning(
                "%s for rank %s of %d; those in the job so far: %s%s",
                waits, listed(missing), world_size, listed(there.values()), token,
            )  # fmt: skip
        else:
            logger.warning("%s for these workers of the job to be notified of it: %s", waits, listed(there.values()))

    def members(self, limit_s: float | None = None) -> Roster:
        limit_s = 2 * ANSWER_GRACE_S if limit_s is None else min(limit_s, 2 * ANSWER_GRACE_S)
        return self._network.run(self.members_async(), limit_s)

    async def members_async(self) -> Roster:
        """Like `members`, on the I/O loop. Cancellation leaves nothing behind."""
        request = membership_pb2.MembersRequest()
        if self.service is not None:
            reply = await self.service.members(self._me, request)
        else:
            reply = await self._ask("Members", request, membership_pb2.JoinReply, ANSWER_GRACE_S, ANSWER_GRACE_S)
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
        """Announces this worker to the process at an address, if it is another coordinator than the previous one.

        Args:
            roster: the members of the job, as this worker knows them.
            before: the previous coordinator.
            limit_s: limit on the coordinator's wait for other returning workers.
            on_answer: called when there is another coordinator, before it has decided.

        Returns:
            The process that answered, and its verdict; no verdict if it is not another coordinator.

        Raises:
            TransportError, DeadlineExceeded: no process answered, or not in time.
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
        request = membership_pb2.LeaveRequest(identity=identity_to_proto(self._me))
        if self.service is not None:
            self._network.run(self.service.leave(self._me, request), ANSWER_GRACE_S)
        else:
            asked = self._ask(
                "Leave", request, membership_pb2.LeaveReply, QUICK_ANSWER_LIMIT_S, ANSWER_GRACE_S, retry=False
            )
            self._network.run(asked, 2 * ANSWER_GRACE_S)

    async def _ask(
        self,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        connect_s: float,
        limit_s: float | None,
        retry: bool = True,
    ) -> ReplyT:
        link = await self._network.connect(self.address, "membership", min(connect_s, LONGEST_WAIT_S), retry=retry)
        try:
            return await link.unary("Membership", method, request, reply_type, limit_s)
        finally:
            await link.close()


@dataclass(kw_only=True, eq=False, repr=False)
class CoordinatorSearch:
    """Looks for the successor of a lost coordinator, on the I/O loop; does nothing at the coordinator.

    It makes attempts, with pauses between them. A call to the lost coordinator ends the pause, and waits for the next
    attempt, since the successor may be there already.

    Args:
        submit: runs functions that block on a thread of their own.
        look_up: returns the address of the next coordinator; blocks, bounded.
        recovery_s: how long a coordinator waits for returning workers.
        orphan_timeout_s: how long this worker looks for the next coordinator; then it is an orphan.
        on_orphaned: called with the reason when it is an orphan, and with None when a coordinator has taken it back.
    """

    coordinator: Coordinator
    directory: Directory
    router: Router
    submit: Callable[[Callable[[], object]], object]
    look_up: Callable[[], str]
    world_size: int | None
    recovery_s: float
    orphan_timeout_s: float
    on_orphaned: Callable[[CoordinatorLost | None], object]
    io: IoLoop
    lifetime: Lifetime
    _orphan_handle: asyncio.TimerHandle | None = None
    _refused_by: Identity | None = None
    _missed_news: bool = False
    _check_handle: asyncio.TimerHandle | None = None
    _task: asyncio.Task[None] | None = None
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)  # set while a call waits for an attempt
    _next_ended: asyncio.Event = field(default_factory=asyncio.Event)  # of the next attempt that begins
    _is_answered: bool = False  # by another coordinator, which may wait for others before it takes this worker back

    def __post_init__(self) -> None:
        rank = self.directory.coordinator
        self._joined = self.directory.member(rank).identity if self.directory.knows(rank) else None

    def begin_watching(self) -> None:
        """Ensures that the coordinator's death is noticed. It usually connects to all workers, unless it dies first."""
        if self.coordinator.service is None:
            self._check_handle = self.io.loop.call_later(self.recovery_s, self._check)

    def _check(self) -> None:
        if self._joined is not None and not self.router.has_inbound_session(self._joined):
            self.router.watch(self.directory.coordinator)

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        if identity.id != self.directory.coordinator:
            return
        self._look()
        if self._orphan_handle is None and self.orphan_timeout_s < float("inf") and not self.lifetime.is_closed:
            self._orphan_handle = self.io.loop.call_later(self.orphan_timeout_s, self._declare_orphaned, error)

    def _declare_orphaned(self, error: WorkerLost) -> None:
        """Called when no coordinator has taken this worker back in time."""
        if self.directory.is_living(self.directory.coordinator):  # it was only silent
            self._orphan_handle = None
            return
        reason = f"no process took its place within {self.orphan_timeout_s:g} s ({error.reason})"
        orphaned = CoordinatorLost(error.worker, "rpc.serve()", error.last_seen_s, reason)
        logger.error("%s: %s", self.directory.me.name, orphaned)
        self.on_orphaned(orphaned)

    def _found(self) -> None:
        if self._orphan_handle is not None:
            self._orphan_handle.cancel()
            self._orphan_handle = None
            self.on_orphaned(None)

    def is_coordinator(self, identity: Identity) -> bool:
        """Whether a worker that speaks as the coordinator is the one whose list has this worker.

        If it is another one, the search starts: it may have taken this worker back a moment ago, or started before its
        predecessor's end was noticed here. It sends the members when this worker announces itself.
        """
        if identity == self._joined:
            return True
        if self._may_be_next(identity):
            self._missed_news = True
            self._look()
        return False

    def on_probe(self, identity: Identity) -> None:
        """Called when a process, perhaps the next coordinator, asks whether this worker lives; refuses no process."""
        if identity != self._joined and self._may_be_next(identity):
            self._hurry()

    def _may_be_next(self, identity: Identity) -> bool:
        return identity.id == self.directory.coordinator and not self.directory.was_replaced(identity)

    def _look(self) -> None:
        is_looking = self._task is not None and not self._task.done()
        if self.coordinator.service is None and not is_looking and not self.lifetime.is_closed:
            self._task = self.io.spawn(self._run(), "rpcdist look for the coordinator")

    def _hurry(self) -> None:
        self._wanted.set()
        self._look()

    def _on_answer(self) -> None:
        self._is_answered = True

    async def attempt(self, deadline: Deadline) -> None:
        """Waits until the coordinator is found, or until one attempt that begins now or later has failed.

        Without an answer it waits at most `QUICK_ANSWER_LIMIT_S`; once another coordinator has answered, it waits until
        that one has taken this worker back, at most until the deadline.
        """
        ended = self._next_ended
        self._hurry()
        if not await ends_within(ended.wait(), min(QUICK_ANSWER_LIMIT_S, deadline.remaining_s())) and self._is_answered:
            await ends_within(ended.wait(), deadline.remaining_s())

    def close(self) -> None:
        for handle in (self._check_handle, self._orphan_handle):
            if handle is not None:
                handle.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        deadline = Deadline.after(self.orphan_timeout_s)
        pauses = backoff(FIRST_PAUSE_S, RETURN_LONGEST_PAUSE_S, deadline)
        while not self.lifetime.is_closed and not deadline.expired():
            self._missed_news = False
            self._wanted.clear()
            ended, self._next_ended = self._next_ended, asyncio.Event()
            is_over = False
            try:
                is_over = await self._attempt(await self._address())
            except RpcdistError as exc:  # no coordinator is there yet, or it has just ended
                logger.debug("%s has not found the coordinator: %s", self.directory.me.name, exc)
            finally:
                self._is_answered = False
                ended.set()
            if is_over:
                self._next_ended.set()  # no other attempt follows
                self._next_ended = asyncio.Event()
                if self._missed_news:  # sent before the answer to the announcement had come
                    await self.directory.refresh_async()
                return
            await ends_within(self._wanted.wait(), next(pauses))
        if not self.lifetime.is_closed:
            logger.error(
                "%s has not found the coordinator for %.0f s, and stops looking; it continues with the workers that "
                "it knows",
                self.directory.me.name,
                self.orphan_timeout_s,
            )

    async def _address(self) -> str:
        """The address of the next coordinator, looked up at each attempt, since it may start at another address."""
        look_up = self.look_up
        found: Future[str] = Future()

        def ask() -> None:
            try:
                found._complete(look_up())
            except Exception as exc:  # other stores may raise anything, and the search waits for this answer
                found._fail(
                    exc
                    if isinstance(exc, RpcdistError)
                    else DistStoreError(f"the store failed: {described_error(exc)}")
                )

        self.submit(ask)
        return await found

    async def _attempt(self, address: str) -> bool:
        directory = self.directory
        roster = directory.roster()
        me = directory.member(directory.me.id)
        limit_s = 3 * self.recovery_s  # the coordinator decides after twice that time at most
        peer, reply = await self.coordinator.announce(
            address, me, self.world_size, roster, self._joined, limit_s, self._on_answer
        )
        if reply is None:
            rank = directory.coordinator
            if peer.id == rank:  # it was only silent; reconnecting updates the detectors
                self.router.revive(rank)
            lives = peer.id == rank and directory.lives(peer)
            if lives:
                self._found()
            return lives
        if reply.outcome == Outcome.TIMED_OUT:
            return False
        try:
            directory.update(members_of(reply, directory.me, address, 0.0))
        except RpcdistError as exc:
            if peer != self._refused_by:  # each call to the lost coordinator starts another attempt
                logger.error(
                    "%s found another coordinator, which refused it: %s. It continues with the workers that it "
                    "knows; end it if it belongs to an earlier job",
                    directory.me.name,
                    exc,
                )
            self._refused_by = peer
            return True
        self._joined = peer
        self._found()
        logger.warning("%s was taken back by the coordinator that started at %s", directory.me.name, address)
        self.router.watch(self.directory.coordinator)
        return True
