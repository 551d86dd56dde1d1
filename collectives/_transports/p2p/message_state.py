"""The state of a rank's messages: requests, unexpected messages, and connections. It never waits.

1. Every method needs the messenger's lock.
2. A request is completed once: it leaves `pending` and enters `settled`, from where a thread notifies its waiters.
3. A request fails at its deadline. A refused send fails alone. The receives from a rank fail when its connection ends
   or when it refuses a message. The receives from any source fail when the last of the other ranks is gone.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Generic, TypeVar

import torch

from rpcdist.collectives._transports.p2p.peer_sockets import IncomingConnection, InStream, OutgoingConnection, OutStream
from rpcdist.collectives._transports.p2p.requests import (
    Header,
    PostedReceive,
    Request,
    Target,
    UnexpectedMessage,
    refusal,
)
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ProtocolViolation, RankLost
from rpcdist.own_shortage import free_memory, own_shortage
from rpcdist.time_limits import POLL_S
from rpcdist.transport._tls.tls_socket import StreamSocket

R = TypeVar("R")
M = TypeVar("M")
T = TypeVar("T")

_LATE: Final = "Timed out waiting"
"""The words of torch's error, which programs search for."""
_REFUSED_BEFORE: Final = "An earlier message was refused, which this rank could not report until now."

_KEPT_BYTES: Final = 1 << 10  # what a message without a payload takes that is kept, rounded up

_Source = int | None  # None for any


class _Kept(Generic[T]):
    """Stored receives or messages, by tag and in order of arrival.

    Attributes:
        weights: the summed weights of the stored items, by source.
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, list[tuple[_Source, T, int]]] = {}
        self.weights: Counter[_Source] = Counter()

    def add(self, source: _Source, tag: int, item: T, weight: int) -> None:
        self.weights[source] += weight  # first: if a signal handler raises in between, its socket is read too often
        self._by_tag.setdefault(tag, []).append((source, item, weight))

    def take(self, source: _Source, tag: int, only: T | None = None) -> T | None:
        """Removes and returns the first item that matches, or `only` if given; None if it is not stored."""
        kept = self._by_tag.get(tag, ())
        for index, (other, item, weight) in enumerate(kept):
            if (source is None or other is None or source == other) and (only is None or item is only):
                del self._by_tag[tag][index]
                if not kept:
                    del self._by_tag[tag]
                self.weights[other] -= weight
                return item
        return None

    def items(self) -> list[tuple[_Source, T]]:
        return [(source, item) for kept in self._by_tag.values() for source, item, _ in kept]


class Matcher(Generic[R, M]):
    """Keeps receives without a message and messages without a receive; pure: no socket, no clock, no thread.

    It takes each receive that is posted and each message that arrives, and returns its partner or keeps it.

     M1  A message from s with tag t matches a receive from s with tag t, or from any source with tag t.
     M2  Messages of one source and tag are matched in the order of arrival.
     M3  Receives that a message could match are matched in the order of posting.
     M4  A receive from any source takes the message that arrived first.
     M5  No message is kept while a receive that it matches is kept.
     M6  While a receive that a source could match is kept, the source is read, however much of it is buffered: the
         message for the receive may come after others. Otherwise it is read only while a send of this rank is stuck
         (the source may be stuck in a send to this rank), and only until its kept messages, complete or not, exceed
         `limit_bytes`.

    Args:
        limit_bytes: the limit of each source's kept messages, see M6.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._receives: _Kept[R] = _Kept()
        self._messages: _Kept[M] = _Kept()

    @property
    def num_messages(self) -> int:
        return len(self._messages.items())

    def post(self, source: int | None, tag: int, receive: R) -> M | None:
        """Takes a receive. Returns its message, or keeps the receive and returns None."""
        message = self._messages.take(source, tag)
        if message is None:
            self._receives.add(source, tag, receive, 1)
        return message

    def arrive(self, source: int, tag: int) -> R | None:
        """Takes the start of a message. Returns its receive, or None: then call `keep` before any other method."""
        return self._receives.take(source, tag)

    def keep(self, source: int, tag: int, size_bytes: int, message: M) -> None:
        self._messages.add(source, tag, message, size_bytes)

    def withdraw(self, tag: int, receive: R) -> bool:
        return self._receives.take(None, tag, receive) is not None

    def discard(self, tag: int, message: M) -> None:
        self._messages.take(None, tag, message)

    def should_read(self, source: int, a_send_is_stuck: bool) -> bool:
        """Whether the source's socket should be read now (M6)."""
        wanted = self._receives.weights
        may_fill = a_send_is_stuck and self.buffered_bytes(source) <= self._limit_bytes
        return may_fill or wanted[source] > 0 or wanted[None] > 0

    def buffered_bytes(self, source: int) -> int:
        return self._messages.weights[source]

    def receives(self, source: int | None) -> list[R]:
        return [receive for named, receive in self._receives.items() if named == source]


