"""The state of a rank's messages. It never waits, and makes no system calls but for refusals and closing.

1. Every method needs the messenger's lock. A stream in use outside of the lock (by the leader that reads, by the thread
   that made an `OutgoingConnection` busy) belongs to its user: only the leader calls `fail_overdue`, and only that
   fails requests whose bytes are being moved.
2. A request is completed once: it leaves `pending` and enters `settled`, from where a thread notifies its waiters.
3. A request fails at its deadline; a refused send fails alone; the receives from a rank fail when its connection ends
   or when it refuses a message; the receives from any source fail when the last of the other ranks is gone.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from functools import partial

from rpcdist.collectives._transports.p2p.byte_streams import InStream, Target
from rpcdist.collectives._transports.p2p.matching import Matcher
from rpcdist.collectives._transports.p2p.message_format import Header, describe_view, refusal
from rpcdist.collectives._transports.p2p.peer_sockets import IncomingConnection, OutgoingConnection, prepare
from rpcdist.collectives._transports.p2p.requests import PostedReceive, Request, UnexpectedMessage
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ProtocolViolation, RankLost
from rpcdist.time_limits import WITHDRAW_RETRY_S

__all__ = ["MessageState"]


class MessageState:
    """The requests, messages and connections of one rank.

    Args:
        rank: this process's rank in the group.
        ranks: the members' ranks in the world, for error messages.
        limit_bytes: the limit of `Matcher`.

    Attributes:
        pending: requests that are not complete, in the order of their calls.
        settled: requests that are complete, and whose waiters have not been notified.
        lost: for each rank that is gone, the reason.
        error: the error with which everything fails from now on.
        next_deadline: the earliest time at which a request may be overdue.
    """

    def __init__(self, rank: int, ranks: Sequence[int], limit_bytes: int) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.pending: dict[Request, None] = {}
        self.settled: list[Request] = []
        self.lost: dict[int, str] = {}
        self.error: BaseException | None = None
        self.next_deadline = math.inf
        self.matcher: Matcher[PostedReceive, UnexpectedMessage] = Matcher(limit_bytes)
        self.incoming: dict[int, IncomingConnection] = {}
        self.outgoing: dict[int, OutgoingConnection] = {}

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Adds a request to those that are pending."""
        self.pending[request] = None
        self.next_deadline = min(self.next_deadline, request.deadline_at)

    def complete(self, request: Request, error: BaseException | None = None) -> None:
        """Ends a request, with success or with an error; only the first call counts."""
        if not request.done:
            request.error = error
            request.done = True
            self.pending.pop(request, None)
            self.settled.append(request)

    def post(self, receive: PostedReceive) -> None:
        """Takes a receive that was called."""
        if self.error is not None:
            self.complete(receive, self.error)
        if receive.done or self._raise_refusal(receive):
            return
        arrived = self.matcher.post(receive.peer, receive.tag, receive)
        self.add(receive)
        if arrived is None:
            self._fail_if_gone(receive)
        elif self._accepts(receive, arrived.source, arrived.header):
            receive.arrived = arrived
            arrived.receive = receive
            if arrived.complete:
                self.complete(receive)

    def put(self, request: Request) -> OutgoingConnection | None:
        """Takes a send to another rank. Returns its connection, unless the send failed at once."""
        peer = request.peer
        assert peer is not None
        if self.error is not None:
            self.complete(request, self.error)
            return None
        connection = self.outgoing.get(peer)
        if connection is None:
            connection = self.outgoing[peer] = OutgoingConnection(peer)
        reason = connection.ended or self.lost.get(peer)
        if reason is not None:
            self.complete(request, self._lost_error(request, peer, reason))
        elif not self._raise_refusal(request):
            self.add(request)
            connection.stream.put(request)
            return connection
        return None

    def put_to_self(self, request: Request) -> None:
        """Takes a send to this rank itself: its message arrives at once."""
        header = Header(0, request.code, request.tag, 0, request.size_bytes)
        target = self.begin(self.rank, header)
        if target is not None:
            target.fill(request.address)
            self.end(target)
        self.complete(request)

    def _raise_refusal(self, request: Request) -> bool:
        """Fails the request if the peer has refused an earlier message that no request could report."""
        connection = None if request.peer is None else self.outgoing.get(request.peer)
        if connection is None or not connection.refusals:
            return False
        self.complete(request, self._refused_error(request, connection.peer, *connection.refusals.popleft()))
        return True

    def _fail_if_gone(self, receive: PostedReceive) -> None:
        peer = receive.peer
        if peer is None:
            self._check_any_source()
        elif (connection := self.incoming.get(peer)) is not None:
            if connection.ended is not None:
                self._give_up(receive, self._lost_error(receive, peer, connection.ended))
        elif peer in self.lost:
            self._give_up(receive, self._lost_error(receive, peer, self.lost[peer]))

    # ------------------------------------------------------------ messages

    def begin(self, source: int, header: Header) -> Target | None:
        """Takes the header of a message; returns the target of its payload, or None to drop it."""
        receive = self.matcher.arrive(source, header.tag)
        if receive is not None:
            return receive if self._accepts(receive, source, header) else None
        arrived = UnexpectedMessage(source, header)
        self.matcher.keep(source, header.tag, header.size_bytes, arrived)
        return arrived

    def end(self, target: Target) -> None:
        """Notes that the payload of a message is complete."""
        if isinstance(target, PostedReceive):
            self.complete(target)
        else:
            target.complete = True
            if target.receive is not None:
                self.complete(target.receive)

    def _accepts(self, receive: PostedReceive, source: int, header: Header) -> bool:
        """Returns whether the message is what the receive expects; else fails the receive and tells the sender."""
        receive.source = source
        if header.size_bytes == receive.size_bytes and header.code == receive.code:
            return True
        theirs = describe_view(header.code, header.size_bytes)
        text = f"rank {self.ranks[source]} sent {theirs}, rank {self.ranks[self.rank]} receives {receive.view}"
        self.complete(receive, CollectiveMismatch(receive.title, text))
        if source in self.incoming:
            self.incoming[source].refuse(refusal(header, receive.code, receive.size_bytes))
        return False

    # ------------------------------------------------------------ connections

    def attach(self, source: int, sock: socket.socket) -> None:
        """Takes a new connection from `source`, which replaces one on which nothing has come."""
        old = self.incoming.get(source)
        if old is not None:
            if old.stream.num_messages or old.stream.inside_message:
                raise ProtocolViolation(f"rank {self.ranks[source]} connected twice")
            old.close()
        prepare(sock)
        self.incoming[source] = IncomingConnection(sock, source, InStream(partial(self.begin, source), self.end))

    def interests(self) -> tuple[list[IncomingConnection], list[OutgoingConnection]]:
        """Returns the connections to read and those to write to now."""
        writers = [
            connection
            for connection in self.outgoing.values()
            if connection.stream and connection.sock is not None and not connection.busy
        ]
        stuck = bool(writers)
        return [connection for connection in self.incoming.values() if self.is_wanted(connection, stuck)], writers

    def is_wanted(self, connection: IncomingConnection, a_send_is_stuck: bool) -> bool:
        """Whether to read a connection; that of a lost rank is read to its end."""
        return connection.ended is None and (
            self._is_awaited(connection.stream.target)
            or self.matcher.should_read(connection.source, a_send_is_stuck)
            or connection.source in self.lost
        )

    @staticmethod
    def _is_awaited(target: Target | None) -> bool:
        return target is not None and (isinstance(target, PostedReceive) or target.receive is not None)

    def has_leftovers(self) -> bool:
        """Whether bytes of failed messages are still to be sent, because the next message comes behind them."""
        return self.error is None and any(
            connection.stream and connection.ended is None for connection in self.outgoing.values()
        )

    def end_incoming(self, connection: IncomingConnection, reason: str) -> None:
        """Ends a connection on which nothing more comes; for the leader."""
        connection.ended = reason
        connection.close()
        target = connection.stream.target
        if isinstance(target, PostedReceive):
            self.complete(target, self._lost_error(target, connection.source, reason))
        elif target is not None:
            if target.receive is not None:
                self.complete(target.receive, self._lost_error(target.receive, connection.source, reason))
            self.matcher.discard(connection.source, target.header.tag, target)
        for receive in self.matcher.receives(connection.source):
            self._give_up(receive, self._lost_error(receive, connection.source, reason))
        self._check_any_source()

    def end_outgoing(self, connection: OutgoingConnection, reason: str) -> None:
        """Ends a connection on which nothing more can be sent; for the thread that uses its stream."""
        connection.ended = reason
        for request in connection.stream.clear():
            self.complete(request, self._lost_error(request, connection.peer, reason))
        connection.cut()

    def refused(self, connection: OutgoingConnection, expected: Header, header: Header) -> None:
        """Takes a refusal by the peer: fails the send and the receives from it, or else the next request with it."""
        victims: list[Request] = [*self.matcher.receives(connection.peer)]
        if (request := connection.stream.find(header.sequence)) is not None:
            victims.append(request)  # the rest of its bytes is sent, and dropped there
        if not victims:
            connection.refusals.append((expected, header))
        for victim in victims:
            self._give_up(victim, self._refused_error(victim, connection.peer, expected, header))

    def _check_any_source(self) -> None:
        """Fails the receives from any source when all other ranks are gone."""
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        if not others or not all(self._is_gone(rank) for rank in others):
            return
        for receive in self.matcher.receives(None):
            text = "all other ranks are gone: " + "; ".join(
                f"rank {self.ranks[rank]}: {self.lost.get(rank) or self.incoming[rank].ended}" for rank in others
            )
            self._give_up(receive, RankLost(receive.title, text, others))

    def _is_gone(self, rank: int) -> bool:
        connection = self.incoming.get(rank)
        return rank in self.lost if connection is None else connection.ended is not None

    # ------------------------------------------------------------ ends

    def fail_overdue(self, now: float) -> None:
        """Fails what is overdue or concerns lost ranks; after an error, everything. The leader calls it each turn."""
        if self.error is not None:
            self._fail_all(self.error)
        elif now >= self.next_deadline:
            self._expire(now)
        if self.lost:
            self._fail_for_lost_ranks()

    def _fail_for_lost_ranks(self) -> None:
        for rank, reason in self.lost.items():
            connection = self.outgoing.get(rank)
            if connection is not None and connection.ended is None and not connection.busy:
                self.end_outgoing(connection, reason)
            if rank not in self.incoming:  # else its connection is read to its end first
                for receive in self.matcher.receives(rank):
                    self._give_up(receive, self._lost_error(receive, rank, reason))
        self._check_any_source()

    def _expire(self, now: float) -> None:
        self.next_deadline = math.inf
        for request in list(self.pending):
            if request.deadline_at <= now:
                self._expire_one(request, now)
            else:
                self.next_deadline = min(self.next_deadline, request.deadline_at)

    def _expire_one(self, request: Request, now: float) -> None:
        error = CollectiveTimeout(request.title, self._overdue(request))
        if isinstance(request, PostedReceive):
            self._give_up(request, error)
            return
        assert request.peer is not None
        connection = self.outgoing[request.peer]
        if connection.busy:
            self.next_deadline = min(self.next_deadline, now + WITHDRAW_RETRY_S)
        elif connection.stream.withdraw(request):
            self.complete(request, error)
        else:
            self.complete(request, error)
            self.end_outgoing(connection, f"{request.title} timed out in the middle of the message")

    def _overdue(self, request: Request) -> str:
        limit = f"within {request.timeout_s:.3g} s"
        if not isinstance(request, PostedReceive):
            return f"rank {self.name(request.peer)} did not receive {request.view} with tag {request.tag} {limit}"
        what = "its message did not arrive completely" if request.source >= 0 else f"no message with tag {request.tag}"
        return f"{what} from {self._whom(request)} {limit}"

    def _whom(self, receive: PostedReceive) -> str:
        source = receive.source if receive.peer is None else receive.peer
        return f"rank {self.ranks[source]}" if source is not None and source >= 0 else "any rank"

    def name(self, rank: int | None) -> int:
        """Returns the rank in the world of a rank of the group."""
        assert rank is not None
        return self.ranks[rank]

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self.pending):
            if isinstance(request, PostedReceive):
                self._give_up(request, error)
            else:
                self.complete(request, error)
        for connection in self.outgoing.values():
            if not connection.busy:
                connection.stream.clear()

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Fails a request. The message of a receive is dropped; the bytes of a send that has begun are still sent."""
        if isinstance(request, PostedReceive) and not request.done:
            self.matcher.withdraw(request.peer, request.tag, request)
            if request.arrived is not None:
                request.arrived.receive = None
            elif request.source in self.incoming and self.incoming[request.source].stream.target is request:
                self.incoming[request.source].stream.drop_target()
        self.complete(request, error)

    def _lost_error(self, request: Request, rank: int, reason: str) -> CollectiveError:
        return RankLost(request.title, f"rank {self.ranks[rank]}: {reason}", (rank,))

    def _refused_error(self, request: Request, rank: int, expected: Header, header: Header) -> CollectiveError:
        ours = describe_view(header.code, header.size_bytes)
        theirs = describe_view(expected.code, expected.size_bytes)
        return CollectiveMismatch(
            request.title,
            f"rank {self.ranks[self.rank]} sent {ours} with tag {header.tag} (message {header.sequence} of this pair), "
            f"rank {self.ranks[rank]} receives {theirs}",
        )
