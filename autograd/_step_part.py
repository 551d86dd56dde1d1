"""The step of an optimizer after a backward pass, at the owners of parameters, as a message of its own.

The calling worker sends one message to each owner, does its own share, and reads the outcomes. At an owner, the
thread that read the message does the work, and answers. `rpcdist.optim` defines the meaning of the bytes.

If only two workers take part in a pass, the other one needs no separate message: the first message of the pass brings
the work, and the owner does it as soon as its part of the pass is done. The caller's part may not be done by then, so
the caller hands over only if that part is not known to run user functions, which may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from rpcdist.autograd._pass_message import PassMessage
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.rpc._executors.blocking import hooks
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._peers.network import AnySession

Outcome = bytes | Exception
"""The answer of an owner, or the reason why there is none."""

workers: Final[list[Callable[[int, bytes], bytes]]] = []
"""The function that does the work at an owner. It gets the context and bytes, and never raises; see `rpcdist.optim`."""


@dataclass(slots=True)
class StepPart:
    """The steps that a worker requests; only on the thread that handles the events of the pass.

    Attributes:
        work: by owner of parameters, its work.
        own: does the share of this process.
        outcomes: by owner.
        handed: the owner that got its work with the pass, if any.
        is_stepping: whether that owner has reported that it does the work.
        is_begun: whether the pass has ended, and the requests were sent to the other owners.
    """

    work: Mapping[int, bytes]
    own: Callable[[], object]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    handed: int | None = None
    is_stepping: bool = False
    is_begun: bool = False

    def hand_over(self, to: int) -> bytes | None:
        """The work for a neighbour to do as soon as its part is done, without a third worker; None if it has none."""
        work = self.work.get(to)
        if work is not None:
            self.handed = to
        return work

    def take(self, sender: int, message: PassMessage) -> None:
        """Handles an owner's message, also while the pass runs."""
        if message.follows and sender == self.handed:
            self.is_stepping = True
        if message.outcome is not None:
            self.outcomes.setdefault(sender, message.outcome)

    def is_done(self) -> bool:
        """Whether all owners have answered."""
        return all([to in self.outcomes for to in self.work])


def do_work(
    work: bytes, deadline: Deadline, context_id: int, backward: int, via: AnySession, num_counted: int = 0
) -> DeferredReply | None:
    """Does the work that a worker requested, and answers by `via`; on a pool thread.

    `num_counted` bytes count in the account of that worker until the work is done.
    """
    try:
        if deadline.is_finite:
            current_deadline.set(deadline)
        answer = PassMessage()
        answer.outcome = workers[0](context_id, work) if workers else b""
        encoded, *_ = answer.encode(context_id, backward)
    finally:
        via.account.subtract(num_counted)
    if hooks.enter is None:
        via.send(encoded)
        return None
    return DeferredReply([lambda: via.send(encoded)], via)
