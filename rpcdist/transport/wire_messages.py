"""The messages that a session carries for the layers above: calls, replies, parts of backward passes, and the others.

Protobuf can express every message, but its objects, its serialization and its parsing take longer than the network. So
calls and replies are plain objects here. `rpcdist/transport/_framing/frames.py` gives them their bytes: one `struct` if
their values have the compact form, and a protobuf message otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, NamedTuple

from rpcdist._proto import rpc_pb2, value_pb2

MAX_COMPACT_BODY_BYTES: Final = 1 << 18
"""A value with more bytes (apart from large buffers) travels in a protobuf message, which can be cut into chunks."""

MAX_NAME_BYTES: Final = 1000
"""A call of a function with a longer name travels in a protobuf message; receivers keep the names of compact frames."""

UNCOUNTED_BYTES: Final = 4096
"""A message with a body of up to this size is not counted if few frames are queued, which saves it four locks."""

NamedReference = tuple[int, int, int, int, int, int]
"""A remote reference and the used share of it: worker, number and incarnation of each `UniqueId`."""


class History(NamedTuple):
    """The autograd record of a value with tensors that require grad: gradients flow back under this number.

    Attributes:
        message: number of the value in the graph of the context; its high 16 bits are the sender.
        stamp: Lamport time of the context at the sender.
    """

    message: int
    stamp: int


# The constructor of a named tuple is a Python function.
new_history: Callable[[tuple[int, int]], History] = partial(tuple.__new__, History)


class Loan(NamedTuple):
    """See `rpc.proto`: a large buffer in memory that the sender lends."""

    buffer: int
    segment: int


@dataclass(slots=True, eq=False, repr=False)
class CallMessage:
    """A call of a function, or the request of the value of a reference.

    Attributes:
        id: the caller's number for the call.
        function: "module:qualified.name"; empty for a function by value, and for a request of the value of `target`.
        timeout_us: the time left until the deadline at the send; 0 for no deadline.
        body: the arguments, see `rpcdist/rpc/_values/compact.py`; empty for a call without arguments.
        num_tensors: the number of tensors in `body`.
        result: for `remote()`, the ids under which the callee keeps the result.
        target: the reference whose value is the first argument, or is requested itself.
        wants_value: for `remote()`, whether the reply should also have the result.
        is_nested: a handler made the call: another call may wait for it.
        context: the autograd context in which the function runs; 0 for none.
        history: the autograd record of the arguments in `body`.
        transfer, large, loans: its large buffers, as in a protobuf `Message`; the session fills them in.
        value: the arguments, if the compact form cannot express them; `body` is empty then.
        is_by_value: whether the function is the last one of the arguments.
        is_serial: for `remote()`, whether the result is an actor.
        counts_as_idle: whether it waits for other workers: a callee that shuts down does not wait for it.
        traceparent: the W3C header of the caller's span; empty for none.
        device_map: replaces the caller's device map for this worker, for the arguments and the answer.
        num_arrived_bytes: size of the protobuf message that contained the call, which stays in memory as long as
            `value`.
    """

    wrapped: ClassVar[bool] = False
    is_stream: ClassVar[bool] = False

    id: int
    function: str
    timeout_us: int = 0
    body: bytes = b""
    num_tensors: int = 0
    result: NamedReference | None = None
    target: NamedReference | None = None
    wants_value: bool = False
    is_nested: bool = False
    context: int = 0
    history: History | None = None
    transfer: int = 0
    large: Sequence[int] = ()
    loans: Sequence[Loan] = ()
    value: value_pb2.Value | None = None
    is_by_value: bool = False
    is_serial: bool = False
    counts_as_idle: bool = False
    traceparent: str = ""
    device_map: rpc_pb2.DeviceMap | None = None
    num_arrived_bytes: int = 0

    def __repr__(self) -> str:
        return f"<CallMessage {self.id} of {self.function!r}, {self.size_bytes} B>"

    @property
    def is_compact(self) -> bool:
        """Whether it has no part that only a protobuf message can carry."""
        return self.value is None and not (
            self.is_by_value
            or self.is_serial
            or self.counts_as_idle
            or self.traceparent
            or self.device_map is not None
            or len(self.function) * 4 > MAX_NAME_BYTES
        )

    @property
    def size_bytes(self) -> int:
        """The size of its arguments, or of the protobuf message that contained them, without large buffers."""
        return self.num_arrived_bytes or (len(self.body) if self.value is None else self.value.ByteSize())


@dataclass(slots=True, eq=False, repr=False)
class ReplyMessage:
    """The reply to a call.

    Attributes:
        body: the result, like `CallMessage.body`; empty for None.
        num_tensors: the number of tensors in `body`.
        created: whether it answers a `remote()` whose result the callee keeps.
        has_value: whether it includes the result of that `remote()`, as its caller asked.
        history: the autograd record of the result in `body`.
        transfer, large, loans: as in `CallMessage`.
        value: the result, if the compact form cannot express it.
        failure: the reason why there is no result.
        is_stream: whether the result is a stream, whose items follow.
    """

    wrapped: ClassVar[bool] = False

    id: int
    body: bytes = b""
    num_tensors: int = 0
    created: bool = False
    has_value: bool = False
    history: History | None = None
    transfer: int = 0
    large: Sequence[int] = ()
    loans: Sequence[Loan] = ()
    value: value_pb2.Value | None = None
    failure: rpc_pb2.Failure | None = None
    is_stream: bool = False

    def __repr__(self) -> str:
        return f"<ReplyMessage {self.id}, {self.size_bytes} B>"

    @property
    def is_compact(self) -> bool:
        """Whether it has no part that only a protobuf message can carry."""
        return self.value is None and self.failure is None and not self.is_stream

    @property
    def is_small(self) -> bool:
        """Whether it is compact and has a small body; see `UNCOUNTED_BYTES`."""
        return len(self.body) <= UNCOUNTED_BYTES and self.is_compact

    @property
    def size_bytes(self) -> int:
        """The size of the result, without large buffers."""
        return len(self.body) if self.value is None else self.value.ByteSize()


@dataclass(slots=True, eq=False, repr=False)
class CompactPass:
    """A message between two neighbours in a backward pass of distributed autograd.

    Attributes:
        body: the content, see `autograd/_pass_message.py`. If it is empty, the first large buffer is the body.
        transfer, large, loans: as in `CallMessage`.
    """

    wrapped: ClassVar[bool] = False
    is_stream: ClassVar[bool] = False

    context: int
    backward: int
    body: bytes
    transfer: int = 0
    large: Sequence[int] = ()
    loans: Sequence[Loan] = ()


WireMessage = rpc_pb2.Message | CallMessage | ReplyMessage | CompactPass
"""Calls and replies are never a `rpc_pb2.Message`, except in frames."""


def set_large(message: WireMessage, sizes: Sequence[int], loans: Sequence[Loan] = ()) -> None:
    """Announces large buffers in a message: their sizes, and which of them are lent."""
    if isinstance(message, rpc_pb2.Message):
        message.large.extend(sizes)
        message.loans.extend(rpc_pb2.Loan(buffer=loan.buffer, segment=loan.segment) for loan in loans)
    else:
        message.large, message.loans = sizes, loans


def stream_of(message: WireMessage) -> int:
    """The number of the stream whose item or end this message is; 0 for none."""
    if not isinstance(message, rpc_pb2.Message):
        return 0
    if message.HasField("stream_item"):
        return message.stream_item.id
    return message.stream_end.id
