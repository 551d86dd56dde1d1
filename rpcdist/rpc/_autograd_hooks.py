"""Where distributed autograd and calls meet: two small interfaces, and the context of the calls that are made now.

    CallContext      an autograd context, as one call sees it      implemented by rpcdist.autograd, used here
    AutogradHooks    distributed autograd of one agent             implemented by rpcdist.autograd, used here

`rpcdist.autograd` is a layer above this package, and registered by the root of the package (`rpcdist._upper_layers`):
a call with an autograd context may arrive at a worker whose program never names it.

A call made inside a context takes the context's id along. Tensors that require grad, in its arguments, its result and
the items of its stream, are reported to the context on both sides, in the same order: the order of the value's tensor
table. The callee's function runs inside the context, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from rpcdist._proto import autograd_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.ids import Identity
from rpcdist.inspection import ContextFacts, PassFacts
from rpcdist.rpc._peers.network import AnySession, PoolJob
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.transport.wire_messages import CompactPass, History


class CallContext(Protocol):
    """An autograd context, as one call sees it. Any thread may call any method."""

    def for_call(self, to: int) -> tuple[CallContext | None, int]:
        """The recorder of a call that is made now to a worker, which depends on grad mode, and the id to send.

        None and 0 if the context is over.
        """

    def sending(self, tensors: Sequence[torch.Tensor], to: int) -> History | None:
        """Records that a value with this tensor table was encoded; returns the history for its message."""

    def received(self, history: History | None, tensors: Sequence[torch.Tensor], sender: int) -> None:
        """Attaches the history of a message, in place, to the tensor table of its value."""


class AutogradHooks(Protocol):
    """Distributed autograd of one agent."""

    @property
    def pass_taps(self) -> list[Callable[[int, Sequence[Any], Sequence[Any]], object]]:
        """Functions that get the id, the spans and the messages of each backward pass when it has ended here."""

    def admit(self, context_id: int, sender: Identity) -> CallContext | None:
        """The context of a call that arrived; None if it is over. Any thread; it runs no code of users."""

    def on_message(
        self, sender: Identity, message: autograd_pb2.AutogradMessage, buffers: Sequence[ReceiveBuffer]
    ) -> None:
        """A message arrived. The same message may come twice, and in any order with others.

        On the I/O loop, or on a thread that reads for it; it runs no code of users. The ends of contexts come on the
        loop.
        """

    def on_pass(
        self, session: AnySession, part: CompactPass, buffers: Sequence[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        """Handles a message of a backward pass; the pool runs the functions added to `jobs`."""

    def announced_gradients(self, sender: Identity, part: CompactPass) -> value_pb2.Value | None:
        """The gradients of a message whose large buffers have not arrived, if they can be for GPUs; any thread."""

    def worker_lost(self, identity: Identity, exc: Exception) -> None:
        """Records that messages to or from a worker may be lost; on the I/O loop."""

    def worker_dead(self, identity: Identity) -> None:
        """Ends the contexts of a worker that was declared dead; on the I/O loop."""

    def backward(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> None: ...

    def counts(self) -> dict[str, str]: ...

    def facts(self, now: float, most: int) -> tuple[list[ContextFacts], list[PassFacts]]:
        """The contexts and the running passes; any thread."""

    def flush(self) -> None: ...

    def close(self) -> None:
        """Fails running passes and ends contexts, because the agent shuts down."""


current_autograd: ContextVar[CallContext | None] = ContextVar("rpcdist_autograd_context", default=None)
"""The context of the calls that this thread or task makes; None outside of contexts."""


@contextmanager
def outside_contexts() -> Iterator[None]:
    """Within this context, the calls of this thread or task are no part of the autograd context that it is in."""
    token = current_autograd.set(None)
    try:
        yield
    finally:
        current_autograd.reset(token)
