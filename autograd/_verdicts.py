"""The state of one worker in a backward pass, as a pure state machine: messages in, actions out.

Rules of this file: no sockets, no clock, no torch.

docs/autograd.md explains the words. In short, a *send* is a message whose tensors require grad, at its sender, and a
*recv* is the same message at its receiver. Gradients flow from recvs to sends. The *sources* of a worker's pass are the
roots and the tensors of its sends, numbered; sets of sources are bit masks.

Invariants:
    1. Every send gets exactly one verdict from its receiver: which of its tensors the pass needs gradients for. A send
       that the receiver does not know, or that nothing used there, has the empty verdict.
    2. The verdict of a recv follows from those of the sources that reach it. Lamport stamps grow along this relation,
       so it has no cycles, and verdicts end by themselves, whatever the gradients do.
    3. A group (sources that share inner nodes of the graph) runs once, when all its sources are decided, and if any is
       used. Then each of its used recvs is answered with one gradient.
    4. The verdict "used" may be omitted if the gradient follows without waiting for another worker; the gradient then
       implies it.
    5. A worker is done when all its neighbours have begun, its groups have ended, and the neighbours whose parent it is
       are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Final, NamedTuple

Verdicts = Mapping[int, int | None]
"""By message: the mask of its tensors that are used, or None while that is undecided."""

Masks = Mapping[int, int]
"""By message whose gradient has arrived: the mask of its tensors that have one."""

NOTHING: Final[Mapping[int, Any]] = {}


# The following five are never changed. They are not declared frozen, since that makes construction four times as slow.


@dataclass(slots=True)
class LocalSend:
    """A message that this worker sent; its tensors are the sources `first` to `first + count - 1`.

    `stamp` is the Lamport time at this worker.
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
    """A message that this worker received, with the Lamport time at its sender.

    Attributes:
        feeders: for each of its tensors, the sources whose gradients reach it.
    """

    id: int
    sender: int
    stamp: int
    feeders: tuple[int, ...]

    @property
    def reached_by(self) -> int:
        return reduce(or_, self.feeders, 0)


@dataclass(slots=True)
class LocalGraph:
    """One worker's part of the graph.

    Attributes:
        num_roots: number of roots; sources 0 to num_roots - 1 are roots.
        groups: the sources of each group; every source is in exactly one group.
    """

    num_roots: int
    sends: tuple[LocalSend, ...] = ()
    recvs: tuple[LocalRecv, ...] = ()
    groups: tuple[int, ...] = ()


@dataclass(slots=True)
class Tell:
    """An action: report to a neighbour which of its messages are used.

    Attributes:
        begins: announce that this worker takes part. `verdicts` then cover all messages that the neighbour sent here.
        is_child: with `begins`: the neighbour is the parent of this worker.
    """

    to: int
    verdicts: Verdicts
    begins: bool = False
    is_child: bool = False


