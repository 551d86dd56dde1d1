"""The transport as the RPC layer sees it: protocols.

`rpcdist.transport` implements them with sockets (`Node`, `Link`, `Session`, `IoLoop`). Tests implement them in memory,
which is how several workers can live in one process without a network.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from rpcdist.deadline import Deadline
from rpcdist.errors import CallRefused
from rpcdist.ids import Identity
from rpcdist.inspection import ChannelFacts, LentMemory, Strangers
from rpcdist.rpc._executors.io_thread import IoThread
from rpcdist.rpc._values.buffers import LargeBuffer, ReceiveBuffer
from rpcdist.time_limits import CONNECTION_CLOSE_LIMIT_S
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.credentials import Records
from rpcdist.transport.wire_messages import WireMessage

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=Message)


class MessageSink(Protocol):
    """Where messages to one worker go: a session, or the loopback of calls to oneself."""

    @property
    def peer(self) -> Identity:
        """The worker that gets them."""

    @property
    def account(self) -> AnnouncedBytes:
        """Counts what the peer makes this worker set aside, by all its sessions together."""

    @property
    def id(self) -> bytes:
        """The number of the connection, the same at both ends; empty for calls to oneself."""

    @property
    def closed_reason(self) -> str | None:
        """Why nothing can be sent any more; None while the session is open."""

    @property
    def last_received(self) -> float:
        """When the peer was last heard of, in seconds of the monotonic clock."""

    def send(self, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        """Queues a message; any thread, never blocks. Returns the number of the transfer, 0 if it needs none."""

    def flush(self) -> None:
        """Has what lingers in the queue or was held back written now; any thread, never blocks."""

    def hold_back(self, send: Callable[[], object]) -> None:
        """Calls `send`; its messages stay queued until the next `flush` or `lead`; any thread."""

    def want_value(self, call: int) -> bool:
        """Has the reply to a `remote()` bring the result along, unless its message has left.

        Args:
            call: its number; it was the last message that this thread sent here.

        Returns:
            Whether it will; any thread.
        """

    def abort_transfer(self, number: int, reason: str) -> None:
        """Stops sending the buffers of a message; any thread."""

    def transfer_progress(self, number: int) -> tuple[int, int] | None:
        """The bytes of a transfer that were sent, and all; None if none are left to send, or it is not known."""

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: tuple[Callable[[], object], Callable[[], object]] | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        """Has this thread read what arrives here, while it waits.

        Args:
            is_waiting: asked after each read, and after `ring`; False ends the wait.
            timeout_s: the limit in seconds, None for none.
            sleep: called before and after each sleep.
            first: sends what will be answered here; called once in any case, before the wait.

        Returns:
            Whether the wait is over. If not, wait for the rest of the time in another way: others will read.
        """

    def ring(self) -> None:
        """Has a thread that leads ask `is_waiting` again; any thread."""


class PeerSession(MessageSink, Protocol):
    """A proven connection with another process, as the transport hands it out."""

    @property
    def last_sent(self) -> float:
        """When something was written last, a heartbeat at least, in monotonic seconds."""

    @property
    def lent_memory(self) -> LentMemory | None:
        """The shared memory that this process lends to the peer; None where nothing was ever lent."""

    def facts(self, now: float) -> ChannelFacts:
        """Its state at a moment of the monotonic clock."""

    def close(self, reason: str) -> None:
        """Ends it at once; any thread; idempotent."""

    async def drain(self, timeout_s: float) -> bool:
        """Waits until what was queued is written; False when the time is over."""

    async def ended(self, timeout_s: float) -> bool:
        """Waits until it has ended; False when the time is over."""


class SessionTaker(Protocol):
    """Takes what arrives on sessions. It must not block or run user code.

    Its methods run on the I/O loop; `on_messages` also on a thread that leads, with messages that it `takes_anywhere`.
    """

    def on_opened(self, session: PeerSession) -> None:
        """A peer opened this session; not called for those that this process opens itself."""

    def on_messages(self, session: PeerSession, messages: list[tuple[Any, list[Any]]]) -> None:
        """Messages (`WireMessage`) arrived whole, in the order in which they became complete.

        Their buffers were made by `allocate` or `borrow`.
        """

    def takes_anywhere(self, message: WireMessage) -> bool:
        """Whether `on_messages` may be called with this message on any thread."""

    def on_closed(self, session: PeerSession, reason: str) -> None:
        """The session ended; called once."""

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        """Memory for a large buffer that was announced."""

    def borrow(self, view: memoryview) -> ReceiveBuffer:
        """A large buffer whose bytes are in memory that the peer lends."""

    @property
    def shares_payloads(self) -> bool:
        """Whether large buffers may travel in shared memory."""

    def announced_by(self, peer: Identity) -> AnnouncedBytes:
        """Counts what a peer has announced, on all its sessions together, and not sent."""


class Connection(Protocol):
    """A connection that this process opened."""

    @property
    def session(self) -> PeerSession:
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
    def num_silent(self) -> int:
        """Connections to it whose process began TLS and made no call, as one with another job token does."""

    @property
    def strangers(self) -> Strangers:
        """The connections that it has refused, or not finished with."""

    @property
    def io(self) -> IoThread:
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
        self,
        descriptor: ServiceDescriptor,
        methods: Mapping[str, Callable[[Identity, Any], Awaitable[Message]]],
    ) -> None:
        """Serves methods of a service; handlers run on the I/O loop."""

    def handle_role(
        self, role: str, handler: SessionTaker | None, refuse: Callable[[Identity], str | None] | None = None
    ) -> None:
        """Registers the taker of the sessions that peers open for a role, and refuses some peers; None ends that."""

    async def connect(
        self,
        address: str,
        role: str,
        timeout_s: float,
        handler: SessionTaker | None = None,
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

    def on_sent(self, session: MessageSink, transfer: int) -> None:
        """It was given to this session, as this transfer (0 for none)."""

    def on_not_sent(self, silence_s: float, reason: str, is_lost: bool = True) -> None:
        """The worker was declared lost before that; or else this process could not send it, for the reason given."""


class Announcements:
    """One per agent; any thread may use it.

    The sessions of one worker share a limit, whichever side opened them. A process with the token may give itself any
    name, so all processes that are not (yet) members share one limit, and inventing names gains nothing.

    Args:
        limit_bytes: for each; None for the memory of this machine.
        holder_of: the name of the worker that lives at a rank, or None.
    """

    def __init__(self, limit_bytes: int | None, holder_of: Callable[[int], str | None]) -> None:
        self._limit_bytes = limit_bytes
        self._holder_of = holder_of
        self._lock = threading.Lock()
        self._by_name: dict[str | None, AnnouncedBytes] = {}  # one entry for each member that ever was

    def of(self, peer: Identity) -> AnnouncedBytes:
        name = peer.name if self._holder_of(peer.id) == peer.name else None
        with self._lock:
            return self._by_name.setdefault(name, AnnouncedBytes(self._limit_bytes))


calling_worker: ContextVar[Identity | None] = ContextVar("rpcdist_calling_worker", default=None)
"""Set in calls of coroutine functions, and of functions that every worker serves: the proven peer of the session."""

calling_session: ContextVar[MessageSink | None] = ContextVar("rpcdist_calling_session", default=None)
"""Set in functions that run on the thread that reads: where the call came, and the next one will probably come."""


def check_speaks_for(name: str) -> None:
    """Raises `CallRefused` unless the call that runs was made by the worker of this name."""
    caller = calling_worker.get()
    if caller is None or caller.name != name:
        who = "code that no worker has called" if caller is None else f"worker {caller.name!r}"
        raise CallRefused(f"{who} cannot speak for worker {name!r}: each worker speaks for itself")
