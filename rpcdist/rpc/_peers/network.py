"""The transport as the RPC layer sees it: sessions, the protocols of the objects that open them, and message handlers.

`rpcdist.transport` implements the protocols with sockets (`Node`, `Link`). Tests implement them in memory, so that
several workers can live in one process without a network; sessions and the I/O loop are the same there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused, abridged
from rpcdist.ids import Identity
from rpcdist.inspection import Strangers
from rpcdist.rpc._values.buffers import ReceiveBuffer, copy_of
from rpcdist.rpc.options import RpcOptions
from rpcdist.time_limits import CONNECTION_CLOSE_LIMIT_S
from rpcdist.transport._channels.polling_and_signals import SignalShield
from rpcdist.transport._channels.socket_reader import Send, Sleep, Waits
from rpcdist.transport._framing.incoming import StagedBuffer
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import Session, SessionHandler
from rpcdist.transport.wire_messages import CallMessage, CompactPass, ReplyMessage, WireMessage

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=Message)


class Loopback:
    """The session of a worker with itself. Values are copied, as on the way to other workers."""

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
        copies: list[ReceiveBuffer] = [copy_of(buffer) for buffer in buffers]
        # Ctrl-C would become the failure of the call: the callee's side answers with any exception that is raised
        # there.
        self._shield.run(lambda: self._deliver(self, [(message, copies)]))
        return 0

    def flush(self) -> None:
        """Does nothing, since no message waits."""

    def hold_back(self, send: Callable[[], object]) -> None:
        send()

    def want_value(self, call: int) -> bool:
        return False

    def abort_transfer(self, number: int, reason: str) -> None:
        """Does nothing, since `send` copies immediately."""

    def transfer_progress(self, number: int) -> tuple[int, int] | None:
        return None

    def read_while_waiting(
        self, is_waiting: Waits, timeout_s: float | None, sleep: Sleep | None = None, send_first: Send = None
    ) -> bool:
        if send_first is not None:
            send_first()
        return False

    def read_along_with(self, other: object) -> None:
        """Does nothing, since there is nothing to read."""

    def interrupt(self) -> None:
        """Does nothing, since no thread reads."""


AnySession = Session | Loopback
"""The session for messages to one worker, or the loopback."""


PoolJob = tuple[Callable[..., object], tuple[object, ...]]
"""A function and its arguments, which a pool thread will call."""

Handler = Callable[..., object]
"""Called with the session, the message (of the kind for which it is registered) and its large buffers; the handler of a
class of messages also with a list of `PoolJob`, to which it adds work for the pool."""


@dataclass(slots=True, eq=False)
class Lifetime:
    """The state of an agent's life; set once, by the agent; read by any thread.

    Attributes:
        is_closed: whether messages are neither sent nor handled any more.
        all_leave: whether all workers leave by agreement, so that the end of connections does not mean a loss.
    """

    is_closed: bool = False
    all_leave: bool = False

    @property
    def is_ending(self) -> bool:
        """Whether the end of a connection is no news about the other worker."""
        return self.is_closed or self.all_leave


def line_of(session: AnySession, is_nested: bool) -> Hashable:
    """The line of the pool that a call joins. Nested calls have their own line, since other calls wait for them."""
    return (session.account, "nested") if is_nested else session.account


class Connection(Protocol):
    """A connection that this process opened."""

    @property
    def session(self) -> Session:
        """Carries the messages in both directions."""

    async def unary(
        self, service: str, method: str, request: Message, reply_type: type[ReplyT], timeout_s: float | None
    ) -> ReplyT:
        """Calls a service method of the peer."""

    async def close(self, timeout_s: float = CONNECTION_CLOSE_LIMIT_S) -> None:
        """Ends the session and the connection; idempotent; bounded."""


class Network(Protocol):
    """This process's place on the network."""

    identity: Identity

    @property
    def address(self) -> str | None:
        """The address at which it serves (host:port), or None."""

    @property
    def strangers(self) -> Strangers:
        """The connections that it has refused, or has not finished with."""

    @property
    def io(self) -> IoLoop:
        """The I/O loop on which it runs."""

    @property
    def credentials(self) -> Credentials:
        """Sign and verify the records that processes of the job exchange through a store."""

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None, may_give_up: bool = False) -> T:
        """Runs a coroutine on the I/O loop and waits for it; on any other thread. See `IoLoop.run`."""

    def serve(self, host: str, port: int) -> str:
        """Starts to serve, unless it does already; returns the address; blocks. Port 0 chooses a free one."""

    def expect_role(self, role: str) -> None:
        """Announces a later `handle_role`: until then, peers that connect wait and are not refused."""

    def add_service(
        self, descriptor: ServiceDescriptor, methods: Mapping[str, Callable[[Identity, Any], Awaitable[Message]]]
    ) -> None:
        """Serves methods of a service; handlers run on the I/O loop."""

    def handle_role(
        self, role: str, handler: SessionHandler | None, refuse: Callable[[Identity], str | None] | None = None
    ) -> None:
        """Sets the handler of the sessions that peers open for a role, and refuses some peers; None removes it."""

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
        """Returns this user's share of it; blocks, bounded."""


