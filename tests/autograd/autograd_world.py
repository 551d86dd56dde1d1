"""Workers of a backward pass without sockets, clock or torch: for tests that try every order of events.

A `World` is a forward pass (who sent what to whom, and what it was computed from), one `PassState` per worker, the
messages under way, and the engine runs in progress. A run is modelled as the real one behaves: it answers a recv when
all used sources that reach it have run; gates run in the order of `Run.pending`, each when its gradient is there.

A real worker delays what it has to say, and merges it into one message for each neighbour, whose receiver takes all of
it in at once. Here, messages may be under way for any time, and any of those from one worker to another may arrive as
one: that covers every such delay and every merging.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from rpcdist.autograd._verdicts import Actions, LocalGraph, LocalRecv, LocalSend, PassState, Run

__all__ = ["Hop", "Step", "World", "build"]

Step = tuple[int, ...]
"""Numbers of messages under way that arrive as one; or the number of one run, counted on behind the messages."""


@dataclass(frozen=True, slots=True)
class Said:
    """The arguments of `PassState.take`."""

    begins: bool = False
    is_child: bool = False
    verdicts: dict[int, int | None] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Hop:
    """A message of the forward pass: its tensors (one each) are computed from tensors that arrived before.

    Attributes:
        sender, to: workers.
        tensors: for each tensor, the (message, tensor) pairs it was computed from; they arrived at the sender.
        shares: whether its graph shares an inner node with all others of its sender that say so.
        is_lost: whether its receiver has not recorded it: it gave up waiting, or did not look at it.
    """

    sender: int
    to: int
    tensors: tuple[tuple[tuple[int, int], ...], ...] = ((),)
    shares: bool = False
    is_lost: bool = False


@dataclass
class _Running:
    worker: int
    run: Run
    executed: int
    pending: list[int]
    unanswered: list[LocalRecv]


@dataclass
class World:
    """See the module. `steps` lists what may happen next, `take` has one of it happen."""

    hops: tuple[Hop, ...]
    graphs: dict[int, LocalGraph]
    states: dict[int, PassState]
    neighbours: dict[int, frozenset[int]]
    flying: list[tuple[int, int, Said]] = field(default_factory=list)  # sender, receiver, what it says
    running: list[_Running] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)  # by message: how often it was sent
    arrived: set[int] = field(default_factory=set)
    ran: set[tuple[int, int]] = field(default_factory=set)
    done: frozenset[int] = frozenset()

    def begin(self) -> None:
        self._do(0, self.states[0].start_part(self.graphs[0], self.neighbours[0]))

    def steps(self, in_order: bool = False) -> Iterator[Step]:
        """The possible next steps: messages first, then runs. `in_order` is per pair, as sessions keep it."""
        pairs: dict[tuple[int, int], list[int]] = {}
        for number, (sender, to, _) in enumerate(self.flying):
            pairs.setdefault((sender, to), []).append(number)
        for numbers in pairs.values():
            for count in range(1, len(numbers) + 1):
                yield from (tuple(numbers[:count]),) if in_order else itertools.combinations(numbers, count)
        for number, running in enumerate(self.running):
            if not running.pending or running.pending[0] in self.arrived:
                yield (len(self.flying) + number,)

    def arrives_at(self, step: Step, worker: int) -> bool:
        """Whether a step is the arrival of messages at a worker."""
        return step[0] < len(self.flying) and self.flying[step[0]][1] == worker

    def take(self, step: Step) -> None:
        if step[0] < len(self.flying):
            sender, to, _ = self.flying[step[0]]
            merged = [self.flying[number][2] for number in step]
            for number in reversed(step):
                del self.flying[number]
            self._deliver(sender, to, merged)
            return
        running = self.running[step[0] - len(self.flying)]
        if running.pending:
            send = self._send(running.worker, running.pending.pop(0))
            running.executed |= send.mask
        self._answer(running)
        if not running.pending:
            self.running.remove(running)
            assert not running.unanswered, "a run ended and owes a gradient"
            self.states[running.worker].ended(running.run)
            self._do(running.worker, [])

    def key(self) -> object:
        """Equal for equal states."""
        states = tuple(
            (
                *(s._decided, s._used, frozenset(s._arrived), tuple(g.is_waiting for g in s._groups), s.is_done),
                *(frozenset(s._told), frozenset(s._unheard), frozenset(s._children), repr(s._early)),
            )
            for s in self.states.values()
        )
        runs = frozenset(
            (r.worker, r.run.groups, r.executed, tuple(r.pending), len(r.unanswered)) for r in self.running
        )
        return states, runs, tuple(sorted(map(repr, self.flying)))

    def fork(self) -> World:
        """A copy that goes its own way. Objects that never change are shared: a deep copy would take most of a test's
        time.
        """
        running = [
            dataclasses.replace(r, pending=r.pending.copy(), unanswered=r.unanswered.copy()) for r in self.running
        ]
        return dataclasses.replace(
            self,
            states={worker: _fork(state) for worker, state in self.states.items()},
            flying=self.flying.copy(),
            running=running,
            gradients=self.gradients.copy(),
            arrived=self.arrived.copy(),
            ran=self.ran.copy(),
        )

    # ------------------------------------------------------------ inside

    def _send(self, worker: int, id: int) -> LocalSend:
        return next(send for send in self.graphs[worker].sends if send.id == id)

    def _deliver(self, sender: int, to: int, merged: list[Said]) -> None:
        state = self.states[to]
        verdicts = {id: verdict for said in merged for id, verdict in said.verdicts.items()}
        used = {id: mask for said in merged for id, mask in said.used.items()}
        begins, is_child = any(said.begins for said in merged), any(said.is_child for said in merged)
        self.arrived |= used.keys()
        starts = begins and not state.is_started
        actions = state.take(sender, begins, is_child, verdicts, used, any(said.is_done for said in merged))
        if starts:
            actions += state.start_part(self.graphs[to], self.neighbours[to] | {sender}, sender)
        self._do(to, actions)

    def _do(self, worker: int, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Run):
                self._run(worker, action)
            else:
                said = Said(action.begins, action.is_child, dict(action.verdicts))
                self.flying.append((worker, action.to, said))
        state = self.states[worker]
        if state.is_done and worker not in self.done:
            self.done |= {worker}
            assert (state.parent is None) == (worker == 0)
            if state.parent is not None:
                self.flying.append((worker, state.parent, Said(is_done=True)))

    @property
    def finished(self) -> bool:
        """Whether the worker that called `backward` is done."""
        return 0 in self.done

    def _run(self, worker: int, run: Run) -> None:
        graph = self.graphs[worker]
        ran = {(worker, group) for group in run.groups}
        assert not ran & self.ran, "a group ran twice"
        self.ran |= ran
        executed = run.used & ((1 << graph.num_roots) - 1)
        for id in run.arrived:
            executed |= self._send(worker, id).mask
        recvs = [recv for recv in graph.recvs if recv.id in run.recvs]
        self.running.append(_Running(worker, run, executed, list(run.pending), recvs))
        self._answer(self.running[-1])

    def _answer(self, running: _Running) -> None:
        """Sends the gradients of the recvs that nothing is missing for."""
        used = running.run.used
        for recv in list(running.unanswered):
            if not recv.reached_by & used & ~running.executed:
                running.unanswered.remove(recv)
                mask = sum(1 << n for n, feeders in enumerate(recv.feeders) if feeders & used)
                self.gradients[recv.id] = self.gradients.get(recv.id, 0) + 1
                self.flying.append((running.worker, recv.sender, Said(used={recv.id: mask})))

    def used_tensors(self) -> dict[int, int]:
        """The messages on which the root depends: the right verdicts."""
        used: dict[int, int] = dict.fromkeys(range(len(self.hops) - 1), 0)
        todo = list(self.hops[-1].tensors[0])
        while todo:
            message, tensor = todo.pop()
            if not used[message] >> tensor & 1:
                used[message] |= 1 << tensor
                todo += self.hops[message].tensors[tensor]
        return used


def _fork(state: PassState) -> PassState:
    twin = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, (set, dict, list)):
            setattr(twin, name, value.copy())
    groups = [copy.copy(group) for group in state._groups]  # their lists of sends and recvs never change
    twin._groups = groups
    twin._groups_of = {id: [groups[group.number] for group in found] for id, found in state._groups_of.items()}
    twin._group_of = {id: groups[group.number] for id, group in state._group_of.items()}
    twin._dirty = {number: groups[number] for number in state._dirty}
    return twin


def build(hops: tuple[Hop, ...], num_workers: int, fast: bool = False) -> World:
    """The world after a forward pass. The last hop stands for the root, on worker 0."""
    assert hops[-1].sender == 0
    clocks = [0] * num_workers
    stamps: list[int] = []
    neighbours: dict[int, set[int]] = {worker: set() for worker in range(num_workers)}
    for hop in hops[:-1]:
        clocks[hop.sender] += 1
        stamps.append(clocks[hop.sender])
        clocks[hop.to] = max(clocks[hop.to], stamps[-1])
        neighbours[hop.sender].add(hop.to)
        if not hop.is_lost:
            neighbours[hop.to].add(hop.sender)
    graphs = {worker: _local_graph(hops, stamps, worker) for worker in range(num_workers)}
    states = {worker: PassState(worker, fast) for worker in range(num_workers)}
    return World(hops, graphs, states, {worker: frozenset(found - {worker}) for worker, found in neighbours.items()})


def _local_graph(hops: tuple[Hop, ...], stamps: list[int], worker: int) -> LocalGraph:
    sources: list[tuple[tuple[int, int], ...]] = [hops[-1].tensors[0]] if worker == 0 else []
    shares = [hops[-1].shares] if worker == 0 else []
    sends = []
    for id, hop in enumerate(hops[:-1]):
        if hop.sender == worker:
            sends.append(LocalSend(id, hop.to, stamps[id], len(sources), len(hop.tensors)))
            sources += hop.tensors
            shares += [hop.shares] * len(hop.tensors)
    recvs = []
    for id, hop in enumerate(hops[:-1]):
        if hop.to == worker and not hop.is_lost:
            feeders = tuple(
                sum(1 << bit for bit, needs in enumerate(sources) if (id, tensor) in needs)
                for tensor in range(len(hop.tensors))
            )
            recvs.append(LocalRecv(id, hop.sender, stamps[id], feeders))
    groups = [1 << bit for bit in range(len(sources))]
    joins = [recv.reached_by for recv in recvs] + [sum(1 << bit for bit, flag in enumerate(shares) if flag)]
    for join in joins:
        together = [group for group in groups if group & join]
        groups = [group for group in groups if not group & join] + ([sum(together)] if together else [])
    return LocalGraph(1 if worker == 0 else 0, tuple(sends), tuple(recvs), tuple(groups))
