"""A call that this worker is handling."""

from __future__ import annotations

from typing import Any

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._executors.user_call import UserCall
from rpcdist.rpc._marshal.arrived_value import ArrivedValue
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._rref.handles import OwnerValue
from rpcdist.rpc._serving.producers import Producer
from rpcdist.rpc.future import Future

__all__ = ["ActiveCall"]


class ActiveCall:
    """One call, from its arrival to its reply.

    Attributes:
        session: where it came from, and where the reply goes.
        call: the message.
        arguments: not decoded yet; None if the function takes none.
        deadline: its caller's.
        cancelled: its caller does not want the result any more.
        handle: of the user loop, while a coroutine runs.
        producer: of the stream that is its result.
        entry: for `remote()`: where the result is kept.
        autograd: the caller's context, in which the function runs.
        target: of a method: the value that it is called on, which may not be there yet.
        is_chained: the function has returned a future, and that is waited for.
    """

    __slots__ = (
        "arguments",
        "autograd",
        "call",
        "cancelled",
        "deadline",
        "entry",
        "handle",
        "is_chained",
        "producer",
        "session",
        "target",
    )

    def __init__(
        self, session: MessageSink, call: rpc_pb2.Call, arguments: ArrivedValue | None, deadline: Deadline
    ) -> None:
        self.session = session
        self.call = call
        self.arguments = arguments
        self.deadline = deadline
        self.cancelled = False
        self.handle: UserCall | None = None
        self.producer: Producer | None = None
        self.entry: OwnerValue | None = None
        self.autograd: CallContext | None = None
        self.target: Future[Any] | None = None
        self.is_chained = False

    def __repr__(self) -> str:
        return f"<call {self.call.id} from {self.session.peer.name}: {self.what}, {self.deadline!r}>"

    @property
    def is_abandoned(self) -> bool:
        """Nothing runs, and nobody waits: its caller gave up, and the future may never be completed."""
        return self.is_chained and (self.cancelled or self.deadline.expired())

    @property
    def counts_as_work(self) -> bool:
        """Whether a shutdown of this worker waits for it."""
        return not self.call.counts_as_idle and not self.is_abandoned

    @property
    def what(self) -> str:
        return self.call.function or self.call.WhichOneof("target") or "?"

    def cancel(self) -> None:
        """Stops what runs; any thread."""
        self.cancelled = True
        if self.producer is not None:
            self.producer.cancel()
        if self.handle is not None:
            self.handle.cancel()
