"""Where distributed autograd takes hold of calls.

`rpcdist.autograd` is a layer above this package, so it registers itself here when it is imported. Every agent imports
it when it starts: a call with an autograd context may arrive at a worker whose program never names it.

A call made inside a context takes the context's id along. Tensors that require grad, in its arguments, its result and
the items of its stream, are reported to the context on both sides, in the same order: the order of the value's tensor
table. The callee's function runs inside the context, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch

from rpcdist._proto import autograd_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.ids import Identity
from rpcdist.rpc._values import ReceiveBuffer

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["AutogradHooks", "CallContext", "current_autograd", "install", "make_hooks"]


class CallContext(Protocol):
    """An autograd context, as one call sees it. Any thread may call any method."""

    def for_call(self) -> CallContext:
        """What a call that is made now records to: depends on whether grad mode is on here."""
        ...

    def joined_by(self, worker_id: int) -> int:
        """Notes that a worker will hear of the context; returns the id to send, 0 if the context is over."""
        ...

    def sending(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], to: int) -> None:
        """A value was encoded; `tensors` is its tensor table. Writes `value.autograd` if gradients are to flow back."""
        ...

    def received(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], sender: int) -> None:
        """A value is being decoded; `tensors` is its tensor table, to which history is attached in place."""
        ...


class AutogradHooks(Protocol):
    """Distributed autograd of one agent."""

    def admit(self, context_id: int, sender: Identity) -> CallContext | None:
        """The context of a call that arrived; None if it is over. On the I/O loop."""
        ...

    def on_message(
        self, sender: Identity, message: autograd_pb2.AutogradMessage, buffers: Sequence[ReceiveBuffer]
    ) -> None:
        """A message arrived; on the I/O loop."""
        ...

    def worker_lost(self, identity: Identity, exc: Exception) -> None:
        """Messages to or from a worker may be lost; on the I/O loop."""
        ...

    def worker_dead(self, identity: Identity) -> None:
        """A worker is declared dead: its contexts are over. On the I/O loop."""
        ...

    def backward(
        self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, mode: str, deadline: Deadline
    ) -> None:
        """Runs a backward pass that begins here; blocks."""
        ...

    def counts(self) -> dict[str, str]:
        """For the debug information."""
        ...

    def close(self) -> None:
        """The agent shuts down: passes under way fail, contexts end."""
        ...


current_autograd: ContextVar[CallContext | None] = ContextVar("rpcdist_autograd_context", default=None)
"""The context of the calls that this thread or task makes; None outside of contexts."""

_factory: Callable[[Agent], AutogradHooks] | None = None


def install(factory: Callable[[Agent], AutogradHooks]) -> None:
    """Says what makes the hooks of an agent."""
    global _factory
    _factory = factory


def make_hooks(agent: Agent) -> AutogradHooks:
    """The hooks of an agent that starts."""
    importlib.import_module("rpcdist.autograd")  # a layer above: it calls `install`
    assert _factory is not None
    return _factory(agent)