logger = logging.getLogger(__name__)


class MessageState:
    """The requests, messages and connections of one rank.

    Attributes:
        pending: incomplete requests, in the order of their calls.
        settled: complete requests whose waiters have not been notified; any thread may take the first.
        lost: the ranks that are gone, with the reason.
        error: the error with which all requests fail from now on.
        next_deadline: the earliest time at which a request may be overdue.
    """

    def __init__(self, rank: int, ranks: Sequence[int], limit_bytes: int) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._others = [other for other in range(len(ranks)) if other != rank]
        self.pending: dict[Request, None] = {}
        self.settled: deque[Request] = deque()
        self.lost: dict[int, str] = {}
        self.error: BaseException | None = None
        self.next_deadline = math.inf
        self.matcher: Matcher[PostedReceive, UnexpectedMessage] = Matcher(limit_bytes)
        self.incoming: dict[int, IncomingConnection] = {}
        self.outgoing: dict[int, OutgoingConnection] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request is pending, or bytes of a failed message must be sent as others follow them."""
        return bool(self.pending) or self.a_send_is_stuck

    @property
    def a_send_is_stuck(self) -> bool:
        """Whether an open connection has not taken all bytes that are queued for it."""
        for connection in self.outgoing.values():  # not a generator: closing it loses a signal handler's error
            if connection.stream.queue and connection.is_open:
                return True
        return False

    # ------------------------------------------------------------ requests

    def complete(self, request: Request, error: BaseException | None = None) -> None:
        """Ends a request, with success or with an error; only the first call counts."""
        if not request.done:
            request.error = error
            request.done = True
            self.pending.pop(request, None)
            self.settled.append(request)

    def post(self, receive: PostedReceive) -> None:
        error = None if receive.peer is None else self._refused_before(receive, receive.peer)
        if error is not None:
            text = f"{_REFUSED_BEFORE} This receive got no message; the next receive gets the one that was sent for it."
            error.add_note(text)
            self.complete(receive, error)
            return
        self._keep(receive)
        arrived = self.matcher.post(receive.peer, receive.tag, receive)
        if arrived is None:
            self._fail_if_gone(receive)
        elif self._accepts(receive, arrived.source, arrived.header):
            stream = self.incoming[arrived.source].stream
            if stream.target is arrived:  # it is still arriving: the socket's reader puts the rest there
                stream.redirect(receive)
            else:
                receive.arrived = arrived
                self.complete(receive)

    def put(self, request: Request, connection: OutgoingConnection, num_sent: int = 0) -> None:
        """Takes a send; `num_sent` of its bytes were sent already."""
        reason = connection.ended or self.lost.get(connection.peer)
        if reason is not None:
            self.complete(request, self._lost_error(request, connection.peer, reason, connection.lacked_memory))
        else:
            self._keep(request)
            connection.stream.put(request, num_sent)
            connection.write()

    def _sent(self, peer: int, request: Request) -> None:
        """Completes a send whose bytes have all left; it fails with a refusal that no earlier request could report."""
        error = None if request.done else self._refused_before(request, peer)
        if error is not None:  # the message was sent all the same: without it, its receive would get the next one
            error.add_note(f"{_REFUSED_BEFORE} The message of this call was sent.")
        self.complete(request, error)

    def _refused_before(self, request: Request, peer: int) -> CollectiveMismatch | None:
        """Takes the error for a refusal by the peer that no earlier request could report; None if there is none."""
        connection = self.outgoing.get(peer)
        if connection is None or not connection.refusals:
            return None
        return self._mismatch(request, self.rank, peer, *connection.refusals.popleft())

    def _keep(self, request: Request) -> None:
        self.pending[request] = None
        self.next_deadline = min(self.next_deadline, request.deadline_at)

    def _fail_if_gone(self, receive: PostedReceive) -> None:
        """Fails a receive if its source is gone, or, for any source, every other rank."""
        sources = self._others if receive.peer is None else [receive.peer]
        reasons = {rank: reason for rank in sources if (reason := self._why_gone(rank)) is not None}
        if 0 < len(sources) == len(reasons):
            text = "; ".join(f"rank {self.ranks[rank]}: {reason}" for rank, reason in reasons.items())
            prefix = "all other ranks are gone: " if receive.peer is None else ""
            is_lost = not any([rank in self.incoming and self.incoming[rank].lacked_memory for rank in reasons])
            error = RankLost(receive.title, prefix + text, sources) if is_lost else CollectiveError(receive.title, text)
            self._give_up(receive, error)

    def _why_gone(self, rank: int) -> str | None:
        """Says why no message can come from a rank any more; None while its connection has not been read to the end."""
        return connection.ended if (connection := self.incoming.get(rank)) else self.lost.get(rank)

    # ------------------------------------------------------------ messages

    def begin(self, source: int, header: Header) -> Target | None:
        """Takes the header of a message; returns the target of its payload, or None to drop the payload.

        Raises:
            MemoryError: no memory is left to keep the message.
        """
        receive = self.matcher.arrive(source, header.tag)
        if receive is not None:
            return receive if self._accepts(receive, source, header) else None
        try:
            memory = torch.empty(header.size_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as exc:
            raise MemoryError(f"{header} do not fit into memory, of which {free_memory()}") from exc
        arrived = UnexpectedMessage(source, header, memory)
        self.matcher.keep(source, header.tag, max(header.size_bytes, _KEPT_BYTES), arrived)
        return arrived

    def end(self, target: Target) -> None:
        if isinstance(target, PostedReceive):
            self.complete(target)

    def _accepts(self, receive: PostedReceive, source: int, header: Header) -> bool:
        """Returns whether the message is what the receive expects; if not, fails the receive and tells the sender."""
        receive.source = source
        if header.size_bytes == len(receive.memory) and header.code == receive.code:
            return True
        expected = receive.header()
        self.complete(receive, self._mismatch(receive, source, self.rank, expected, header))
        self.incoming[source].refuse(refusal(expected, header))
        return False

    # ------------------------------------------------------------ connections

    def new_connection(self, peer: int) -> OutgoingConnection:
        connection = OutgoingConnection(peer, OutStream(partial(self._sent, peer)), partial(self._end_outgoing, peer))
        self.outgoing[peer] = connection
        return connection

    def attach(self, source: int, sock: StreamSocket) -> None:
        """Takes a new connection from `source`, which replaces one on which nothing has arrived."""
        old = self.incoming.get(source)
        if old is not None and (old.stream.num_messages or old.stream.inside_message):
            sock.close()
            raise ProtocolViolation(f"rank {self.ranks[source]} connected twice")
        stream = InStream(partial(self.begin, source), self.end)
        self.incoming[source] = IncomingConnection(source, stream, partial(self._end_incoming, source))
        self.incoming[source].open(sock)
        if old is not None:
            old.end("another connection replaced it")

    def is_wanted(self, connection: IncomingConnection, a_send_is_stuck: bool) -> bool:
        """Whether to read a connection. The connection of a lost rank is read to its end."""
        return connection.ended is None and (
            isinstance(connection.stream.target, PostedReceive)
            or self.matcher.should_read(connection.peer, a_send_is_stuck)
            or connection.peer in self.lost
        )

    def _end_incoming(self, source: int, reason: str) -> None:
        target = self.incoming[source].stream.target
        if isinstance(target, UnexpectedMessage):
            self.matcher.discard(target.header.tag, target)
        elif target is not None:
            self.complete(target, self._lost_error(target, source, reason, self.incoming[source].lacked_memory))
        self._fail_receives(source)

    def _end_outgoing(self, peer: int, reason: str) -> None:
        connection = self.outgoing[peer]
        for request in connection.stream.clear():
            self.complete(request, self._lost_error(request, peer, reason, connection.lacked_memory))

    def fail_unopened(self, connection: OutgoingConnection, shortage: str) -> None:
        """Fails the sends of a connection that this process had no resources to open; no rank is lost."""
        for request in connection.stream.clear():
            self.complete(request, self._short_error(request, shortage))

    def _short_error(self, request: Request, shortage: str) -> CollectiveError:
        assert request.peer is not None
        return CollectiveError(request.title, f"no connection to rank {self.ranks[request.peer]}: {shortage}")

    def read_refusals(self, connection: OutgoingConnection, now: float) -> None:
        if connection.is_open and now - connection.refusals_read_at > POLL_S:
            connection.refusals_read_at = now
            for refused in connection.read_refusals() or ():
                self._refused(connection, *refused)

    def _refused(self, connection: OutgoingConnection, expected: Header, header: Header) -> None:
        """Handles a refusal by the peer: fails the send and the receives from it, or else the next request with it."""
        victims: list[Request] = [*self.matcher.receives(connection.peer)]
        if (request := connection.stream.find(header.sequence)) is not None:
            victims.append(request)  # the rest of its bytes is sent all the same, and the peer drops them
        if not victims:
            connection.refusals.append((expected, header))
            what = f"message {header.sequence} of this pair ({header}, tag {header.tag})"
            logger.warning("rank %d refused %s: it expected %s", self.ranks[connection.peer], what, expected)
        for victim in victims:
            self._give_up(victim, self._mismatch(victim, self.rank, connection.peer, expected, header))

    def lose(self, rank: int, reason: str) -> None:
        """Notes that a rank is gone. Its connection is read to the end, so earlier messages can still be received."""
        self.lost.setdefault(rank, reason)
        if rank in self.outgoing:
            self.outgoing[rank].end(reason)
        self._fail_receives(rank)

    def _fail_receives(self, rank: int) -> None:
        """Fails the receives that no rank can fill after the loss of a rank."""
        for receive in (*self.matcher.receives(rank), *self.matcher.receives(None)):
            self._fail_if_gone(receive)

    # ------------------------------------------------------------ ends

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for request in list(self.pending):
            self._give_up(request, self.error)
        for connection in self.outgoing.values():
            connection.stream.clear()

    def expire(self, now: float) -> None:
        for request in list(self.pending):
            if request.deadline_at <= now:
                self.withdraw(request)
        self.next_deadline = min([request.deadline_at for request in self.pending], default=math.inf)

    def withdraw(self, request: Request) -> None:
        """Fails a request as overdue. If part of a send has left, its connection ends."""
        limit = f"within {request.timeout_s:.3g} s"
        if isinstance(request, PostedReceive):
            source = request.source if request.peer is None else request.peer
            whom = f"rank {self.ranks[source]}" if source >= 0 else "any rank"
            begun = request.source >= 0
            if source not in self.incoming and (shortage := own_shortage()) is not None:
                error = CollectiveError(request.title, f"no connection of {whom} could be accepted: {shortage}")
                self._give_up(request, error)
                return
            what = "its message did not arrive completely" if begun else f"no message with tag {request.tag}"
            self._give_up(request, CollectiveTimeout(request.title, f"{_LATE}: {what} from {whom} {limit}"))
            return
        assert request.peer is not None
        connection = self.outgoing[request.peer]
        if not connection.is_open and (shortage := own_shortage()) is not None:
            self.complete(request, self._short_error(request, shortage))
            connection.stream.withdraw(request)
            return
        text = f"rank {self.ranks[request.peer]} did not receive {request.header()} with tag {request.tag} {limit}"
        self.complete(request, CollectiveTimeout(request.title, f"{_LATE}: {text}"))
        if not connection.stream.withdraw(request):
            connection.end(f"{request.title} timed out in the middle of the message")

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Fails a request. The message of a receive is dropped; a send of which a part has left is sent to its end."""
        if isinstance(request, PostedReceive) and not request.done:
            self.matcher.withdraw(request.tag, request)
            if request.source in self.incoming and self.incoming[request.source].stream.target is request:
                self.incoming[request.source].stream.drop_target()
        self.complete(request, error)

    def _lost_error(self, request: Request, rank: int, reason: str, lacked_memory: bool) -> CollectiveError:
        text = f"rank {self.ranks[rank]}: {reason}"
        return CollectiveError(request.title, text) if lacked_memory else RankLost(request.title, text, (rank,))

    def _mismatch(self, request: Request, source: int, to: int, expected: Header, header: Header) -> CollectiveMismatch:
        sent = f"rank {self.ranks[source]} sent {header} with tag {header.tag} (message {header.sequence} of this pair)"
        return CollectiveMismatch(request.title, f"{sent}, rank {self.ranks[to]} receives {expected}")
