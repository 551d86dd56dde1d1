"""One call of an actor, from its arrival to its result."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Protocol

from rpcdist.deadline import Deadline, current_deadline
from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._rref.identifiers import Incarnation, RRefId
from rpcdist.rpc.future import Future

ActorCaller = tuple[Incarnation, RRefId]
"""A process, and the reference through which it calls: the calls of each have an order."""


class TurnHost(Protocol):
    """The actor, as its calls see it."""

    def enter(self, turn: Turn) -> None:
        """Runs the call when its turn has come: perhaps now, on this thread."""

    def on_cancelled(self, turn: Turn) -> None:
        """The call was cancelled; any thread, must not block."""


class Turn(Future[Any]):
    """The future of the call's result. Whoever makes it calls `enter` when it can take the result.

    Args:
        host: the actor.
        target: its value.
        who: the caller, and the reference that it called.
        number: which of its calls through that one; None where the caller did not know that it calls an actor.
        method: of the value.
        args, kwargs: for it.

    Attributes:
        began: when its turn came, in seconds of the monotonic clock; 0 before.
        thread: that completes it, and has nothing else to do for the call; 0 while nobody knows.
    """

    __slots__ = (
        "args",
        "began",
        "context",
        "coroutine",
        "deadline",
        "host",
        "kwargs",
        "method",
        "number",
        "target",
        "thread",
        "who",
    )

    def __init__(
        self,
        host: TurnHost,
        target: object,
        who: ActorCaller,
        number: CallNumber | None,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(on_cancel=self._on_cancelled)
        self.is_quiet = True  # the error goes to the caller
        self.host = host
        self.target = target
        self.who = who
        self.number = number
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.deadline: Deadline = current_deadline.get()
        self.context: Context = copy_context()  # with deadline and autograd context of the call
        self.began = 0.0
        self.thread = 0
        self.coroutine: Callable[[], object] | None = None  # cancels it, while it runs

    def __repr__(self) -> str:
        number = "without a number" if self.number is None else self.number.number
        return f"<Turn {number} of {self.who!r}: {self.method}>"

    def enter(self) -> None:
        """Waits for its turn, without a thread."""
        self.host.enter(self)

    def forget_arguments(self) -> None:
        self.target, self.args, self.kwargs = None, (), {}

    def _on_cancelled(self) -> None:
        self.host.on_cancelled(self)
