"""Three workers and a network in memory, for tests of the reference counting.

A `World` holds one `RRefProtocol` per worker and everything that is under way between them. `moves` lists what can
happen next; `apply` does one of these. Tests walk over them: exhaustively (`test_rref_explorer.py`), or at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from rpcdist.ids import ProcessId, UniqueId
from rpcdist.rpc._rref.messages import Actions, ForkId, Message, MessageKind, Reason, RRefId
from rpcdist.rpc._rref.owner import OwnerEntry, State
from rpcdist.rpc._rref.protocol import RRefProtocol
from rpcdist.rpc._rref.users import UserFork

P = ParamSpec("P")

# The messages under way: (kind, to, ...), compared and hashed as plain tuples.
Item = tuple[object, ...]
Move = tuple[object, ...]


@dataclass(frozen=True)
class Send:
    to: ProcessId
    message: Message


@dataclass(frozen=True)
class SettleHandle:
    handle: UniqueId
    failed: Reason | None = None


@dataclass(frozen=True)
class AnswerFetch:
    rref: RRefId
    fork: ForkId
    sender: ProcessId
    refused: Reason | None = None


@dataclass(frozen=True)
class FailValue:
    rref: RRefId
    reason: Reason


@dataclass(frozen=True)
class ReleaseValue:
    rref: RRefId


@dataclass(frozen=True)
class RefuseCreation:
    """Not an action: what `creation_accepted` returned."""

    reason: Reason


Action = Send | SettleHandle | AnswerFetch | FailValue | ReleaseValue | RefuseCreation


class NotedProtocol(RRefProtocol, Actions):
    """A protocol that is its own shell, and notes the actions."""

    def __init__(self, me: ProcessId) -> None:
        super().__init__(me, self)
        self.noted: list[Action] = []
        self.to_myself: list[Message] = []

    def step(
        self, happens: Callable[Concatenate[RRefProtocol, P], Reason | None], *args: P.args, **kwargs: P.kwargs
    ) -> list[Action]:
        """Calls a method, delivers the messages to itself, and returns the actions."""
        refused = happens(self, *args, **kwargs)
        while self.to_myself:
            self.message_arrived(self.me, self.to_myself.pop(0))
        noted, self.noted = self.noted, []
        return noted if refused is None else [*noted, RefuseCreation(refused)]

    def send(self, to: ProcessId, message: Message) -> None:
        if to == self.me:
            self.to_myself.append(message)
        else:
            self.noted.append(Send(to, message))

    def settle_handle(self, handle: UniqueId, failed: Reason | None = None) -> None:
        self.noted.append(SettleHandle(handle, failed))

    def answer_fetch(self, rref: RRefId, fork: ForkId, sender: ProcessId, refused: Reason | None = None) -> None:
        self.noted.append(AnswerFetch(rref, fork, sender, refused))

    def fail_value(self, rref: RRefId, reason: Reason) -> None:
        self.noted.append(FailValue(rref, reason))

    def release_value(self, rref: RRefId) -> None:
        self.noted.append(ReleaseValue(rref))


def node(worker: int) -> ProcessId:
    return ProcessId(worker, 100 + worker)


@dataclass
class Step:
    """One line of the program that the workers run.

    `remote`: worker `at` creates `child` on worker `to`. `value`: `at` makes an owner reference `child`. `share`: `at`
    sends its handle `holder` to `to`, which then has `child`. `fetch`: `at` asks the owner for the value of `holder`.
    """

    kind: str
    at: int
    child: str = ""
    to: int = -1
    holder: str = ""


@dataclass
class World:
    program: tuple[Step, ...]
    duplicates: int = 0  # how many control messages may be delivered twice
    losses: int = 0  # how many bindings may be lost
    doubts: int = 0  # how many bindings may be reported lost, and arrive all the same
    deaths: tuple[int, ...] = ()  # who may die (one of them)
    suspicions: tuple[
        tuple[int, int], ...
    ] = ()  # (who, whom): a living worker may be declared lost, and its lease ended
    returns: bool = False  # who was suspected is found again, before or after its lease ends
    protocols: dict[int, NotedProtocol] = field(default_factory=lambda: {w: NotedProtocol(node(w)) for w in range(3)})
    under_way: tuple[Item, ...] = ()
    done: tuple[int, ...] = ()  # steps of the program that were taken, or cannot be any more
    handles: dict[str, str] = field(default_factory=dict)  # name -> "live", "failed" or "dropped"
    failed: tuple[str, ...] = ()  # handles that the protocol gave up, dropped ones too
    dead: tuple[int, ...] = ()
    suspected: tuple[tuple[int, int], ...] = ()  # whom anybody has suspected so far
    trace: tuple[Move, ...] = ()

    # Names: a handle called "b" has fork id 1000 + its place among the names; its value the id of the root handle's.

    def names(self) -> list[str]:
        return [step.child for step in self.program if step.child]

    def step_of(self, name: str) -> Step:
        return next(step for step in self.program if step.child == name)

    def rref_of(self, name: str) -> RRefId:
        step = self.step_of(name)
        while step.kind == "share":
            step = self.step_of(step.holder)
        return RRefId(step.at, self.names().index(step.child), 100 + step.at)

    def fork_of(self, name: str) -> ForkId:
        step = self.step_of(name)
        if step.kind == "value":
            return self.rref_of(name)
        return ForkId(step.at, 1000 + self.names().index(name), 100 + step.at)

    def name_of(self, fork: UniqueId) -> str:
        return next(name for name in self.names() if self.fork_of(name) == fork)

    def owner_of(self, name: str) -> int:
        step = self.step_of(name)
        while step.kind == "share":
            step = self.step_of(step.holder)
        return step.at if step.kind == "value" else step.to

    def holder_of(self, name: str) -> int:
        """The worker where the handle lives."""
        step = self.step_of(name)
        return step.to if step.kind == "share" else step.at

    # Moves.

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for index, step in enumerate(self.program):
            if index in self.done or step.at in self.dead:
                continue
            if not step.holder or step.holder in self.handles:
                found.append(("step", index))
        for name, state in self.handles.items():
            needed = any(s.holder == name and i not in self.done for i, s in enumerate(self.program))
            if state != "dropped" and not needed and self.holder_of(name) not in self.dead:
                found.append(("drop", name))
        for item in dict.fromkeys(self.under_way):
            found.append(("deliver", item))
            if item[0] == "control" and self.duplicates:
                found.append(("duplicate", item))
            if item[0] in ("call", "value", "reply") and self.losses:
                found.append(("lose", item))
            if item[0] in ("call", "value") and self.doubts and ("failed", item[1], item[2]) not in self.under_way:
                found.append(("doubt", item))
        if not self.dead:
            found += [("die", worker) for worker in self.deaths]
        found += [("suspect", *pair) for pair in self.suspicions if not (set(pair) & set(self.dead))]
        return found

    def apply(self, move: Move) -> None:
        self.trace += (move,)
        getattr(self, "_" + str(move[0]))(*move[1:])

    def feed(
        self,
        worker: int,
        happens: Callable[Concatenate[RRefProtocol, P], Reason | None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> bool:
        """Calls a method of a worker's protocol, and puts what it sends on the way. Returns: it refused a creation."""
        refused = False
        if worker in self.dead:
            return refused
        protocol = self.protocols[worker]
        is_served = happens == RRefProtocol.fetch_arrived and protocol.owners.serves_at_once(*args)  # type: ignore[arg-type]
        todo = protocol.step(happens, *args, **kwargs)
        assert not is_served or todo == [AnswerFetch(*args)], args  # type: ignore[arg-type]
        for action in todo:
            if isinstance(action, Send):
                self.send(("control", action.to.worker, worker, action.message))
            elif isinstance(action, SettleHandle) and action.failed is not None:
                name = self.name_of(action.handle)
                self.failed = tuple(sorted({*self.failed, name}))
                if self.handles.get(name) != "dropped":
                    self.handles[name] = "failed"
            elif isinstance(action, RefuseCreation):
                refused = True
        return refused

    def send(self, item: Item) -> None:
        if item[1] not in self.dead:
            self.under_way = tuple(sorted((*self.under_way, item), key=repr))

    def take(self, item: Item) -> None:
        items = list(self.under_way)
        items.remove(item)
        self.under_way = tuple(items)

    def _step(self, index: int) -> None:
        self.done = tuple(sorted((*self.done, index)))
        step = self.program[index]
        if step.holder and self.handles[step.holder] != "live":
            return
        name = step.child
        if step.kind == "value":
            self.handles[name] = "live"
        elif step.kind == "remote":
            self.handles[name] = "live"
            self.feed(step.at, RRefProtocol.create_remote, self.rref_of(name), self.fork_of(name), node(step.to))
            if self.handles[name] == "live":
                self.carry(step, ("call", step.to, name))
        elif step.kind == "share":
            holder, child = self.fork_of(step.holder), self.fork_of(name)
            self.feed(step.at, RRefProtocol.share, self.rref_of(name), holder, child, node(step.to))
            self.carry(step, ("value", step.to, name))
        elif step.kind == "fetch":
            self.send(("fetch", self.owner_of(step.holder), step.holder))

    def carry(self, step: Step, item: Item) -> None:
        if step.to in self.dead:
            self.send(("failed", step.at, step.child))
        else:
            self.send(item)

    def _drop(self, name: str) -> None:
        self.handles[name] = "dropped"
        self.feed(self.holder_of(name), RRefProtocol.handle_dropped, self.rref_of(name), self.fork_of(name))

    def _duplicate(self, item: Item) -> None:
        self.duplicates -= 1
        self._deliver(item)
        self.send(item)

    def _lose(self, item: Item) -> None:
        self.losses -= 1
        self.take(item)
        name = str(item[2])
        self.send(("failed", self.step_of(name).at, name))

    def _doubt(self, item: Item) -> None:
        self.doubts -= 1
        name = str(item[2])
        self.send(("failed", self.step_of(name).at, name))

    def _deliver(self, item: Item) -> None:
        self.take(item)
        getattr(self, "_deliver_" + str(item[0]))(*item[1:])

    def _deliver_control(self, to: int, sender: int, message: Message) -> None:
        self.feed(to, RRefProtocol.message_arrived, node(sender), message)

    def _deliver_call(self, to: int, name: str) -> None:
        sender = self.step_of(name).at
        refused = self.feed(to, RRefProtocol.creation_accepted, self.rref_of(name), self.fork_of(name), node(sender))
        self.send(("failed", sender, name) if refused else ("finish", to, name))

    def _deliver_finish(self, to: int, name: str) -> None:
        self.feed(to, RRefProtocol.creation_finished, self.rref_of(name))
        self.send(("reply", self.step_of(name).at, name))

    def _deliver_reply(self, to: int, name: str) -> None:
        self.feed(to, RRefProtocol.created, self.fork_of(name))

    def _deliver_value(self, to: int, name: str) -> None:
        step = self.step_of(name)
        owner = self.owner_of(name)
        parent = None if step.at == owner else self.fork_of(step.holder)
        self.handles[name] = "live"
        self.feed(to, RRefProtocol.received, self.rref_of(name), self.fork_of(name), parent, node(owner), node(step.at))

    def _deliver_failed(self, to: int, name: str) -> None:
        step = self.step_of(name)
        if step.kind == "remote":
            self.feed(to, RRefProtocol.creation_failed, self.rref_of(name), self.fork_of(name))
        else:
            self.feed(to, RRefProtocol.share_failed, self.rref_of(name), self.fork_of(name))

    def _deliver_fetch(self, to: int, name: str) -> None:
        self.feed(to, RRefProtocol.fetch_arrived, self.rref_of(name), self.fork_of(name), node(self.holder_of(name)))

    def _deliver_lost(self, to: int, other: int) -> None:
        self.feed(to, RRefProtocol.holder_lost, node(other))
        self.send(("lease", to, other))

    def _deliver_lease(self, to: int, other: int) -> None:
        self.feed(to, RRefProtocol.lease_ended, node(other))
        if self.returns:
            self.send(("found", to, other))

    def _deliver_found(self, to: int, other: int) -> None:
        self.feed(to, RRefProtocol.holder_found, node(other))

    def _die(self, worker: int) -> None:
        """Messages to the dead worker are lost, and so are its own control messages that were not delivered."""
        self.dead += (worker,)
        gone = [i for i in self.under_way if i[1] == worker or (i[0] == "control" and i[2] == worker)]
        for item in gone:
            self.take(item)
            if item[0] in ("call", "value"):
                name = str(item[2])
                self.send(("failed", self.step_of(name).at, name))
        for other in self.protocols:
            if other != worker:
                self.send(("lost", other, worker))

    def _suspect(self, who: int, whom: int) -> None:
        self.suspicions = tuple(pair for pair in self.suspicions if pair != (who, whom))
        self.suspected += ((who, whom),)
        self._deliver_lost(who, whom)
        if self.returns:
            self.send(("found", who, whom))

    # The invariants of every state.

    def check(self) -> None:
        for name, state in self.handles.items():
            worker, owner = self.holder_of(name), self.owner_of(name)
            if state == "live" and worker not in self.dead and owner not in self.dead:
                self.check_live(name, worker, owner)
        for worker, protocol in self.protocols.items():
            if worker not in self.dead:
                self.check_tables(protocol)

    def check_live(self, name: str, worker: int, owner: int) -> None:
        rref, fork = self.rref_of(name), self.fork_of(name)
        entry = self.protocols[owner].owners.entries.get(rref)
        if worker == owner:
            if self.step_of(name).kind != "value":  # one that was never shared is in no table
                assert entry is not None and fork in entry.local, f"G1: local handle {name} has no entry"
            return
        user = self.protocols[worker].users.forks.get(fork)
        assert user is not None and not user.dropped, f"G1: live handle {name} is not in the table"
        owners = self.protocols[owner].owners
        if node(worker) in owners.ended:
            return
        if user.confirmed and (node(worker), rref, fork) in owners.expired:
            refusal = ("control", worker, owner, Message(MessageKind.FORK_REFUSED, rref, fork, Reason.LEASE_EXPIRED))
            assert (entry and fork in entry.forks) or refusal in self.under_way, f"G4: the holder of {name} is not told"
            return
        if user.confirmed:
            assert entry is not None and entry.forks.get(fork) == node(worker), f"G1: {name} is confirmed, not counted"
        elif not user.creating:
            self.check_parent(name, user)

    def check_parent(self, name: str, user: UserFork) -> None:
        step = self.step_of(name)
        parent = self.protocols[step.at]
        declared = {(step.at, step.at), (step.at, step.to)} & set(self.suspected)
        if step.at in self.dead or step.holder in self.failed or declared:
            return
        assert user.fork in parent.users.parked, f"G2: {name} is pending, and its parent {step.holder} may go"
        assert self.fork_of(step.holder) in parent.users.forks, f"G2: the parent of {name} is gone"

    def check_tables(self, protocol: RRefProtocol) -> None:
        for entry in protocol.owners:
            shared_here = {fork for fork in entry.forks if fork.creator == protocol.me}  # such a message may find it
            for table in (entry.forks, entry.askers, entry.fetchers):
                holders = {holder for fork, holder in table.items() if fork not in shared_here}
                assert not holders & protocol.owners.ended, f"G4: {entry} counts forks of an ended lease"
        for user in protocol.users:
            assert user.owner not in protocol.lost or not user.confirmed, f"G5: {user} has a lost owner"
            for child in user.children:
                assert protocol.users.parked[child] == user.fork

    def check_end(self) -> None:
        assert not self.under_way
        for worker, protocol in self.protocols.items():
            if worker not in self.dead:
                assert is_empty(protocol), (
                    f"leak at {worker}: {list(protocol.owners)} {list(protocol.users)} {protocol.users.parked}"
                )

    # Copies, for walks over all states.

    def clone(self) -> World:
        return World(
            self.program, self.duplicates, self.losses, self.doubts, self.deaths, self.suspicions, self.returns,
            {worker: clone(protocol) for worker, protocol in self.protocols.items()},
            self.under_way, self.done, dict(self.handles), self.failed, self.dead, self.suspected, self.trace,
        )  # fmt: skip

    def key(self) -> object:
        return (
            self.under_way,
            self.done,
            frozenset(self.handles.items()),
            (self.failed, self.dead),
            (self.duplicates, self.losses, self.doubts, self.suspicions, self.suspected),
            tuple(protocol_key(protocol) for worker, protocol in self.protocols.items() if worker not in self.dead),
        )


