"""Every member ends with the list of now, whatever is lost, late or merged on the way; pure, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from full_sets import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_workers import B2, A, B, C, record, worker

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.rpc._membership import roster as roster_module
from rpcdist.rpc._membership.roster import MembershipTable
from rpcdist.rpc._membership.roster_messages import members_from_bytes, members_to_bytes, news_message, news_of
from rpcdist.rpc._peers.directory import Directory, MemberEvent, Roster


class Asked:
    """A member's I/O loop: what it would ask the coordinator in the background is counted."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[MemberEvent] = []

    def call_soon(self, action: Any, *args: Any) -> None:
        if args:
            action(*args)
        else:
            self.count += 1


class Job:
    """A coordinator and its members, with their messages under way; each step is one event."""

    def __init__(self) -> None:
        self.table = MembershipTable()
        self.members: dict[Identity, tuple[Directory, Asked]] = {}
        self.to_members: list[tuple[Identity, pb.MembershipMessage]] = []
        self.to_coordinator: list[tuple[Identity, int]] = []
        self.num_started = 0

    def join(self, rank: int) -> None:
        self.num_started += 1
        who = Identity(f"w{rank}", rank, self.num_started)
        if not self.table.join(record(who), 0).ok:
            return
        asked: Any = Asked()
        roster = Roster(self.table.version, members_from_bytes(members_to_bytes(self.table.members)))
        refuse: Any = None  # nobody asks
        self.members[who] = (
            Directory(who, roster, refuse, refuse, asked, lambda gone: None, asked.events.append),
            asked,
        )
        self.table.confirmed(who, self.table.version)

    def go(self, number: int, how: str) -> None:
        living = self.table.members
        if not living:
            return
        who = living[number % len(living)].identity
        assert self.table.leave(who) if how == "leave" else self.table.lost(who, "silent")

    def found(self, number: int) -> None:
        """One that was declared lost shows that it lives: it gets the whole list."""
        lost = [who for who in self.members if who not in self.table]
        if lost and self.table.found(who := lost[number % len(lost)]):
            self.table.confirmed(who, 0)

    def tell(self) -> None:
        for who, known in self.table.due():
            self.to_members.append((who, news_message(self.table.since(known))))

    def hear(self, number: int) -> None:
        """Messages to one member arrive in order, those to different members in any."""
        if not self.to_members:
            return
        who = self.to_members[number % len(self.to_members)][0]
        index = next(i for i, (to, _) in enumerate(self.to_members) if to == who)
        _, message = self.to_members.pop(index)
        self.members[who][0].update(news_of(pb.MembershipMessage.FromString(message.SerializeToString())))
        self.to_coordinator.append((who, self.members[who][0].version))

    def confirm(self, number: int) -> None:
        if self.to_coordinator:
            who, version = self.to_coordinator.pop(number % len(self.to_coordinator))
            self.table.confirmed(who, version)

    def miss(self, number: int) -> None:
        """A member takes no notice of a message, as it does not believe the sender yet, and asks for the list later."""
        if self.to_members:
            who, _ = self.to_members.pop(number % len(self.to_members))
            self.refresh(who)

    def refresh(self, who: Identity) -> None:
        if who in self.table:
            self.members[who][0].update(Roster(self.table.version, self.table.members))
            self.table.confirmed(who, self.table.version)

    def settle(self) -> None:
        """No more changes; the messages arrive, and those that have asked for the list get it."""
        for _ in range(1000):
            for who, (_, asked) in self.members.items():
                if asked.count and who in self.table:
                    asked.count = 0
                    self.refresh(who)
            self.tell()
            if not self.to_members and not self.to_coordinator:
                return
            self.hear(0)
            self.confirm(0)
        raise AssertionError("the messages do not end")


STEPS = st.tuples(
    st.sampled_from(["join", "leave", "lost", "found", "tell", "hear", "confirm", "miss", "tell", "hear", "confirm"]),
    st.integers(0, 7),
)


@settings(max_examples=num_examples(300, 5000), deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from([2, 4096]))
def test_every_member_ends_with_the_list_of_now(steps: Sequence[tuple[str, int]], most_departures: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(roster_module, "MAX_DEPARTURES", most_departures)
        job = Job()
        for what, number in steps:
            if what in ("leave", "lost"):
                job.go(number, what)
            elif what == "tell":
                job.tell()
            else:
                getattr(job, what)(number)
        job.settle()
    for member in job.table.members:
        directory, asked = job.members[member.identity]
        assert directory.living() == list(job.table.members)
        assert directory.version == job.table.version
        present: set[Identity] = set()  # what the events of this member say
        for event in asked.events:
            (present.add if event.kind == "joined" else present.discard)(event.member.identity)
        came_later = {who.identity for who in directory.living()} & present
        assert present == came_later


def table_of(*who: Identity) -> MembershipTable:
    table = MembershipTable()
    for identity in who:
        assert table.join(record(identity), 0).ok
    return table


def test_a_difference_names_who_came_and_who_went() -> None:
    table = table_of(A, B, C)
    before = table.version
    assert table.lost(B, "silent") and table.join(record(B2), 0).ok and table.leave(C)
    assert table.since(before) == Roster(before + 3, [record(B2)], {B: "silent", C: ""}, before)
    assert table.since(before + 1) == Roster(before + 3, [record(B2)], {C: ""}, before + 1)
    assert table.since(before + 3) == Roster(before + 3, [], {}, before + 3)
    assert table.since(0).members == (record(A), record(B2)) and table.since(0).base == 0


def test_who_came_back_meanwhile_did_not_go() -> None:
    table = table_of(A, B)
    before = table.version
    assert table.lost(B, "silent") and table.found(B)
    assert table.since(before) == Roster(before + 2, [record(B)], {}, before)


def test_a_version_that_is_too_old_gets_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "MAX_DEPARTURES", 1)
    table = table_of(A, B, C)
    before = table.version
    assert table.leave(B)
    assert table.since(before).base == before
    assert table.leave(C)
    assert (table.since(before).base, table.since(before).members) == (0, (record(A),))
    assert table.since(before + 1).base == before + 1


def test_one_message_is_under_way_and_the_next_has_all_that_came_meanwhile() -> None:
    table = table_of(A)
    table.confirmed(A, table.version)
    known = table.version
    assert table.due() == []
    table.join(record(B), 0)
    table.joins(B)
    assert table.due() == [(A, known)] and table.due() == []
    table.confirmed(B, table.version)
    table.has_joined(B)
    table.join(record(C), 0)
    table.joins(C)
    assert table.due() == [(B, known + 1)]
    assert set(table.unaware_of(table.version)) == {A, B}
    table.confirmed(A, known + 1)
    assert table.due() == [(A, known + 1)]
    table.confirmed(A, known)  # it says that it knows less: the next one begins there
    assert table.due() == [(A, known)]
    assert table.leave(A)
    assert set(table.unaware_of(table.version)) == {B}


def test_what_a_member_claims_is_compared_with_what_there_is() -> None:
    table = table_of(A, B)
    assert not table.confirmed(A, table.version + 1) and not table.confirmed(worker("z", 9), 1)
    assert table.due() == [(A, 0), (B, 0)]


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="a list of workers cannot be parsed"):
        members_from_bytes(b"\xff\xff\xff")
