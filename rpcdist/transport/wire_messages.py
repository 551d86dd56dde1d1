"""The messages that a session carries for the layers above: protobuf messages, and compact forms of the frequent ones.

Protobuf can express every message, but its objects, its serialization and its parsing take longer than the network. So
common calls and replies, those with plain values, have a compact form, which one `struct` packs and unpacks
(`rpcdist/transport/_framing/frames.py`). Every receiver takes both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, NamedTuple

from rpcdist._proto import rpc_pb2

MAX_COMPACT_BODY_BYTES: Final = 1 << 18
"""A value with more bytes (apart from large buffers) travels in a protobuf message, which can be cut into chunks."""

MAX_NAME_BYTES: Final = 1000
"""A call of a function with a longer name travels in a protobuf message: receivers keep the names of compact calls."""

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
class CompactCall:
    """A call whose arguments are plain values without references.

    Attributes:
        id: the caller's number for the call.
        function: "module:qualified.name"; empty for a request of the value of `target`.
        timeout_us: the time left until the deadline at the send; 0 for no deadline.
        body: the arguments, see `rpcdist/rpc/_values/compact.py`; empty for a call without arguments.
        num_tensors: the number of tensors in `body`.
        result: for `remote()`, the ids under which the callee keeps the result.
        wants_value: for `remote()`, whether the reply should also have the result.
        target: the reference whose value is the first argument, or is requested itself.
        context: the autograd context in which the function runs; 0 for none.
        history: the autograd record of the arguments.
        is_nested: a handler made the call: another call may wait for it.
        transfer, large, loans: its large buffers, as in a protobuf `Message`; the session fills them in.
    """

    wrapped: ClassVar[bool] = False

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

    def __repr__(self) -> str:
        return f"<CompactCall {self.id} of {self.function!r}, {len(self.body)} B, {self.num_tensors} tensors>"


@dataclass(slots=True, eq=False, repr=False)
class CompactReply:
    """The reply to a call that returned None, or a plain value without references.

    Attributes:
        id: the id of the call.
        body: the result, like `CompactCall.body`; empty for None.
        num_tensors: the number of tensors in `body`.
        created: whether it answers a `remote()` whose result the callee keeps.
        has_value: whether `body` is the result of that `remote()`, as its caller asked.
        history: the autograd record of the result.
        transfer, large, loans: as in `CompactCall`.
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

    def __repr__(self) -> str:
        return f"<CompactReply {self.id}, {len(self.body)} B, {self.num_tensors} tensors>"


@dataclass(slots=True, eq=False, repr=False)
class CompactPass:
    """A message between two neighbours in a backward pass of distributed autograd.

    Attributes:
        context: the autograd context.
        backward: the id of the pass.
        body: the content, see `autograd/_pass_message.py`. If it is empty, the first large buffer is the body.
        transfer, large, loans: as in `CompactCall`.
    """

    wrapped: ClassVar[bool] = False

    context: int
    backward: int
    body: bytes
    transfer: int = 0
    large: Sequence[int] = ()
    loans: Sequence[Loan] = ()

    def __repr__(self) -> str:
        return f"<CompactPass {self.backward:#x} in context {self.context}, {len(self.body)} B>"


WireMessage = rpc_pb2.Message | CompactCall | CompactReply | CompactPass


def can_linger(message: WireMessage) -> bool:
    """Whether this message may wait for the next one: that of a `remote()`, whose caller will ask for the value."""
    if message.__class__ is CompactCall:
        return message.result is not None
    return isinstance(message, rpc_pb2.Message) and message.HasField("call") and message.call.HasField("result")


def is_urgent(message: WireMessage) -> bool:
    """Whether the message deserves its own write, so that the peer can begin at once."""
    if not isinstance(message, rpc_pb2.Message):
        return True
    if message.HasField("autograd"):
        return not message.control_seq
    return message.HasField("call") or message.HasField("reply")