def is_empty(protocol: RRefProtocol) -> bool:
    """Whether no reference is held, owned or waited for."""
    return not (protocol.owners.entries or protocol.users.forks or protocol.users.parked or protocol.users.creating)


def protocol_key(protocol: RRefProtocol) -> object:
    owned = frozenset(
        (e.rref, e.state, *(frozenset(t.items()) for t in (e.forks, e.local, e.askers, e.fetchers)))
        for e in protocol.owners
    )
    held = frozenset(
        (u.fork, u.creating, u.confirmed, u.dropped, u.parent_worker, frozenset(u.children)) for u in protocol.users
    )
    owners = protocol.owners
    refused = frozenset(owners.refused), frozenset(protocol.refused_shares), frozenset(owners.expired)
    return owned, held, frozenset(protocol.lost), frozenset(owners.ended), refused


def clone(protocol: NotedProtocol) -> NotedProtocol:
    copy = NotedProtocol(protocol.me)
    copy.lost |= protocol.lost
    copy.owners.waiting.update(protocol.owners.waiting)
    copy.owners.held.update(protocol.owners.held)
    copy.owners.ended |= protocol.owners.ended
    copy.owners.expired |= protocol.owners.expired
    copy.refused_shares |= protocol.refused_shares
    copy.owners.refused |= protocol.owners.refused
    for entry in protocol.owners:
        copied = copy.owners.entries[entry.rref] = OwnerEntry(entry.rref, State(entry.state))
        copied.forks, copied.local = dict(entry.forks), dict(entry.local)
        copied.askers, copied.fetchers = dict(entry.askers), dict(entry.fetchers)
    for user in protocol.users:
        held = UserFork(user.rref, user.fork, user.owner, creating=user.creating, parent_worker=user.parent_worker)
        held.confirmed, held.dropped, held.children = user.confirmed, user.dropped, dict(user.children)
        copy.users.forks[user.fork] = held
    copy.users.parked = dict(protocol.users.parked)
    copy.users.creating = dict(protocol.users.creating)
    return copy


def explore(world: World, limit: int = 400_000) -> int:
    """Visits every state that can be reached, and checks each; returns how many there are."""
    seen = {world.key()}
    stack = [world]
    while stack:
        current = stack.pop()
        moves = current.moves()
        if not moves:
            checked(current, current.check_end)
        for move in moves:
            following = current.clone()
            checked(following, lambda w=following, m=move: w.apply(m))
            key = following.key()
            if key not in seen:
                seen.add(key)
                checked(following, following.check)
                stack.append(following)
        assert len(seen) <= limit, f"more than {limit} states"
    return len(seen)


def checked(world: World, check: object) -> None:
    try:
        check()  # type: ignore[operator]
    except AssertionError as exc:
        raise AssertionError(f"{exc}\nafter\n" + "\n".join(f"  {move}" for move in world.trace)) from exc