class SendObserver(Protocol):
    """Notified of how a message was sent: on which session, or that the worker was lost before it could be sent."""

    @property
    def ended(self) -> bool:
        """Whether the message need not be sent any more."""

    @property
    def retry_until(self) -> Deadline | None:
        """How long it may wait for the successor of a lost process; None if it is for the lost one only."""

    def on_sent(self, session: AnySession, transfer: int) -> None:
        """Called when it was passed to this session, as this transfer (0 for none)."""

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        """Called if the worker was lost before that; or, without `is_lost`, if this process could not send it."""


@dataclass(eq=False, repr=False)
class Demultiplexer:
    """Handles the messages of all sessions of this worker, in both directions, and provides their memory; one per
    agent. Handlers run on the I/O loop, or on the sending thread if a worker calls itself.

    Handlers of messages that are not `is_for_loop` also run on threads that wait for a reply, or for work, and read.

    The sessions of one worker share a limit of announced bytes. A process with the token may give itself any name, so
    all processes that are not (yet) members share one limit, and inventing names gains nothing.

    Args:
        submit_many: submits jobs to the pool, in a given line; see `ThreadPool.submit_many`.
        holder_of: the name of the worker that lives at a rank, or None.
        stage: see `SessionHandler`.
    """

    allocate = staticmethod(ReceiveBuffer.allocate)

    _submit_many: Callable[..., object]
    _lifetime: Lifetime
    options: InitVar[RpcOptions]
    _holder_of: Callable[[int], str | None]
    stage: Callable[[AnySession, WireMessage], Mapping[int, StagedBuffer]] = lambda session, message: {}
    _handlers: dict[str | type | None, Handler] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # One entry for each worker that was ever a member.
    _announced: dict[str | None, AnnouncedBytes] = field(default_factory=dict)

    def __post_init__(self, options: RpcOptions) -> None:
        self.shares_payloads = options.share_payloads
        # A peer that may not send pickles is trusted with values only, and must not change them during their use.
        self.borrow = ReceiveBuffer.borrowed if options.allow_pickle else ReceiveBuffer.copied
        self._limit_bytes = options.max_incoming_bytes

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """See `SessionHandler`; any thread."""
        name = peer.name if self._holder_of(peer.id) == peer.name else None
        with self._lock:
            return self._announced.setdefault(name, AnnouncedBytes(self._limit_bytes))

    def handle(self, kind: str | type[CallMessage | ReplyMessage | CompactPass], handler: Handler) -> None:
        """Registers the handler of a class of messages, or of a kind of protobuf message; others are dropped."""
        self._handlers[kind] = handler

    def on_messages(self, session: AnySession, messages: list[tuple[WireMessage, list[ReceiveBuffer]]]) -> None:
        """Handles messages of a session. Their jobs go to the pool together, with one wake-up for all.

        Calls join the line of the peer, and parts of backward passes the line of its nested calls. The jobs of replies
        are this worker's own work.
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
                elif kind is ReplyMessage:
                    handler(session, message, buffers, jobs)
                elif kind is CompactPass:
                    handler(session, message, buffers, passes)
                else:
                    handler(session, message, buffers)
        finally:  # messages before one that ends the session count
            if calls:
                self._submit_many(calls, session.account)
            if passes:
                self._submit_many(passes, line_of(session, is_nested=True))
            if jobs:
                self._submit_many(jobs)


calling_worker: ContextVar[Identity | None] = ContextVar("rpcdist_calling_worker", default=None)
"""The authenticated caller, set in coroutine functions, functions served by every worker, and `functions_that_ask`."""

functions_that_ask: Final[set[str]] = set()
"""Names of further functions of this package that need `calling_worker`."""


def check_speaks_for(name: str) -> None:
    """Raises `CallRefused` unless the worker of this name made the call that runs."""
    caller = calling_worker.get()
    if caller is None or caller.name != name:
        who = "code that no worker has called" if caller is None else f"worker {caller.name!r}"
        raise CallRefused(f"{who} cannot speak for worker {abridged(name)}: each worker speaks for itself")