@dataclass(slots=True)
class Run:
    """An action: run a group, or several groups that are ready at the same time.

    Attributes:
        groups: numbers of the groups.
        used: the sources from which they run.
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
        groups, used, arrived = self.groups + other.groups, self.used | other.used, self.arrived + other.arrived
        return Run(groups, used, arrived, (), self.recvs + other.recvs)


Actions = list[Tell | Run]


@dataclass(slots=True)
class _Group:
    """A group with its sends and recvs. A recv that no source reaches is in no group."""

    number: int
    sources: int
    sends: list[LocalSend] = field(default_factory=list)  # a send may have tensors in several groups
    recvs: list[LocalRecv] = field(default_factory=list)
    is_waiting: bool = True  # it has neither begun nor ended
    runs_freely: bool = False


class PassState:
    """One worker in one pass. As soon as `is_done`, it reports that to its parent.

    Args:
        fast: whether every send counts as used, without a verdict.
    """

    def __init__(self, me: int, fast: bool = False) -> None:
        self.me = me
        self.fast = fast
        self.parent: int | None = None
        self.is_started = False
        self.is_done = False
        self._early: list[tuple[int, bool, bool, Verdicts, Masks, bool]] = []
        self._sends: dict[int, LocalSend] = {}
        self._recvs: tuple[LocalRecv, ...] = ()
        self._roots = 0
        self._decided = 0
        self._used = 0
        self._arrived: set[int] = set()
        self._verdicts: dict[int, int] = {}  # of recvs, as far as decided
        self._groups: list[_Group] = []
        self._groups_of: dict[int, list[_Group]] = {}  # by send
        self._group_of: dict[int, _Group] = {}  # by recv
        self._dirty: dict[int, _Group] = {}  # to be examined again by `_advance`
        self._unended = 0
        self._told: set[int] = set()  # neighbours that have our begin message
        self._unheard: set[int] = set()  # those of `_told` that have not sent theirs
        self._children: set[int] = set()
        self._done_early: set[int] = set()

    # ------------------------------------------------------------ events

    def start_part(self, graph: LocalGraph, neighbours: Iterable[int], parent: int | None = None) -> Actions:
        """Starts the pass on this worker, because `backward` was called (no parent) or a neighbour began."""
        self.is_started = True
        self.parent = parent
        self._lay_out(graph)
        if self.fast:
            for send in graph.sends:
                self._decide(send, (1 << send.count) - 1)
        self._told = set(neighbours) - {self.me}
        self._unheard = set(self._told)
        actions: Actions = []
        early, self._early = self._early, []
        for said in early:
            self._take(actions, *said)
        self._hear(self.me, {recv.id: self._verdicts.get(recv.id) for recv in self._recvs if recv.sender == self.me})
        runs: Actions = []
        self._advance(runs, quiet=True)
        known = {action.to for action in actions if isinstance(action, Tell)}
        actions += [self._begin(to) for to in sorted(self._told - known)]
        return actions + runs

    def take(
        self,
        peer: int,
        begins: bool = False,
        is_child: bool = False,
        verdicts: Verdicts = NOTHING,
        used: Masks = NOTHING,
        is_done: bool = False,
    ) -> Actions:
        """Takes all parts of a neighbour's message before it decides what follows; keeps them until `start`.

        Args:
            begins, is_child: the neighbour takes part, and this worker is its parent.
            verdicts: verdicts on messages of this worker; if the neighbour begins, on all that it has received.
            used: the gradients that arrived.
            is_done: a neighbour whose parent is this worker is done.
        """
        if not self.is_started:
            self._early.append((peer, begins, is_child, verdicts, used, is_done))
            return []
        actions: Actions = []
        self._take(actions, peer, begins, is_child, verdicts, used, is_done)
        self._advance(actions)
        return actions

    def ended(self, run: Run) -> None:
        """Groups have run, and the gradients of all their used recvs were sent."""
        self._unended -= len(run.groups)
        self._end_if_done()

    def _lay_out(self, graph: LocalGraph) -> None:
        self._sends = {send.id: send for send in graph.sends}
        self._recvs = graph.recvs
        self._roots = self._decided = self._used = (1 << graph.num_roots) - 1
        self._groups = [_Group(number, sources) for number, sources in enumerate(graph.groups)]
        self._unended = len(self._groups)
        owner = {bit: group for group in self._groups for bit in _bits(group.sources)}
        for send in graph.sends:
            groups = {owner[bit].number: owner[bit] for bit in range(send.first, send.first + send.count)}
            self._groups_of[send.id] = list(groups.values())
            for group in groups.values():
                group.sends.append(send)
        for recv in graph.recvs:
            feeders = recv.reached_by
            if feeders:
                self._group_of[recv.id] = group = owner[(feeders & -feeders).bit_length() - 1]
                group.recvs.append(recv)
            else:
                self._verdicts[recv.id] = 0
        self._dirty = {group.number: group for group in self._groups}

    def _begin(self, to: int) -> Tell:
        received: dict[int, int | None] = {}
        for recv in self._recvs:
            if recv.sender == to:
                verdict = self._verdicts.get(recv.id)
                received[recv.id] = None if verdict and self._group_of[recv.id].runs_freely else verdict
        return Tell(to, received, True, to == self.parent)

    def _take(
        self, actions: Actions, peer: int, begins: bool, is_child: bool, verdicts: Verdicts, used: Masks, is_done: bool
    ) -> None:
        if begins:
            self._unheard.discard(peer)
            if is_child and peer not in self._done_early:
                self._children.add(peer)
            if peer not in self._told:
                self._told.add(peer)
                actions.append(self._begin(peer))
            self._hear(peer, verdicts)
        elif verdicts:
            self._apply(verdicts)
        for id, mask in used.items():
            send = self._sends.get(id)
            if send is not None:
                self._arrived.add(id)
                self._decide(send, mask)
                self._touch(id)
        if is_done:
            if peer in self._unheard:  # the message overtook that peer's begin
                self._done_early.add(peer)
            self._children.discard(peer)

    def _hear(self, peer: int, received: Verdicts) -> None:
        """Takes the verdicts on all messages that a neighbour has received; all others are unused (invariant 1)."""
        self._apply(received)
        for send in self._sends.values():
            if send.to == peer and send.id not in received:
                self._decide(send, 0)

    def _apply(self, verdicts: Verdicts) -> None:
        for id, verdict in verdicts.items():
            send = self._sends.get(id)
            if send is not None and verdict is not None:
                self._decide(send, verdict)

    def _decide(self, send: LocalSend, used: int) -> None:
        mask = send.mask
        if mask & ~self._decided:
            self._decided |= mask
            self._used |= (used << send.first) & mask
            self._touch(send.id)

    def _touch(self, send: int) -> None:
        for group in self._groups_of[send]:
            self._dirty[group.number] = group

    # ------------------------------------------------------------ consequences

    def _advance(self, actions: Actions, quiet: bool = False) -> None:
        """Appends the resulting actions; without verdicts if `quiet`, because the begin messages have them."""
        news: list[LocalRecv] = []
        touched: dict[int, _Group] = {}
        while self._dirty:
            number, group = self._dirty.popitem()
            touched[number] = group
            self._settle(group, news)
        runs = [run for number in sorted(touched) if (run := self._ready(touched[number])) is not None]
        if news and not quiet:
            actions += self._tell(news)
        actions += runs
        self._end_if_done()

    def _settle(self, group: _Group, news: list[LocalRecv]) -> None:
        """Decides the recvs of a group as far as possible."""
        for recv in group.recvs:
            if recv.id in self._verdicts or (verdict := self._verdict(recv)) is None:
                continue
            self._verdicts[recv.id] = verdict
            if recv.sender == self.me:
                self._apply({recv.id: verdict})
            else:
                news.append(recv)

    def _verdict(self, recv: LocalRecv) -> int | None:
        verdict = 0
        for index, feeders in enumerate(recv.feeders):
            if feeders & self._used:
                verdict |= 1 << index
            elif feeders & ~self._decided:
                return None
        return verdict

    def _ready(self, group: _Group) -> Run | None:
        """The run of a group if it can begin; a group without used sources ends without a run."""
        if not group.is_waiting or group.sources & ~self._decided:
            return None
        used = group.sources & self._used
        if not used:
            group.is_waiting = False
            self._unended -= 1
            return None
        sends, recvs = group.sends, group.recvs
        if used != group.sources:
            sends = [send for send in sends if send.mask & used]
            recvs = [recv for recv in recvs if recv.reached_by & used]
        arrived = [send.id for send in sends if send.id in self._arrived]
        waits: list[int] = []
        if len(arrived) < len(sends):
            pending = sorted([send for send in sends if send.id not in self._arrived], key=lambda send: -send.stamp)
            if not self._must_block(used, sends, recvs, pending):
                return None
            waits = [send.id for send in pending]
        group.is_waiting = False
        group.runs_freely = not waits
        return Run((group.number,), used, tuple(arrived), tuple(waits), tuple([recv.id for recv in recvs]))

    def _must_block(self, used: int, sends: list[LocalSend], recvs: list[LocalRecv], pending: list[LocalSend]) -> bool:
        """Whether a group must run before all its gradients have arrived, and can.

        It must if a missing gradient may depend on recvs of this group, whose stamps are then equal (a worker that
        calls itself) or greater. It can if it has a gradient to start from: the gradient of its greatest stamp depends
        on no recv of the group, so the group waits for that one without a thread.
        """
        if not any(recv.stamp >= pending[-1].stamp for recv in recvs):
            return False
        return bool(used & self._roots) or max(sends, key=lambda send: send.stamp) is not pending[0]

    def _tell(self, news: list[LocalRecv]) -> list[Tell]:
        """The verdicts for other workers, except those that a gradient implies (invariant 4)."""
        by_sender: dict[int, dict[int, int | None]] = {}
        for recv in news:
            verdict = self._verdicts[recv.id]
            if not (verdict and self._group_of[recv.id].runs_freely):
                by_sender.setdefault(recv.sender, {})[recv.id] = verdict
        return [Tell(to, verdicts) for to, verdicts in sorted(by_sender.items())]

    def _end_if_done(self) -> None:
        self.is_done = self.is_done or not (self._unended or self._unheard or self._children)

    # ------------------------------------------------------------ views

    def waits_for(self) -> dict[int, str]:
        """The reasons why the pass has not ended on this worker, by the worker that it waits for."""
        found: dict[int, str] = dict.fromkeys(self._unheard, "has not begun")
        found.update(dict.fromkeys(self._children, "is not done"))
        for send in self._sends.values():
            if send.mask & ~self._decided:
                found[send.to] = "has not said whether it used what it was sent"
            elif send.mask & self._used and send.id not in self._arrived:
                found[send.to] = "owes a gradient"
        return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
