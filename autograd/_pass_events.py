"""The events and actions of one worker in a backward pass, and its graph: plain data.

docs/autograd.md explains the words. In short, a *send* is a message whose tensors require grad, at its sender, and a
*recv* is the same message at its receiver. Gradients flow from recvs to sends. The *sources* of a worker's pass are the
roots and the tensors of its sends, numbered; sets of sources are bit masks.

Nobody changes any of it. It is not declared to be frozen, which would take four times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rpcdist.deadline import Deadline

Verdicts = Mapping[int, int | None]
"""By message: the mask of its tensors that are used, or None while that is undecided."""


class PassOptions(NamedTuple):
    """The options of a backward pass, equal on all its workers.

    Attributes:
        fast: whether every send counts as used, without verdicts.
        retain_graph: whether saved tensors are kept for a second pass.
        deadline: when the pass must have ended.
    """

    fast: bool = False
    retain_graph: bool = False
    deadline: Deadline = Deadline.after(None)


@dataclass(slots=True, unsafe_hash=True)
class LocalSend:
    """A message that this worker sent.

    Attributes:
        id: id of the message.
        to: worker that received it.
        stamp: Lamport time at this worker.
        first: its tensors are the sources `first` to `first + count - 1`.
        count: number of tensors.
    """

    id: int
    to: int
    stamp: int
    first: int
    count: int

    @property
    def mask(self) -> int:
        return ((1 << self.count) - 1) << self.first


class LocalRecv(NamedTuple):
    """A message that this worker received.

    Attributes:
        id: id of the message.
        sender: worker that sent it, and gets its gradient.
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


@dataclass(slots=True, unsafe_hash=True)
class LocalGraph:
    """One worker's part of the graph.

    Attributes:
        num_roots: number of roots; sources 0 to num_roots - 1 are roots.
        sends: all messages that this worker sent.
        recvs: all messages that this worker received.
        groups: the sources of each group; every source is in exactly one group, and those of a send in the same one.
    """

    num_roots: int
    sends: tuple[LocalSend, ...] = ()
    recvs: tuple[LocalRecv, ...] = ()
    groups: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------------------ events


@dataclass(slots=True, unsafe_hash=True)
class Started:
    """The pass starts on this worker: because `backward` was called (no parent), or because a neighbour began."""

    graph: LocalGraph
    neighbours: frozenset[int]
    parent: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class PeerBegan:
    """A neighbour takes part in the pass.

    Attributes:
        peer: the neighbour.
        child: whether this worker is its parent.
        received: the verdicts on all messages that it has received from this worker.
    """

    peer: int
    child: bool
    received: Verdicts


@dataclass(slots=True, unsafe_hash=True)
class Decided:
    """A neighbour has decided which messages of this worker are used."""

    peer: int
    verdicts: Verdicts


@dataclass(slots=True, unsafe_hash=True)
class GradientArrived:
    """The gradient of a send has arrived; `used` is the mask of its tensors with a gradient."""

    id: int
    used: int


@dataclass(slots=True, unsafe_hash=True)
class GroupEnded:
    """A group has run, and the gradients of all its used recvs were sent."""

    group: int


@dataclass(slots=True, unsafe_hash=True)
class ChildDone:
    """A neighbour whose parent is this worker is done."""

    peer: int


PassEvent = Started | PeerBegan | Decided | GradientArrived | GroupEnded | ChildDone

# ------------------------------------------------------------------------------------------------ actions


@dataclass(slots=True, unsafe_hash=True)
class SendBegin:
    """Tell a neighbour that this worker takes part; its fields are those of `PeerBegan`."""

    to: int
    child: bool
    received: Verdicts


@dataclass(slots=True, unsafe_hash=True)
class SendVerdicts:
    """Tell a neighbour which of its messages are used."""

    to: int
    verdicts: Verdicts


@dataclass(slots=True, unsafe_hash=True)
class Run:
    """Run a group, or several groups that are ready at the same time.

    Attributes:
        groups: numbers of the groups.
        used: the sources from which they run.
        arrived: the sends whose gradients have arrived.
        pending: the sends whose gradients arrive during the run, because they depend on recvs of these groups; in the
            order in which the run waits for them. If there are any, the run blocks.
        recvs: the messages whose gradients the run must send.
    """

    groups: tuple[int, ...]
    used: int
    arrived: tuple[int, ...]
    pending: tuple[int, ...]
    recvs: tuple[int, ...]

    def with_(self, other: Run) -> Run:
        """Both runs in one; neither has pending sends."""
        return Run(
            self.groups + other.groups,
            self.used | other.used,
            self.arrived + other.arrived,
            (),
            self.recvs + other.recvs,
        )


@dataclass(slots=True, unsafe_hash=True)
class SendDone:
    """Tell the parent that this worker is done."""

    to: int


@dataclass(slots=True, unsafe_hash=True)
class Finished:
    """The worker that called `backward` is done, and so are all others."""


PassAction = SendBegin | SendVerdicts | Run | SendDone | Finished
