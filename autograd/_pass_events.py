"""What a worker's part of a backward pass is told, and what it wants done: plain data.

docs/autograd.md explains the words; in short, a *send* is a message whose tensors require grad, at its sender; a *recv*
is the same message at its receiver. Gradients flow from recvs to sends. The *sources* of a worker's pass are the roots
and the tensors of its sends, numbered; sets of sources are bit masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "Action",
    "ChildDone",
    "Decided",
    "Event",
    "Finished",
    "GradientArrived",
    "GroupEnded",
    "LocalGraph",
    "PeerBegan",
    "Recv",
    "Run",
    "SendBegin",
    "SendDone",
    "SendRecord",
    "SendVerdicts",
    "Started",
    "Verdicts",
]

Verdicts = Mapping[int, int | None]
"""By message: a mask of the tensors that are used, or None while that is open."""


@dataclass(frozen=True, slots=True)
class SendRecord:
    """A message that this worker sent.

    Attributes:
        id: of the message.
        to: the receiver.
        stamp: Lamport time.
        first: its tensors are the sources `first` to `first + count - 1`.
        count: how many tensors.
    """

    id: int
    to: int
    stamp: int
    first: int
    count: int

    @property
    def mask(self) -> int:
        return ((1 << self.count) - 1) << self.first


@dataclass(frozen=True, slots=True)
class Recv:
    """A message that this worker received.

    Attributes:
        id: of the message.
        sender: who gets the gradient.
        stamp: Lamport time at the sender.
        feeders: for each of its tensors, the sources whose gradients reach it.
    """

    id: int
    sender: int
    stamp: int
    feeders: tuple[int, ...]

    @property
    def reached_by(self) -> int:
        mask = 0
        for feeders in self.feeders:
            mask |= feeders
        return mask


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """What of the graph is on this worker.

    Attributes:
        num_roots: sources 0 to num_roots - 1 are roots.
        sends: all of them.
        recvs: all of them.
        groups: the sources of each group; every source is in exactly one.
    """

    num_roots: int
    sends: tuple[SendRecord, ...] = ()
    recvs: tuple[Recv, ...] = ()
    groups: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Started:
    """The pass begins here: at the worker that called `backward` (no parent), or because a neighbour began."""

    graph: LocalGraph
    neighbours: frozenset[int]
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class PeerBegan:
    """A neighbour takes part. `received` is all that it has received from here; `child` says that we are its parent."""

    peer: int
    child: bool
    received: Verdicts


@dataclass(frozen=True, slots=True)
class Decided:
    """A neighbour says which of our messages are used."""

    peer: int
    verdicts: Verdicts


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """The gradient of a send; `used` is the mask of the tensors that have one."""

    id: int
    used: int


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A group has run, and all its used recvs were answered."""

    group: int


@dataclass(frozen=True, slots=True)
class ChildDone:
    """A neighbour that began because of us is done."""

    peer: int


Event = Started | PeerBegan | Decided | GradientArrived | GroupEnded | ChildDone

# ------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class SendBegin:
    to: int
    child: bool
    received: Verdicts


@dataclass(frozen=True, slots=True)
class SendVerdicts:
    to: int
    verdicts: Verdicts


@dataclass(frozen=True, slots=True)
class Run:
    """Run a group, or several that are ready at the same time.

    Attributes:
        groups: their numbers.
        used: the sources to run it from.
        arrived: the sends whose gradients are there.
        pending: the sends whose gradients will come while it runs, because it answers recvs that they depend on; in
            the order in which they have to be waited for. If there are any, the run blocks.
        recvs: the messages that have to be answered.
    """

    groups: tuple[int, ...]
    used: int
    arrived: tuple[int, ...]
    pending: tuple[int, ...]
    recvs: tuple[int, ...]

    def with_(self, other: Run) -> Run:
        """Both in one; neither has anything pending. A send whose tensors lie apart may have arrived for both."""
        return Run(
            self.groups + other.groups,
            self.used | other.used,
            tuple(dict.fromkeys(self.arrived + other.arrived)),
            (),
            self.recvs + other.recvs,
        )


@dataclass(frozen=True, slots=True)
class SendDone:
    to: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker that called `backward` is done, and so is everybody."""


Action = SendBegin | SendVerdicts | Run | SendDone | Finished
