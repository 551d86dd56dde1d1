"""Views of the tables, for people and for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from rpcdist.inspection import Holder, ReferenceFacts
from rpcdist.rpc._rref.messages import Incarnation, RRefId
from rpcdist.rpc._rref.owner import State
from rpcdist.rpc._rref.protocol import RRefProtocol


@dataclass(frozen=True, slots=True)
class LiveRRef:
    """One reference that this worker owns or holds.

    Attributes:
        rref: its id.
        owner: the owner's name.
        state: at the owner "expected", "creating" or "ready"; at a user "pending", "confirmed" or "parked" (kept only
            until a share of it is settled).
        holders: the names of the workers that hold it, as far as this worker knows; one for each fork.
    """

    rref: RRefId
    owner: str
    state: str
    holders: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rref} at {self.owner}: {self.state}, held by {', '.join(self.holders) or 'nobody'}"


def live_rrefs(protocol: RRefProtocol, name_of: Callable[[Incarnation], str]) -> list[LiveRRef]:
    me = name_of(protocol.me)
    found = []
    for entry in protocol.owners:
        holders = [name_of(node) for node in entry.forks.values()] + [me] * len(entry.local)
        found.append(LiveRRef(entry.rref, me, entry.state.value, tuple(sorted(holders))))
    for user in protocol.users:
        state = "parked" if user.dropped else "confirmed" if user.confirmed else "pending"
        holders = [me] * (not user.dropped) + [name_of(node) for node in user.children.values()]
        found.append(LiveRRef(user.rref, name_of(user.owner), state, tuple(holders)))
    return found


def reference_facts(
    protocol: RRefProtocol,
    name_of: Callable[[Incarnation], str],
    value_of: Callable[[RRefId], str],
    now: float,
    most: int,
) -> list[ReferenceFacts]:
    """The references that this worker owns and holds, `most` of either. No lock: each table is copied in one step."""
    me = name_of(protocol.me)
    since = protocol.owners.since
    found = []
    for entry in list(islice(protocol.owners.entries.values(), most)):
        forks = list(islice(entry.forks.items(), most))
        holders = [Holder(name_of(node), now - since[fork] if fork in since else None) for fork, node in forks]
        holders += [Holder(me)] * len(entry.local)
        found.append(ReferenceFacts(repr(entry.rref), me, entry.state.value, value_of(entry.rref), tuple(holders)))
    for user in list(islice(protocol.users.forks.values(), most)):
        state = "parked" if user.dropped else "confirmed" if user.confirmed else "pending"
        holders = [Holder(me)] * (not user.dropped)
        holders += [Holder(name_of(node)) for node in list(user.children.values())]
        found.append(ReferenceFacts(repr(user.rref), name_of(user.owner), state, "", tuple(holders)))
    return found


def counts(protocol: RRefProtocol) -> dict[str, str]:
    """torch's counters: values that only local handles keep are not counted."""
    owned = [entry for entry in protocol.owners if entry.forks or entry.state is not State.READY]
    return {
        "num_owner_rrefs": str(len(owned)),
        "num_pending_users": str(sum(not user.confirmed for user in protocol.users)),
        "num_forks": str(sum(len(entry.forks) for entry in owned)),
        "num_pending_futures": str(len(protocol.users.parked)),
    }


def leaks(protocol: RRefProtocol) -> str:
    """A text that names the leaks; empty if no other living worker holds a value of this one."""
    lines = []
    for entry in protocol.owners:
        forks = [fork for fork, node in entry.forks.items() if node not in protocol.lost]
        if forks:
            lines.append(f"Leaking RRef {entry.rref} with fork Ids: {', '.join(map(str, forks))}")
    return "\n".join(lines)


def is_held(protocol: RRefProtocol) -> bool:
    """Whether a value of this worker is in use. Those that only lost workers hold end with their leases."""
    return any(
        not entry.forks or any(node not in protocol.lost for node in entry.forks.values()) for entry in protocol.owners
    )
