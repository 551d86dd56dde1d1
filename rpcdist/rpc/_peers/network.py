"""The transport as the RPC layer sees it: sessions, protocols of what makes them, and what takes their messages.

`rpcdist.transport` implements the protocols with sockets (`Node`, `Link`). Tests implement them in memory, which is how
several workers can live in one process without a network; sessions and the I/O loop are the same there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused, abridged
from rpcdist.ids import Identity
from rpcdist.inspection import Strangers
from rpcdist.rpc._values.buffers import CopiedBuffer, LargeBuffer, ReceiveBuffer
from rpcdist.rpc.options import RpcOptions
from rpcdist.time_limits import CONNECTION_CLOSE_LIMIT_S
from rpcdist.transport._channels.polling_and_signals import SignalShield
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.credentials import Records
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import Session, SessionHandler
from rpcdist.transport.wire_messages import CallMessage, CompactPass, ReplyMessage, WireMessage

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=Message)


class Loopback:
    """The session of a worker with itself. Values are copied as on the way to any other worker.

    Args:
        deliver: takes the messages, on the thread that sends.
    """

    closed_reason = None
    id = b""

    def __init__(
        self, identity: Identity, deliver: Callable[[AnySession, list[tuple[WireMessage, list[ReceiveBuffer]]]], None]
    ) -> None:
        self.peer = identity
        self.account = AnnouncedBytes()
        self._deliver = deliver
        self._shield = SignalShield()

    @property
    def last_received(self) -> float:
        return time.monotonic()

    def send(self, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        copies: list[ReceiveBuffer] = [buffer.copy() for buffer in buffers]
        # Ctrl-C would become the failure of the call: what serves calls answers with all that is raised there.
        self._shield.run(lambda: self._deliver(self, [(message, copies)]))
        return 0

    def flush(self) -> None:
        """Nothing waits."""

    def hold_back(self, send: Callable[[], object]) -> None:
        send()

    def want_value(self, call: int) -> bool:
        return False

    def abort_transfer(self, number: int, reason: str) -> None:
        """Nothing is in flight: `send` copies immediately."""

    def transfer_progress(self, number: int) -> tuple[int, int] | None:
        return None

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: tuple[Callable[[], object], Callable[[], object]] | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        if first is not None:
            first()
        return False

    def lead_with(self, other: object) -> None:
        """There is nothing to read."""

    def ring(self) -> None:
        """Nobody leads: there is nothing to read."""


AnySession = Session | Loopback
"""Where messages to one worker go: its session, or that of a worker with itself."""


PoolJob = tuple[Callable[..., object], tuple[object, ...]]
"""A function and its arguments, to be called by a thread of the pool."""

Handler = Callable[[AnySession, Any, list[ReceiveBuffer], list[PoolJob]], object]
"""Takes the session, the message (of the kind that it is registered for), its large buffers, and the list to which it
adds what the pool shall do."""


class Lifetime:
    """Set once, by the agent; read by any thread.

    Attributes:
        is_closed: nothing is sent and nothing that arrives is handled any more.
        all_leave: all workers leave by agreement, so connections end, and nobody is lost by that.
    """

    __slots__ = ("all_leave", "is_closed")

    def __init__(self) -> None:
        self.is_closed = self.all_leave = False


def line_of(session: AnySession, is_nested: bool) -> Hashable:
    """The line of the pool that a call joins: another call may wait for a nested one, which passes the others."""
    return (session.account, "nested") if is_nested else session.account


class Connection(Protocol):
    """A connection that this process opened."""

    @property
    def session(self) -> Session:
        """Carries the messages in both directions."""

    async def unary(
        self, service: str, method: str, request: Message, reply_type: type[ReplyT], timeout_s: float | None
    ) -> ReplyT:
        """One call of a service method of the peer."""

    async def close(self, timeout_s: float = CONNECTION_CLOSE_LIMIT_S) -> None:
        """Ends the session and the connection; idempotent; bounded."""


class Network(Protocol):
    """This process's place on the network.

    Attributes:
        identity: the name and rank of this process; set when it joins a job.
    """

    identity: Identity

    @property
    def address(self) -> str | None:
        """Where it is served (host:port), or None."""

    @property
    def strangers(self) -> Strangers:
        """The connections that it has refused, or not finished with."""

    @property
    def io(self) -> IoLoop:
        """Where it runs."""

    @property
    def records(self) -> Records:
        """Signs and verifies the records that processes of the job exchange through a store."""

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Runs a coroutine on the I/O loop and waits for it; any other thread."""

    def serve(self, host: str, port: int) -> str:
        """Starts to serve, where it does not yet, and returns the address; blocks. Port 0 takes a free one."""

    def expect_role(self, role: str) -> None:
        """Says that `handle_role` will follow: peers that connect before are kept waiting instead of being refused."""

    def add_service(
        self, descriptor: ServiceDescriptor, methods: Mapping[str, Callable[[Identity, Any], Awaitable[Message]]]
    ) -> None:
        """Serves methods of a service; handlers run on the I/O loop."""

    def handle_role(
        self, role: str, handler: SessionHandler | None, refuse: Callable[[Identity], str | None] | None = None
    ) -> None:
        """Registers the taker of the sessions that peers open for a role, and refuses some peers; None ends that."""

    async def connect(
        self,
        address: str,
        role: str,
        timeout_s: float,
        handler: SessionHandler | None = None,
        expected: Identity | None = None,
        retry: bool = True,
    ) -> Connection:
        """Connects to another process; on the I/O loop."""

    def release(self) -> None:
        """Gives back this user's share of it; blocks, bounded."""


