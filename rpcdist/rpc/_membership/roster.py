"""The list of workers, and the plan for sending its changes: pure bookkeeping, without clock, socket or waiting.

A world is *static* (every worker gives the same size; ranks 0 to size - 1) or *dynamic* (size 0: workers join and
leave). The first worker decides. Rules:

 1. Names and ranks are unique among living workers.
 2. A static world *forms* when all workers have joined. Before that, two workers that contradict each other (name,
    rank, size, kind) *break* it: since it is unknown which of them is right, all workers, later ones too, get the same
    answer.
 3. A static world that has formed accepts only replacements: the name and rank of a worker that was lost or has left.
    Other workers are refused, without effect on the members.
 4. An incarnation that was declared lost returns only if it is found alive while its place is still free.
 5. A worker that stops waiting before the world has formed counts as one that never joined.
 6. When the last worker is gone, the next one decides again.
 7. `version` grows with every change of the list of workers. `since(v)` returns the changes since version v, which turn
    a list of any version from v on into the current one.
 8. A coordinator that replaced another one takes back the workers of that one's list, each when it announces itself or
    answers. When all have, or on timeout, the world has formed, even if workers are missing. Their places are
    then free for workers of any name, since the names of the missing may be unknown.

Members are notified of changes by these rules (`roster_news.py` sends them):

 1. A member knows a version: that of the answer to its joining, or the one that it has confirmed. Nothing else counts.
 2. At any time one difference is on its way to a member, from the version that it knows. Later changes are merged into
    the next difference.
 3. A member that joins gets its list with the answer, and no difference before.
 4. A confirmation states what the member knows, even if that is less than expected: then the next difference begins
    there. So every member ends with the current list, once the changes end and its messages arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rpcdist._proto.membership_pb2 import JoinReply
from rpcdist.errors import ConfigError, listed
from rpcdist.ids import Identity, check_worker_name
from rpcdist.rpc._peers.directory import Member, Roster

Outcome = JoinReply.Outcome
MAX_DEPARTURES = 4096
"""Limit on the departures that are kept for differences; a worker that knows none of them gets the whole list."""
MAX_WORLD_SIZE = 1 << 20  # bounds the list of missing ranks of a world that has not formed

_OTHER_JOB = "; if they belong to two jobs, give each job its own address (MASTER_PORT)"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a worker that wants to join: what is wrong, what to do, and the missing ranks."""

    outcome: JoinReply.Outcome
    detail: str = ""
    missing: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.outcome == Outcome.OK


_OK = Verdict(Outcome.OK)


