"""How workers hear of those who come and go: the coordinator tells each of them, and they confirm.

The messages are control messages: numbered, sent again over a new connection, applied once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_messages import (
    departures_from_proto,
    departures_to_proto,
    member_from_proto,
    member_to_proto,
)
from rpcdist.rpc._membership.membership_service import MembershipService
from rpcdist.rpc._peers.directory import COORDINATOR, Directory, Roster
from rpcdist.rpc._peers.lifetime import Lifetime
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values.buffers import ReceiveBuffer

__all__ = ["MembershipNews"]


class MembershipNews:
    """Both ends of it; one per agent, on the I/O loop.

    Args:
        directory: learns the news.
        service: the list of workers, if it is here: then this worker tells the others.
        send: sends a control message to a worker.
        watch: connects to a worker, so that its death is noticed.
        lifetime: when it is over, nobody is watched any more.
        is_coordinator: whether a worker is the coordinator whose list has this worker in it.
    """

    def __init__(
        self,
        directory: Directory,
        service: MembershipService | None,
        send: Callable[[int, pb.MembershipMessage], None],
        watch: Callable[[int, str], WorkerLost | None],
        lifetime: Lifetime,
        is_coordinator: Callable[[Identity], bool],
    ) -> None:
        self._directory = directory
        self._service = service
        self._send = send
        self._watch = watch
        self._lifetime = lifetime
        self._is_coordinator = is_coordinator

    def __repr__(self) -> str:
        return f"<MembershipNews of {self._directory.me.name}{', the coordinator' if self._service else ''}>"

    def start(self) -> None:
        """The coordinator begins to tell the others, and to watch them."""
        if self._service is not None:
            self._tell(self._service.announce_to(self._tell, self._directory.me))

    def _tell(self, roster: Roster) -> None:
        me, service = self._directory.me, self._service
        assert service is not None  # it is the one that calls this
        self._directory.update(roster)
        service.note_known(me, roster.version)
        message = pb.MembershipMessage(
            version=roster.version,
            members=map(member_to_proto, roster.members),
            departures=departures_to_proto(roster.departures),
        )
        for member in roster.members:
            if member.identity == me:
                continue
            self._watch(member.identity.id, "the membership of the job")
            if not service.knows(member.identity, roster.version):
                self._send(member.identity.id, message)

    def on_message(self, sender: Identity, message: pb.MembershipMessage, buffers: Sequence[ReceiveBuffer]) -> None:
        """The coordinator tells who is there, or a member confirms."""
        if self._service is not None:
            self._service.note_known(sender, message.version)
        elif self._is_coordinator(sender):
            departures = departures_from_proto(message.departures)
            self._directory.update(Roster(message.version, list(map(member_from_proto, message.members)), departures))
            self._send(COORDINATOR, pb.MembershipMessage(version=message.version))
            for identity, reason in departures.items():
                # The references that it held here are dropped when this worker's own detector agrees.
                if reason and self._directory.incarnation_of(identity.id) == identity.incarnation:
                    self._watch(identity.id, "the membership of the job")

    def on_broken(self, session: MessageSink, reason: str) -> None:
        """The coordinator's death is noticed by those, too, who have not called it."""
        if session.peer.id == COORDINATOR and self._service is None and not self._lifetime.is_closed:
            self._watch(COORDINATOR, "the membership of the job")