class SendObserver(Protocol):
    """Hears how a message went: which session took it, or that the worker was lost before one could."""

    @property
    def ended(self) -> bool:
        """Whether the message need not be sent any more."""

    @property
    def kept_until(self) -> Deadline | None:
        """How long it may wait for the process that takes the place of a lost one; None if it is for that one only."""

    def on_sent(self, session: AnySession, transfer: int) -> None:
        """It was given to this session, as this transfer (0 for none)."""

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        """The worker was declared lost before that; or else this process could not send it, for the reason given."""


class Demultiplexer:
    """Takes the messages of all sessions of this worker, whichever side opened them, and provides their memory; one per
    agent. Handlers run on the I/O loop, or on the thread that sends where a worker calls itself.

    Those of messages that are not `is_for_loop` also run on threads that wait for a reply, or for work, and read there.

    The sessions of one worker share a limit of announced bytes. A process with the token may give itself any name, so
    all processes that are not (yet) members share one limit, and inventing names gains nothing.

    Args:
        submit_many: gives jobs to the pool, and says whose line they join there; see `ThreadPool.submit_many`.
        holder_of: the name of the worker that lives at a rank, or None.
    """

    allocate = staticmethod(ReceiveBuffer.allocate)

    def __init__(
        self,
        submit_many: Callable[..., object],
        lifetime: Lifetime,
        options: RpcOptions,
        holder_of: Callable[[int], str | None],
    ) -> None:
        self._submit_many = submit_many
        self._lifetime = lifetime
        self._handlers: dict[str | type | None, Handler] = {}
        self.shares_payloads = options.share_payloads
        # A peer that may not send pickles is trusted with values only, and must not change them while they are used.
        self.borrow = ReceiveBuffer.borrowed if options.allow_pickle else CopiedBuffer
        self._limit_bytes = options.max_incoming_bytes
        self._holder_of = holder_of
        self._lock = threading.Lock()
        self._announced: dict[str | None, AnnouncedBytes] = {}  # one entry for each member that ever was

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """See `SessionHandler`; any thread."""
        name = peer.name if self._holder_of(peer.id) == peer.name else None
        with self._lock:
            return self._announced.setdefault(name, AnnouncedBytes(self._limit_bytes))

    def handle(self, kind: str | type[CallMessage | ReplyMessage | CompactPass], handler: Handler) -> None:
        """Registers the handler of a class of messages, or of a kind of protobuf message; others are dropped."""
        self._handlers[kind] = handler

    def on_messages(self, session: AnySession, messages: list[tuple[WireMessage, list[ReceiveBuffer]]]) -> None:
        """Messages arrived on a session. Their jobs go to the pool together, with one wake-up for all.

        Calls join the line of the peer, and parts of backward passes that of its nested calls. The jobs of answers are
        work of this worker.
        """
        if self._lifetime.is_closed:
            return
        calls: list[PoolJob] = []
        passes: list[PoolJob] = []
        jobs: list[PoolJob] = []
        try:
            for message, buffers in messages:
                kind = message.WhichOneof("body") if isinstance(message, rpc_pb2.Message) else type(message)
                handler = self._handlers.get(kind)
                if handler is None:
                    continue
                if kind is CallMessage:
                    handler(session, message, buffers, calls)
                elif kind is CompactPass:
                    handler(session, message, buffers, passes)
                else:
                    handler(session, message, buffers, jobs)
        finally:  # what came before a message that ends the session counts
            if calls:
                self._submit_many(calls, session.account)
            if passes:
                self._submit_many(passes, line_of(session, is_nested=True))
            if jobs:
                self._submit_many(jobs)


calling_worker: ContextVar[Identity | None] = ContextVar("rpcdist_calling_worker", default=None)
"""Set in calls of coroutine functions, of functions that every worker serves, and of `functions_that_ask`: the proven
peer of the session."""

functions_that_ask: Final[set[str]] = set()
"""The names of further functions of this package that depend on the worker that calls."""

calling_session: ContextVar[AnySession | None] = ContextVar("rpcdist_calling_session", default=None)
"""Set in functions that run on the thread that reads: where the call came, and the next one will probably come."""


def check_speaks_for(name: str) -> None:
    """Raises `CallRefused` unless the call that runs was made by the worker of this name."""
    caller = calling_worker.get()
    if caller is None or caller.name != name:
        who = "code that no worker has called" if caller is None else f"worker {caller.name!r}"
        raise CallRefused(f"{who} cannot speak for worker {abridged(name)}: each worker speaks for itself")