class MembershipTable:
    """The coordinator's list of workers.

    Attributes:
        world_size: None before the first worker, 0 for a dynamic world.
        formed: whether a static world is complete; once true, it stays so until the last worker is gone.
        broken: the contradiction that ended a static world before it formed.
        version: grows with every change.
    """

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.formed = False
        self.broken: Verdict | None = None
        self.version = 0
        self._living: dict[str, Member] = {}  # in the order of joining
        self._by_rank: dict[int, Member] = {}
        self._came: dict[str, int] = {}  # the version with which each of them joined
        self._gone: dict[Identity, tuple[int, str]] = {}  # version and reason of the latest departures, in order
        self._whole_before = 0  # versions before this one are too old for a difference
        self._sorted: tuple[Member, ...] | None = None
        self._places: set[str | int] = set()  # names and ranks that a worker has had in this world
        self._vacant: dict[str, Identity] = {}  # places of a formed static world that a replacement may take
        self._lost: dict[int, Member] = {}  # by incarnation
        self._was_restored = False
        self._gave_up: set[int] = set()  # ranks that joined, but stopped waiting before the world formed
        self._known: dict[Identity, int] = {}  # the version that each member knows
        self._under_way: dict[Identity, int] = {}  # the version of the difference on its way to each member
        self._joining: set[Identity] = set()

    @property
    def members(self) -> Sequence[Member]:
        if self._sorted is None:
            self._sorted = tuple(member for _, member in sorted(self._by_rank.items()))
        return self._sorted

    def __len__(self) -> int:
        return len(self._living)

    def __contains__(self, identity: Identity) -> bool:
        member = self._living.get(identity.name)
        return member is not None and member.identity == identity

    def has_rank(self, rank: int) -> bool:
        return rank in self._by_rank

    def had_place(self, identity: Identity) -> bool:
        """Whether another worker has had this name or rank since this world began."""
        return identity.name in self._places or identity.id in self._places

    def since(self, version: int) -> Roster:
        """The changes since a version, merged: the workers that joined and are present, and those that are gone (rule
        7).

        For a version of 0, or one that is too old, it is the whole list.
        """
        if version < max(self._whole_before, 1):
            gone = {identity: reason for identity, (_, reason) in self._gone.items()}
            return Roster(self.version, self.members, gone)
        came, went = [], {}
        for name, member in reversed(self._living.items()):
            if self._came[name] <= version:
                break
            came.append(member)
        for identity, (at, reason) in reversed(self._gone.items()):
            if at <= version:
                break
            went[identity] = reason
        return Roster(self.version, came[::-1], dict(reversed(went.items())), version)

    # ------------------------------------------------------------ the versions that members know

    def joins(self, identity: Identity) -> None:
        """Records that a worker has asked to join, and waits for the answer (rule 3 of the news)."""
        self._joining.add(identity)

    def has_joined(self, identity: Identity) -> None:
        self._joining.discard(identity)

    def confirmed(self, identity: Identity, version: int) -> bool:
        """Records that a member knows a version (rule 4). False if it is no member, or there is no such version."""
        if identity not in self or version > self.version:
            return False
        self._known[identity] = version
        self._under_way.pop(identity, None)
        return True

    def unaware_of(self, version: int) -> Iterator[Identity]:
        """Members that were answered, and do not know this version yet."""
        return (one for one, known in self._known.items() if known < version and one not in self._joining)

    def due(self) -> list[tuple[Identity, int]]:
        """The members that must be notified now, each with the version that it knows; records that they are."""
        found = []
        for member in self.members:
            identity = member.identity
            known = self._known.get(identity, 0)
            if known < self.version and identity not in self._joining and identity not in self._under_way:
                self._under_way[identity] = self.version
                found.append((identity, known))
        return found

    # ------------------------------------------------------------ workers that join and leave

    @property
    def missing(self) -> list[int]:
        """The ranks of a static world that are absent; before it has formed, those that have never joined."""
        present = self._by_rank.keys() | self._gave_up
        return [rank for rank in range(self.world_size or 0) if rank not in present]

    @property
    def timed_out(self) -> Verdict:
        """The answer to a worker that has waited too long; call this before the worker is withdrawn."""
        gone = ", ".join(map(str, sorted(self._gave_up)))
        detail = f"joined, but stopped waiting: rank {gone}" if gone else ""
        return Verdict(Outcome.TIMED_OUT, detail, tuple(self.missing))

    def join(self, member: Member, world_size: int) -> Verdict:
        """Decides whether a worker may join; if so, it is in the list afterwards. The same worker may ask again.

        Args:
            member: the worker; its id is its rank.
            world_size: 0 for a dynamic world.

        Raises:
            ConfigError: the name is malformed, or the world size negative.
        """
        check_worker_name(member.identity.name)
        if world_size < 0:
            raise ConfigError(f"world_size is {world_size}; give the number of workers, or None if they join and leave")
        if self.broken is not None:
            return self.broken
        verdict = self._own_contradiction(member, world_size)
        if not verdict.ok or self._known_again(member, world_size):
            return verdict
        contradiction = self._contradiction(member, world_size)
        if contradiction is not None:
            if self.world_size and not self.formed:
                self.broken = contradiction
            return contradiction
        if self.formed and not self._may_replace(member.identity):
            return self._full(member)
        self._accept(member, world_size)
        return _OK

    def take_back(self, member: Member, world_size: int, version: int) -> Verdict:
        """Takes back a worker of the previous coordinator's list that announces itself (rule 8).

        Args:
            version: the version of the list that it knows, from which this list's versions continue.

        Raises:
            ConfigError: the name is malformed, or the world size negative.
        """
        check_worker_name(member.identity.name)
        if self.broken is not None:
            return self.broken
        self.found(member.identity)  # if this coordinator had declared it lost before
        verdict = self._own_contradiction(member, world_size)
        if not verdict.ok:
            return verdict
        if self._known_again(member, world_size):
            self.version = max(self.version, version)
            return verdict
        contradiction = self._contradiction(member, world_size)
        if contradiction is not None:  # no newcomer is wrong, so the world does not break
            return contradiction
        self.version = max(self.version, version)
        self._accept(member, world_size)
        return _OK

    def dismiss(self, identity: Identity, reason: str = "") -> None:
        """Removes a returned worker that belongs to an earlier job, and frees its place for any worker."""
        if self.lost(identity, reason):
            self._vacant.pop(identity.name, None)
            self.formed = False

    def end_restoring(self) -> None:
        """Ends the recovery: all workers of the previous list have returned, or the time limit has expired (rule 8)."""
        self.formed = self._was_restored = bool(self.world_size)

    def withdraw(self, identity: Identity) -> bool:
        """Records that a worker no longer waits for the world to form (rule 5). False if it is not waiting."""
        if self.formed or not self.world_size or not self._remove(identity):
            return False
        if self._living:
            self._gave_up.add(identity.id)
        return True

    def leave(self, identity: Identity) -> bool:
        return self._remove(identity)

    def lost(self, identity: Identity, reason: str = "") -> bool:
        """Removes an incarnation that was declared dead (rule 4). False if it is not listed, for instance replaced."""
        member = self._living.get(identity.name)
        if member is None or not self._remove(identity, reason):
            return False
        self._lost[identity.incarnation] = member  # unlike one that left, which may return in the same process
        return True

    def found(self, identity: Identity) -> bool:
        """Restores an incarnation that was declared lost, but lives (rule 4). False if its place is taken."""
        member = self._lost.get(identity.incarnation)
        if member is None or member.identity != identity or self.world_size is None:
            return False
        if identity.name in self._living or identity.id in self._by_rank:
            return False
        del self._lost[identity.incarnation]
        self._accept(member, self.world_size)
        return True

    def _own_contradiction(self, member: Member, world_size: int) -> Verdict:
        """Something wrong with this worker alone, which does not affect the others."""
        identity = member.identity
        if identity.incarnation in self._lost:
            return Verdict(
                Outcome.INCARNATION_GONE,
                f"worker {identity.name!r} was declared lost, and the others have continued without this process; "
                "start a new process to take its place",
            )
        if identity.id < 0 or (world_size and identity.id >= world_size):
            bounds = f"0 to {world_size - 1} for world_size={world_size}" if world_size else "0 or more"
            text = f"the rank of worker {identity.name!r} is {identity.id}, but must be {bounds}"
            return Verdict(Outcome.ID_OUT_OF_RANGE, f"{text}; check RANK and WORLD_SIZE")
        if world_size > MAX_WORLD_SIZE:
            return Verdict(Outcome.ID_OUT_OF_RANGE, f"world_size is {world_size}, but may be at most {MAX_WORLD_SIZE}")
        return _OK

    def _known_again(self, member: Member, world_size: int) -> bool:
        """Whether the same incarnation asks again, because its connection broke while it waited."""
        known = self._living.get(member.identity.name)
        if known is None or known.identity != member.identity or world_size != self.world_size:
            return False
        if known != member:
            self._enter(member)
        return True

    def _contradiction(self, member: Member, world_size: int) -> Verdict | None:
        if self.world_size is not None and world_size != self.world_size:
            return self._other_world(member, world_size)
        name, rank = member.identity.name, member.identity.id
        same_name = self._living.get(name)
        if same_name is not None:
            text = f"RPC worker name {name} is not unique: {same_name} and {member} share it"
            return Verdict(Outcome.DUPLICATE_NAME, f"{text}; give every worker its own name{_OTHER_JOB}")
        if (same_rank := self._by_rank.get(rank)) is not None:
            text = f"rank {rank} is not unique: {same_rank} and {member} share it"
            return Verdict(Outcome.DUPLICATE_ID, f"{text}; give every worker its own rank (RANK){_OTHER_JOB}")
        return None

    def _may_replace(self, identity: Identity) -> bool:
        place = self._vacant.get(identity.name)
        if place is not None:
            return place.id == identity.id
        return self._was_restored and all(place.id != identity.id for place in self._vacant.values())

    def _other_world(self, member: Member, world_size: int) -> Verdict:
        there = listed(self.members, 3) or "no worker that is left"
        if not world_size or not self.world_size:
            static, dynamic = (str(member), there) if world_size else (there, str(member))
            return Verdict(
                Outcome.STATIC_AND_DYNAMIC,
                "RPC group mixes statically and dynamically initialized members which is not supported. "
                f"With a world_size: {static}; without: {dynamic}. Give all of them the same one, or none of them any",
            )
        return Verdict(
            Outcome.WORLD_SIZE_DIFFERS,
            f"the world sizes differ: {member} was started with world_size={world_size}, but {there} with world_size="
            f"{self.world_size}; give all of them the same one (WORLD_SIZE)",
        )

    def _full(self, member: Member) -> Verdict:
        vacant = ", ".join(f"{place.name!r} (rank {place.id})" for place in self._vacant.values()) or "none"
        return Verdict(
            Outcome.WORLD_FULL,
            f"the world of {self.world_size} workers is complete, and {member} does not replace a worker that was lost "
            f"(places to take over, with the same name and rank: {vacant}); start the job with a larger world_size, or "
            "with world_size=None if workers join and leave",
        )

    def _accept(self, member: Member, world_size: int) -> None:
        self.world_size = world_size
        self._enter(member)
        self._vacant.pop(member.identity.name, None)
        self._gave_up.discard(member.identity.id)
        if world_size and len(self._living) == world_size:
            self.formed = True

    def _enter(self, member: Member) -> None:
        """Adds a worker to the list, or its new address, as the latest one."""
        name, rank, _ = member.identity
        self._living.pop(name, None)
        self._living[name] = self._by_rank[rank] = member
        self._gone.pop(member.identity, None)
        self._places |= {name, rank}
        self._sorted = None
        self.version += 1
        self._came[name] = self.version

    def _remove(self, identity: Identity, reason: str = "") -> bool:
        if identity not in self:
            return False
        del self._living[identity.name], self._by_rank[identity.id], self._came[identity.name]
        self._sorted = None
        self.version += 1
        self._gone[identity] = self.version, reason
        self._known.pop(identity, None)
        self._under_way.pop(identity, None)
        if len(self._gone) > MAX_DEPARTURES:
            self._whole_before, _ = self._gone.pop(next(iter(self._gone)))
        if self.formed:
            self._vacant[identity.name] = identity
        if not self._living and self.broken is None:
            self.world_size = None
            self.formed = self._was_restored = False
            self._vacant.clear()
            self._gave_up.clear()
            self._places.clear()
        return True
