"""Messages as the layers above exchange them with a session: protobuf's, and the frequent ones in a compact form.

Protobuf can say everything, but it costs a call more than its network: objects, a serialization and a parse, on each
side. So the calls and replies that are common, those whose values are plain, have a form of their own, which one
`struct` packs and unpacks (`rpcdist/transport/_framing/frames.py`). Whoever takes messages takes both forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rpcdist._proto import rpc_pb2

MAX_COMPACT_BODY_BYTES: Final = 1 << 18
"""A value whose bytes (large buffers aside) are more travels in a protobuf message, which may be cut into chunks."""

MAX_NAME_BYTES: Final = 1000
"""A call of a function with a longer name travels in a protobuf message: of this form, receivers keep the names."""

NamedReference = tuple[int, int, int, int, int, int]
"""A remote reference and the share of it that is used: of each, worker, number and incarnation of its `UniqueId`."""


class History(NamedTuple):
    """Of a value with tensors that require grad, in an autograd context: gradients flow back under this number.

    Attributes:
        message: number of the value in the graph of the context; its high 16 bits are the sender.
        stamp: Lamport time of the context at the sender.
    """

    message: int
    stamp: int


class Loan(NamedTuple):
    """See `rpc.proto`: a large buffer that lies in memory which the sender lends."""

    buffer: int
    segment: int


class CompactCall:
    """A call whose arguments are plain values without references.

    Attributes:
        id: the caller's number of it.
        function: "module:qualified.name"; empty where the value of `target` is wanted.
        timeout_us: what was left of the deadline when this was sent; 0: none.
        body: the arguments, see `rpcdist/rpc/_values/compact.py`; empty for a call without any.
        num_tensors: how many tensors are in `body`.
        result: of `remote()`: the ids under which the callee keeps the result.
        wants_value: of `remote()`: the result is wanted here, too, with the reply.
        target: the reference whose value comes first among the arguments, or is wanted itself.
        context: the autograd context in which the function runs; 0 for none.
        history: of the arguments.
        is_nested: a handler made the call: another call may wait for it.
        transfer, large, loans: of its large buffers, as in a protobuf `Message`; the session fills them in.
    """

    __slots__ = (
        "body",
        "context",
        "function",
        "history",
        "id",
        "is_nested",
        "large",
        "loans",
        "num_tensors",
        "result",
        "target",
        "timeout_us",
        "transfer",
        "wants_value",
    )

    wrapped: Final = False

    def __init__(
        self,
        id: int,
        function: str,
        timeout_us: int = 0,
        body: bytes = b"",
        num_tensors: int = 0,
        result: NamedReference | None = None,
        target: NamedReference | None = None,
    ) -> None:
        self.id = id
        self.function = function
        self.timeout_us = timeout_us
        self.body = body
        self.num_tensors = num_tensors
        self.result = result
        self.target = target
        self.wants_value = False
        self.is_nested = False
        self.context = 0
        self.history: History | None = None
        self.transfer = 0
        self.large: Sequence[int] = ()
        self.loans: Sequence[Loan] = ()

    def __repr__(self) -> str:
        return f"<CompactCall {self.id} of {self.function!r}, {len(self.body)} B, {self.num_tensors} tensors>"


class CompactReply:
    """The reply to a call that returned None, or a plain value without references.

    Attributes:
        id: of the call.
        body: the result, like `CompactCall.body`; empty for None.
        num_tensors: how many tensors are in `body`.
        created: the answer to `remote()`: the callee holds the result.
        has_value: `body` is the result of that `remote()`, as its caller wished.
        history: of the result.
        transfer, large, loans: as in `CompactCall`.
    """

    __slots__ = ("body", "created", "has_value", "history", "id", "large", "loans", "num_tensors", "transfer")

    wrapped: Final = False

    def __init__(self, id: int, body: bytes = b"", num_tensors: int = 0, created: bool = False) -> None:
        self.id = id
        self.body = body
        self.num_tensors = num_tensors
        self.created = created
        self.has_value = False
        self.history: History | None = None
        self.transfer = 0
        self.large: Sequence[int] = ()
        self.loans: Sequence[Loan] = ()

    def __repr__(self) -> str:
        return f"<CompactReply {self.id}, {len(self.body)} B, {self.num_tensors} tensors>"


class CompactPass:
    """What a worker tells a neighbour in a backward pass of distributed autograd.

    Attributes:
        context: the autograd context.
        backward: the pass.
        body: the rest, see `autograd/_pass_message.py`. If it is empty, the first large buffer is the body.
        transfer, large, loans: as in `CompactCall`.
    """

    __slots__ = ("backward", "body", "context", "large", "loans", "transfer")

    wrapped: Final = False

    def __init__(self, context: int, backward: int, body: bytes) -> None:
        self.context = context
        self.backward = backward
        self.body = body
        self.transfer = 0
        self.large: Sequence[int] = ()
        self.loans: Sequence[Loan] = ()

    def __repr__(self) -> str:
        return f"<CompactPass {self.backward:#x} in context {self.context}, {len(self.body)} B>"


WireMessage = rpc_pb2.Message | CompactCall | CompactReply | CompactPass


def can_linger(message: WireMessage) -> bool:
    """Whether nobody waits for this message alone: that of a `remote()`, whose caller will ask for the value."""
    if message.__class__ is CompactCall:
        return message.result is not None
    return isinstance(message, rpc_pb2.Message) and message.HasField("call") and message.call.HasField("result")


def is_urgent(message: WireMessage) -> bool:
    """Whether the message is worth a write of its own, which lets the peer begin at once."""
    if not isinstance(message, rpc_pb2.Message):
        return True
    if message.HasField("autograd"):
        return not message.control_seq
    return message.HasField("call") or message.HasField("reply")
