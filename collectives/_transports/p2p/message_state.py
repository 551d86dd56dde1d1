"""All that a rank knows about its messages. No waiting, and no system call but for refusals and closing.

1. Every method wants the messenger's lock. A stream in use outside of it (the leader's reading; `OutLink.busy`) is left
   to its user: only the leader calls `attend`, and only that gives up requests whose bytes are on their way.
2. A request is decided once: it leaves `pending`, and enters `settled`, from where somebody tells its waiters.
3. What fails with whom: a request with its deadline, a refused send alone, the receives from a rank with the end of
   its connection or with its refusal, the receives from any source with the last of the other ranks.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from functools import partial

from rpcdist.collectives._transports.p2p.byte_streams import InStream, Target
from rpcdist.collectives._transports.p2p.matching import Matcher
from rpcdist.collectives._transports.p2p.message_format import Header, describe_view, refusal
from rpcdist.collectives._transports.p2p.peer_sockets import InLink, OutLink, prepare
from rpcdist.collectives._transports.p2p.requests import PostedReceive, Request, UnexpectedMessage
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ProtocolViolation, RankLost
from rpcdist.time_limits import WITHDRAW_RETRY_S

__all__ = ["MessageState"]


class MessageState:
    """The state of one rank's messages.

    Args:
        rank: this process's rank in the group.
        ranks: the members' ranks in the world, for texts.
        limit_bytes: see `Matcher`.

    Attributes:
        pending: requests that are not decided, in the order of their calls.
        settled: requests that are decided, and nobody was told.
        lost: ranks that are gone, and why.
        error: why nothing works any more.
        next_deadline: no request is overdue before.
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
        self.incoming: dict[int, InLink] = {}
        self.outgoing: dict[int, OutLink] = {}

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """From now on somebody waits for it."""
        self.pending[request] = None
        self.next_deadline = min(self.next_deadline, request.deadline_at)

    def decide(self, request: Request, error: BaseException | None = None) -> None:
        """It is done, well or not; only the first time counts."""
        if not request.done:
            request.error = error
            request.done = True
            self.pending.pop(request, None)
            self.settled.append(request)

    def post(self, receive: PostedReceive) -> None:
        """A receive was called."""
        if self.error is not None:
            self.decide(receive, self.error)
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
                self.decide(receive)

    def put(self, request: Request) -> OutLink | None:
        """A send to another rank was called. Returns its connection, unless the send failed at once."""
        peer = request.peer
        assert peer is not None
        if self.error is not None:
            self.decide(request, self.error)
            return None
        link = self.outgoing.get(peer)
        if link is None:
            link = self.outgoing[peer] = OutLink(peer)
        reason = link.ended or self.lost.get(peer)
        if reason is not None:
            self.decide(request, self._lost_error(request, peer, reason))
        elif not self._raise_refusal(request):
            self.add(request)
            link.stream.put(request)
            return link
        return None

    def put_to_self(self, request: Request) -> None:
        """A send to this rank was called: its message arrives at once."""
        header = Header(0, request.code, request.tag, 0, request.size_bytes)
        target = self.begin(self.rank, header)
        if target is not None:
            target.fill(request.address)
            self.end(target)
        self.decide(request)

    def _raise_refusal(self, request: Request) -> bool:
        """What the peer refused after it was sent is raised by the next operation with it."""
        link = None if request.peer is None else self.outgoing.get(request.peer)
        if link is None or not link.refusals:
            return False
        self.decide(request, self._refused_error(request, link.peer, *link.refusals.popleft()))
        return True

    def _fail_if_gone(self, receive: PostedReceive) -> None:
        peer = receive.peer
        if peer is None:
            self._check_any_source()
        elif (link := self.incoming.get(peer)) is not None:
            if link.ended is not None:
                self._give_up(receive, self._lost_error(receive, peer, link.ended))
        elif peer in self.lost:
            self._give_up(receive, self._lost_error(receive, peer, self.lost[peer]))

    # ------------------------------------------------------------ messages

    def begin(self, source: int, header: Header) -> Target | None:
        """A message begins; returns where its payload goes."""
        receive = self.matcher.arrive(source, header.tag)
        if receive is not None:
            return receive if self._accepts(receive, source, header) else None
        arrived = UnexpectedMessage(source, header)
        self.matcher.keep(source, header.tag, header.size_bytes, arrived)
        return arrived

    def end(self, target: Target) -> None:
        """The payload of a message is there."""
        if isinstance(target, PostedReceive):
            self.decide(target)
        else:
            target.complete = True
            if target.receive is not None:
                self.decide(target.receive)

    def _accepts(self, receive: PostedReceive, source: int, header: Header) -> bool:
        """Whether the message is what the receive expects; else fails it, and tells the sender."""
        receive.source = source
        if header.size_bytes == receive.size_bytes and header.code == receive.code:
            return True
        theirs = describe_view(header.code, header.size_bytes)
        text = f"rank {self.ranks[source]} sent {theirs}, rank {self.ranks[self.rank]} receives {receive.view}"
        self.decide(receive, CollectiveMismatch(receive.title, text))
        if source in self.incoming:
            self.incoming[source].refuse(refusal(header, receive.code, receive.size_bytes))
        return False

    # ------------------------------------------------------------ connections

    def attach(self, source: int, sock: socket.socket) -> None:
        """A connection from `source` came; takes the place of one on which nothing came."""
        old = self.incoming.get(source)
        if old is not None:
            if old.stream.num_messages or old.stream.inside_message:
                raise ProtocolViolation(f"rank {self.ranks[source]} connected twice")
            old.close()
        prepare(sock)
        self.incoming[source] = InLink(sock, source, InStream(partial(self.begin, source), self.end))

    def interests(self) -> tuple[list[InLink], list[OutLink]]:
        """(connections to read, connections to write to) now."""
        writers = [link for link in self.outgoing.values() if link.stream and link.sock is not None and not link.busy]
        stuck = bool(writers)
        return [link for link in self.incoming.values() if self.is_wanted(link, stuck)], writers

    def is_wanted(self, link: InLink, a_send_is_stuck: bool) -> bool:
        """Whether to read a connection; that of a lost rank is read to its end."""
        return link.ended is None and (
            self._is_awaited(link.stream.target)
            or self.matcher.should_read(link.source, a_send_is_stuck)
            or link.source in self.lost
        )

    @staticmethod
    def _is_awaited(target: Target | None) -> bool:
        return target is not None and (isinstance(target, PostedReceive) or target.receive is not None)

    def has_leftovers(self) -> bool:
        """Whether bytes have to go of messages that failed: the next one stands behind them."""
        return self.error is None and any(link.stream and link.ended is None for link in self.outgoing.values())

    def end_incoming(self, link: InLink, reason: str) -> None:
        """Nothing more comes from a rank; for the leader."""
        link.ended = reason
        link.close()
        target = link.stream.target
        if isinstance(target, PostedReceive):
            self.decide(target, self._lost_error(target, link.source, reason))
        elif target is not None:
            if target.receive is not None:
                self.decide(target.receive, self._lost_error(target.receive, link.source, reason))
            self.matcher.discard(link.source, target.header.tag, target)
        for receive in self.matcher.receives(link.source):
            self._give_up(receive, self._lost_error(receive, link.source, reason))
        self._check_any_source()

    def end_outgoing(self, link: OutLink, reason: str) -> None:
        """Nothing more can be sent to a rank; for who uses the stream."""
        link.ended = reason
        for request in link.stream.clear():
            self.decide(request, self._lost_error(request, link.peer, reason))
        link.cut()

    def refused(self, link: OutLink, expected: Header, header: Header) -> None:
        """The peer refused a message: its send fails, and what is expected from that peer, or else what comes next."""
        victims: list[Request] = [*self.matcher.receives(link.peer)]
        if (request := link.stream.find(header.sequence)) is not None:
            victims.append(request)  # its bytes go on, to nowhere
        if not victims:
            link.refusals.append((expected, header))
        for victim in victims:
            self._give_up(victim, self._refused_error(victim, link.peer, expected, header))

    def _check_any_source(self) -> None:
        """Fails the receives from any source when nobody else is left."""
        others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        if not others or not all(self._is_gone(rank) for rank in others):
            return
        for receive in self.matcher.receives(None):
            text = "all other ranks are gone: " + "; ".join(
                f"rank {self.ranks[rank]}: {self.lost.get(rank) or self.incoming[rank].ended}" for rank in others
            )
            self._give_up(receive, RankLost(receive.title, text, others))

    def _is_gone(self, rank: int) -> bool:
        link = self.incoming.get(rank)
        return rank in self.lost if link is None else link.ended is not None

    # ------------------------------------------------------------ ends

    def attend(self, now: float) -> None:
        """What the leader does in each turn: gives up what is overdue, or everything."""
        if self.error is not None:
            self._fail_all(self.error)
        elif now >= self.next_deadline:
            self._expire(now)
        if self.lost:
            self._bury()

    def _bury(self) -> None:
        for rank, reason in self.lost.items():
            link = self.outgoing.get(rank)
            if link is not None and link.ended is None and not link.busy:
                self.end_outgoing(link, reason)
            if rank not in self.incoming:  # else it is read to its end first
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
        link = self.outgoing[request.peer]
        if link.busy:
            self.next_deadline = min(self.next_deadline, now + WITHDRAW_RETRY_S)
        elif link.stream.withdraw(request):
            self.decide(request, error)
        else:
            self.decide(request, error)
            self.end_outgoing(link, f"{request.title} timed out in the middle of the message")

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
        """A rank of the group as the world calls it."""
        assert rank is not None
        return self.ranks[rank]

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self.pending):
            if isinstance(request, PostedReceive):
                self._give_up(request, error)
            else:
                self.decide(request, error)
        for link in self.outgoing.values():
            if not link.busy:
                link.stream.clear()

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Fails a request; of a receive, its message goes nowhere; of a send, the bytes go on."""
        if isinstance(request, PostedReceive) and not request.done:
            self.matcher.withdraw(request.peer, request.tag, request)
            if request.arrived is not None:
                request.arrived.receive = None
            elif request.source in self.incoming and self.incoming[request.source].stream.target is request:
                self.incoming[request.source].stream.drop_target()
        self.decide(request, error)

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
