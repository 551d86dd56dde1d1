"""The step of an optimizer after a backward pass, at the owners of parameters, as a message of its own.

The worker that called asks each owner with one message, does its own share, and reads the outcomes. At an owner the
thread that read the message does the work, and answers. `rpcdist.optim` knows what the bytes mean.

Where only two workers take part in a pass, the other one need not be asked: the first message of the pass brings the
work, and the owner does it as soon as its part of the pass is done. The caller's part may be left then, so the caller
hands over only if none of the user's functions, which may raise, is known to run in that part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from rpcdist.autograd._pass_message import PassMessage
from rpcdist.autograd._pass_sender import PassOwner
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.rpc._executors.blocking import LastAct, hooks
from rpcdist.rpc._peers.network import MessageSink

Outcome = bytes | Exception
"""The answer of an owner, or the reason why there is none."""

workers: Final[list[Callable[[int, bytes], bytes]]] = []
"""The function that does the work at an owner. It gets the context and bytes, and never raises; see `rpcdist.optim`."""


class StepPart:
    """The part of the worker that asks; only on the thread that handles the events of the pass.

    Args:
        work: by owner of parameters, what it shall do.
        own: the share of this process.

    Attributes:
        outcomes: by owner.
        handed: the owner that got its work with the pass, if any.
        is_stepping: whether that owner has said that it does the work.
    """

    __slots__ = ("_is_begun", "_own", "_owner", "_work", "handed", "is_stepping", "outcomes")

    def __init__(self, owner: PassOwner, work: Mapping[int, bytes], own: Callable[[], object]) -> None:
        self._owner = owner
        self._work = work
        self._own = own
        self.outcomes: dict[int, Outcome] = {}
        self.handed: int | None = None
        self.is_stepping = False
        self._is_begun = False

    def hand_over(self, to: int) -> bytes | None:
        """The work of a neighbour as soon as its part is done, if no third worker takes part; None for none."""
        work = self._work.get(to)
        if work is not None:
            self.handed = to
        return work

    def start(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        """Asks the owners, and does the share of this process meanwhile."""
        owner = self._owner
        self._is_begun = True
        timeout_us = owner.timeout_us()
        for to, work in self._work.items():
            if to != self.handed or not self.is_stepping:
                message = owner.message_to(to)
                message.work, message.timeout_us = work, timeout_us
        owner.flush()
        self._own()
        self._end_if_done()

    @property
    def owners(self) -> Collection[int]:
        """The workers that are asked."""
        return self._work

    def take(self, sender: int, message: PassMessage) -> None:
        """Handles an owner's message, also while the pass runs."""
        if message.follows and sender == self.handed:
            self.is_stepping = True
        if message.outcome is not None:
            self.outcomes.setdefault(sender, message.outcome)
            self._end_if_done()

    def lost(self, worker_id: int, error: Exception) -> None:
        """An owner will not answer; the others still may."""
        self.outcomes.setdefault(worker_id, error)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_begun and all([to in self.outcomes for to in self._work]):
            self._owner.is_finishing = True

    def waits_for(self) -> dict[int, str]:
        """The owners that have not answered."""
        return {to: "has not said that its step is done" for to in self._work if to not in self.outcomes}


def do_work(
    work: bytes, deadline: Deadline, context_id: int, backward: int, via: MessageSink, num_counted: int = 0
) -> None:
    """Does what a worker asks for, and answers; on a thread of the pool.

    Args:
        work, deadline: see `workers`; and its limit.
        context_id, backward: of the pass.
        via: where it came, and where the answer goes.
        num_counted: the bytes that count in the account of that worker until the work is done.
    """
    try:
        if deadline.is_finite:
            current_deadline.set(deadline)
        answer = PassMessage()
        answer.outcome = workers[0](context_id, work) if workers else b""
        encoded, _ = answer.encode(context_id, backward)
    finally:
        via.account.subtract(num_counted)
    if hooks.enter is None:
        via.send(encoded)
    else:
        hooks.last_act = LastAct([lambda: via.send(encoded)], via)
