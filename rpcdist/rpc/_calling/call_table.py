"""Calls that wait for their reply.

A call ends exactly once: whoever takes it out of the table (reply, deadline, cancellation, loss of the peer, shutdown)
completes it. Taking it out is one `dict.pop`, so no lock is needed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import DeadlineExceeded, WorkerLost
from rpcdist.rpc._peers.network import MessageSink

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent
    from rpcdist.rpc._autograd_hooks import CallContext

__all__ = ["CallTable", "PendingCall", "ReplySink"]


Job = tuple[Callable[..., object], tuple[object, ...]]


class ReplySink(Protocol):
    """What is done with the outcome of a call."""

    def replied(self, reply: rpc_pb2.Reply, payload: object, jobs: list[Job]) -> None:
        """The reply came; called on the I/O loop (on any thread for calls to oneself).

        Args:
            reply: the message.
            payload: an `Arrived` value, a `Stream`, or None.
            jobs: gets what is left to do in the pool.
        """

    def failed(self, exc: BaseException) -> None:
        """The call ended otherwise; any thread."""


class PendingCall:
    """One call in flight.

    Attributes:
        id: its number on the wire.
        peer: the worker that it went to.
        what: for messages, e.g. "rpc to 'w1' of torch.add".
        deadline: when it ends at the latest.
        timeout_s: what the user asked for.
        inherited_s: what was left of the deadline, where it is that of the call that is being handled here; else None.
        reply_sink: takes the outcome.
        transfer: number of the transfer that carries its large arguments, 0 for none.
        forks: RRef shares that travel in the arguments, to be given back when the call was never delivered.
        repeatable: the message, where it may run twice: it is sent again when its connection breaks, until the worker
            is declared lost.
        autograd: the autograd context in which it was made, or None.
    """

    __slots__ = (
        "_agent",
        "autograd",
        "deadline",
        "forks",
        "id",
        "inherited_s",
        "peer",
        "repeatable",
        "reply_sink",
        "session",
        "timeout_s",
        "transfer",
        "what",
    )

    def __init__(
        self,
        agent: Agent,
        id: int,
        peer: int,
        what: Callable[[], str],
        deadline: Deadline,
        timeout_s: float,
        reply_sink: ReplySink,
    ) -> None:
        self._agent = agent
        self.id = id
        self.peer = peer
        self.what = what
        self.deadline = deadline
        self.timeout_s = timeout_s
        inherits = deadline.is_finite and deadline is current_deadline.get()
        self.inherited_s = deadline.remaining_s() if inherits else None
        self.reply_sink = reply_sink
        self.transfer = 0
        self.session: object | None = None
        self.repeatable: rpc_pb2.Message | None = None
        self.forks: Sequence[value_pb2.RRefFork] | None = None
        self.autograd: CallContext | None = None

    def __repr__(self) -> str:
        return f"<call {self.id}: {self.what()}, {self.deadline!r}>"

    @property
    def ended(self) -> bool:
        return self.id not in self._agent.caller.calls

    def on_sent(self, session: MessageSink, transfer: int) -> None:
        """The message was given to a session; if that session has ended meanwhile, so has the call."""
        self.session = session
        self.transfer = transfer
        if session.closed_reason is not None:
            self._agent.connections.on_unanswered(self, session, session.closed_reason)

    def on_not_sent(self, silence_s: float, reason: str) -> None:
        """The worker was declared lost before the message could be given to a session."""
        worker = self._agent.worker_name_of(self.peer)
        self._agent.caller.end(self, WorkerLost(worker, self.what(), silence_s, reason))

    def deadline_error(self) -> DeadlineExceeded:
        if self.inherited_s is None:
            limit = f"set timeout ({round(self.timeout_s * 1000)} ms)"
        else:
            limit = f"set timeout ({round(self.inherited_s * 1000)} ms, what was left for the call that made it)"
        return DeadlineExceeded(f"RPC ran for more than {limit} and will now be marked with an error: {self.what()}")


class CallTable:
    """The calls of an agent that are in flight. `add` and `take` may be called on any thread."""

    def __init__(self, wake_at: Callable[[float], None]) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self._earliest = float("inf")
        self._wake_at = wake_at
        self._empty = threading.Condition()
        self._waiters = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: object) -> bool:
        return id in self._calls

    def __repr__(self) -> str:
        return f"<CallTable [{len(self._calls)} in flight]>"

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, call: PendingCall) -> None:
        """Registers a call before it is sent; asks to be woken at its deadline."""
        self._calls[call.id] = call
        self.total += 1
        at = call.deadline.at
        if at < self._earliest:
            self._earliest = at
            self._wake_at(at)

    def take(self, id: int) -> PendingCall | None:
        """Removes a call; None if somebody else has ended it already."""
        call = self._calls.pop(id, None)
        if call is not None and self._waiters and not self._calls:
            with self._empty:
                self._empty.notify_all()
        return call

    def take_expired(self) -> list[PendingCall]:
        """Removes the calls whose deadline has passed, and asks to be woken at the next one."""
        now = time.monotonic()
        expired = []
        earliest = self._earliest = float("inf")
        for call in list(self._calls.values()):
            if call.deadline.at <= now:
                if self.take(call.id) is not None:
                    expired.append(call)
            elif call.deadline.at < earliest:
                earliest = call.deadline.at
        if earliest < self._earliest:
            self._earliest = earliest
        if self._earliest != float("inf"):
            self._wake_at(self._earliest)
        return expired

    def take_where(self, matches: Callable[[PendingCall], bool]) -> list[PendingCall]:
        """Removes the calls that match."""
        return [call for call in list(self._calls.values()) if matches(call) and self.take(call.id) is not None]

    def wait_empty(self, timeout_s: float | None) -> bool:
        """Waits until no call is in flight; False when the time is over."""
        with self._empty:
            self._waiters += 1
            try:
                return self._empty.wait_for(lambda: not self._calls, timeout_s)
            finally:
                self._waiters -= 1

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._calls.values()))
