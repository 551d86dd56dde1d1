"""The members of the job: the rules as tables, and the waiting with calls in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_workers import (
    A2,
    B2,
    FULL,
    GONE,
    ID,
    KIND,
    NAME,
    OK,
    RANGE,
    SIZE,
    A,
    B,
    C,
    D,
    Outcome,
    ask,
    record,
    settled,
    until_waiting,
    worker,
)

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import CallRefused, ConfigError, DuplicateName, RendezvousError, RpcdistError, WorldMismatch
from rpcdist.ids import Identity
from rpcdist.inspection import Strangers
from rpcdist.rpc._membership import coordinator
from rpcdist.rpc._membership.coordinator import Coordinator
from rpcdist.rpc._membership.roster import MembershipTable
from rpcdist.rpc._membership.roster_messages import join_request, members_of
from rpcdist.rpc._membership.roster_service import MembershipService
from rpcdist.rpc._peers.directory import Member, Roster
from rpcdist.testing import LIMIT_S, UNIT_S
from rpcdist.transport.identities import identity_to_proto


class Join(NamedTuple):
    who: Identity
    world_size: int
    outcome: pb.JoinReply.Outcome = OK


class Gone(NamedTuple):
    """One of the three ways to go: "leave", "lost" or "withdraw"."""

    how: str
    who: Identity
    known: bool = True


WORLD2 = [Join(A, 2), Join(B, 2)]

TABLES: dict[str, list[Join | Gone]] = {
    "a static world": [Join(B, 3), Join(A, 3), Join(C, 3)],
    "a dynamic world": [Join(A, 0), Join(D, 0), Gone("leave", A), Join(B, 0), Join(A2, 0)],
    "asking again": [Join(A, 2), Join(A, 2), Join(B, 2), Join(A, 2), Join(B, 2)],
    "the same name": [Join(A, 3), Join(worker("a", 1), 3, NAME), Join(C, 3, NAME)],
    "the same name and rank, started twice": [Join(A, 3), Join(A2, 3, NAME)],
    "the same rank": [Join(A, 3), Join(worker("b", 0, 7), 3, ID), Join(C, 3, ID)],
    "other sizes": [Join(A, 3), Join(B, 4, SIZE), Join(C, 3, SIZE)],
    "a size that differs when asking again": [Join(A, 3), Join(A, 2, SIZE)],
    "rank out of range spoils nothing": [Join(A, 2), Join(C, 2, RANGE), Join(B, 2)],
    "negative rank": [Join(worker("a", -1, 5), 2, RANGE), Join(worker("a", -1, 5), 0, RANGE)],
    "dynamic among static": [Join(A, 2), Join(B, 0, KIND), Join(B, 2, KIND)],
    "static among dynamic": [Join(A, 0), Join(B, 2, KIND), Join(B, 0)],
    "dynamic into a complete static world": [*WORLD2, Join(C, 0, KIND), Join(A, 2)],
    "other size into a complete world": [*WORLD2, Join(C, 3, SIZE), Join(A, 2)],
    "a late comer": [*WORLD2, Join(worker("z", 1, 9), 2, ID), Join(worker("b", 1, 9), 2, NAME), Join(A, 2)],
    "a late comer on a free place": [*WORLD2, Gone("lost", B), Join(worker("z", 1, 9), 2, FULL), Join(B2, 2)],
    "a replacement of another rank": [Join(A, 3), Join(B, 3), Join(C, 3), Gone("lost", B), Gone("lost", C),
                                      Join(worker("b", 2, 9), 3, FULL), Join(B2, 3)],
    "a replacement of one that left": [*WORLD2, Gone("leave", B), Join(B2, 2)],
    "the lost one does not come back": [*WORLD2, Gone("lost", B), Join(B, 2, GONE), Join(B2, 2), Join(B, 2, GONE)],
    "the one that left may": [*WORLD2, Gone("leave", B), Join(B, 2)],
    "old news about a replaced one": [*WORLD2, Gone("lost", B), Join(B2, 2), Gone("lost", B, False),
                                      Gone("leave", B, False), Join(B2, 2)],
    "withdrawing while it forms": [Join(A, 3), Join(B, 3), Gone("withdraw", A), Join(A2, 3), Join(C, 3)],
    "lost while it forms": [Join(A, 3), Join(B, 3), Gone("lost", A), Join(A2, 3), Join(C, 3), Join(A, 3, GONE)],
    "withdrawing is too late": [*WORLD2, Gone("withdraw", A, False)],
    "withdrawing from a dynamic world": [Join(A, 0), Gone("withdraw", A, False)],
    "the next world may be another one": [*WORLD2, Gone("leave", A), Gone("leave", B), Join(A, 3), Join(C, 3)],
    "after everybody withdrew": [Join(A, 2), Gone("withdraw", A), Join(A, 0), Join(B, 0)],
    "dynamic names": [Join(A, 0), Join(worker("a", 1), 0, NAME), Join(B, 0), Join(worker("c", 1, 9), 0, ID)],
    "dynamic replacement": [Join(A, 0), Join(B, 0), Gone("lost", B), Join(worker("b", 7, 9), 0), Join(B, 0, GONE)],
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_rules(name: str) -> None:
    table = MembershipTable()
    for step, event in enumerate(TABLES[name]):
        before, version = table.members, table.version
        if isinstance(event, Join):
            verdict = table.join(record(event.who), event.world_size)
            assert verdict.outcome == event.outcome, (step, event, verdict)
            assert (record(event.who) in table.members) is verdict.ok or table.broken is not None
            assert bool(verdict.detail) is not verdict.ok
        else:
            ways: dict[str, Callable[[Identity], bool]] = {
                "leave": table.leave, "lost": table.lost, "withdraw": table.withdraw
            }  # fmt: skip
            assert ways[event.how](event.who) is event.known, (step, event)
        assert (table.version != version) is (table.members != before), step


@pytest.mark.parametrize(("size", "formed"), [(1, [True]), (3, [False, False, True]), (0, [False, False, False])])
def test_a_world_forms_with_its_last_worker(size: int, formed: list[bool]) -> None:
    table = MembershipTable()
    seen = []
    for identity in (A, B, C)[: len(formed)]:
        table.join(record(identity), size)
        seen.append(table.formed)
    assert seen == formed
    assert [member.identity for member in table.members] == [A, B, C][: len(formed)]


def test_a_broken_world_stays_broken_for_everybody() -> None:
    table = MembershipTable()
    table.join(record(A), 3)
    first = table.join(record(worker("a", 1)), 3)
    assert table.broken == first
    assert table.join(record(worker("z", 2)), 3) == first == table.join(record(A), 3)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([(A, 3), (worker("a", 1), 3)], ["RPC worker name a is not unique", "rank 0", "rank 1", "127.0.0.1:5100"]),
        ([(A, 3), (worker("b", 0, 7), 3)], ["rank 0 is not unique", "'a'", "'b'", "RANK"]),
        ([(A, 3), (B, 4)], ["world_size=4", "world_size=3", "'a'", "'b'", "WORLD_SIZE"]),
        (
            [(A, 3), (B, 0)],
            ["RPC group mixes statically and dynamically initialized members which is not supported.", "'a'"],
        ),
        ([(A, 0), (B, 3)], ["mixes statically and dynamically", "With a world_size: 'b'", "without: 'a'"]),
        ([(D, 3)], ["rank of worker 'd' is 3", "0 to 2", "WORLD_SIZE"]),
        ([(A, 1), (worker("z", 0, 9), 1)], ["rank 0 is not unique"]),
    ],
)
def test_what_is_wrong_and_what_to_do_is_said(events: list[tuple[Identity, int]], says: list[str]) -> None:
    table = MembershipTable()
    detail = [table.join(record(identity), size).detail for identity, size in events][-1]
    assert [part for part in says if part not in detail] == [], detail


@pytest.mark.parametrize(("name", "size"), [("", 2), ("a b", 2), ("x" * 128, 2), ("a", -1)])
def test_malformed_requests_change_nothing(name: str, size: int) -> None:
    table = MembershipTable()
    with pytest.raises(ConfigError):
        table.join(record(Identity(name, 0, 1)), size)
    assert (table.version, table.world_size, table.members) == (0, None, ())


events = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "join", "leave", "lost", "withdraw"]),
        st.sampled_from("abc"), st.integers(-1, 3), st.integers(1, 4), st.sampled_from([0, 2, 3, 3, 3]),
    ),
    max_size=30,
)  # fmt: skip


@given(events)
def test_invariants_hold_whatever_happens(happenings: list[tuple[str, str, int, int, int]]) -> None:
    table, lost = MembershipTable(), set()
    for what, name, rank, incarnation, size in happenings:
        identity = Identity(name, rank, incarnation)
        formed, version = table.formed, table.version
        if what == "join":
            was_there = identity in [member.identity for member in table.members]
            if table.join(record(identity), size).ok:
                assert incarnation not in lost or was_there
                assert identity in [member.identity for member in table.members]
        elif getattr(table, what)(identity) and what == "lost":
            lost.add(incarnation)
        members = [member.identity for member in table.members]
        assert len({member.name for member in members}) == len({member.id for member in members}) == len(members)
        assert table.version >= version
        if table.world_size:
            assert all(0 <= member.id < table.world_size for member in members)
            assert (len(members) < table.world_size) or table.formed
        if formed and members:
            assert table.formed
        if not members and table.broken is None:
            assert table.world_size is None


# ---------------------------------------------------------------- the service


async def test_everybody_is_answered_when_the_last_one_comes() -> None:
    service = MembershipService()
    first = ask(service, A, 3)
    second = ask(service, C, 3)
    await until_waiting(service, 2)
    assert not first.done() and not second.done()
    third = ask(service, B, 3)
    assert await settled(first, second, third) == [OK, OK, OK]
    for task in (first, second, third):
        reply = task.result()
        assert members_of(reply, A, "here", 1.0) == Roster(3, (record(A), record(B), record(C)))
        assert reply.version == 3
    assert (await service.members(A, pb.MembersRequest())).members == reply.members


async def test_a_dynamic_world_answers_at_once() -> None:
    service = MembershipService()
    assert await settled(ask(service, A, 0)) == [OK]
    assert await settled(ask(service, B, 0)) == [OK]


async def test_a_coordinator_that_has_left_as_the_last_one_takes_in_nobody() -> None:
    service = MembershipService()
    assert await settled(ask(service, A, 0), ask(service, B, 0)) == [OK, OK]
    assert not await service.alone(A, 0.01)
    assert await settled(ask(service, C, 0)) == [OK]  # the time was over, so it goes on
    for other in (B, C):
        await service.leave(other, pb.LeaveRequest(identity=identity_to_proto(other)))
    assert await service.alone(A, LIMIT_S)
    late = ask(service, B, 0)
    assert await settled(late) == [Outcome.TIMED_OUT] and "is leaving the job" in late.result().detail
    assert [member.identity for member in service.table.members] == [A]


class HereOnly:
    """A network whose coordinator is in this process."""

    strangers = Strangers(silent=2)

    def run(
        self, coroutine: Coroutine[Any, Any, pb.JoinReply], limit_s: float | None, may_give_up: bool
    ) -> pb.JoinReply:
        return asyncio.run(coroutine)


def test_init_says_whom_it_waits_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "INIT_NOTICE_S", UNIT_S)
    here: Any = HereOnly()
    joining = Coordinator(here, "127.0.0.1:1", A, MembershipService())
    assert joining.join(Member(A, "127.0.0.1:1", ""), 4, 2 * UNIT_S).outcome == Outcome.TIMED_OUT
    assert [record.message for record in caplog.records] == [
        f"init_rpc of 'a' (rank 0) still waits after {UNIT_S:g} s for rank 1, 2, 3 of 4; those in the job so far: a"
        ". 2 connections failed in TLS; check that the missing workers have the same job token, "
        "and clocks that differ from this one by less than a day"
    ]


def test_most_workers_of_a_large_world_do_not_ask_whom_they_wait_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers, with the whole list for each of them, would delay the coordinator."""
    monkeypatch.setattr(coordinator, "INIT_NOTICE_S", UNIT_S)
    here: Any = HereOnly()
    service = MembershipService()
    monkeypatch.setattr(service, "members", None)
    late = Identity("late", 64, 9)
    joining = Coordinator(here, "10.0.0.1:29500", late, service)
    assert joining.join(Member(late, "127.0.0.1:1", ""), 100, 2 * UNIT_S).outcome == Outcome.TIMED_OUT
    assert [record.message for record in caplog.records] == [
        f"init_rpc of 'late' (rank 64) still waits after {UNIT_S:g} s for other workers, or for the coordinator "
        "(rank 0) at 10.0.0.1:29500; the logs of the ranks below 64 name the missing workers"
    ]


async def test_who_waits_too_long_hears_who_is_missing() -> None:
    service = MembershipService()
    patient = ask(service, B, 4)
    await until_waiting(service, 1)
    hasty = ask(service, A, 4, timeout_s=0.01)
    assert await settled(hasty) == [Outcome.TIMED_OUT]
    assert list(hasty.result().missing) == [2, 3]
    with pytest.raises(RendezvousError) as caught:
        members_of(hasty.result(), A, "127.0.0.1:29500", 0.01)
    for part in (
        "'a' (rank 0)",
        "127.0.0.1:29500",
        "0.0 s",
        "have not joined: 2, 3",
        "also waiting: b",
        "MASTER_PORT",
    ):
        assert part in str(caught.value)
    assert not patient.done() and [member.identity for member in service.table.members] == [B]
    others = [ask(service, identity, 4) for identity in (A2, C, D)]  # and the world can still form
    assert await settled(patient, *others) == [OK] * 4


async def test_those_who_gave_up_before_are_told_apart_from_those_who_never_came() -> None:
    service = MembershipService()
    patient = ask(service, B, 3, timeout_s=0.2)
    assert await settled(ask(service, A, 3, timeout_s=0.01)) == [Outcome.TIMED_OUT]
    assert await settled(patient) == [Outcome.TIMED_OUT]
    reply = patient.result()
    assert list(reply.missing) == [2] and "rank 0" in reply.detail
    assert service.table.world_size is None


async def test_without_time_nobody_waits() -> None:
    service = MembershipService()
    assert await settled(ask(service, A, 2, timeout_s=0.0)) == [Outcome.TIMED_OUT]


async def test_a_contradiction_is_told_to_everybody_also_to_who_comes_later() -> None:
    service = MembershipService()
    waiting = [ask(service, A, 4), ask(service, B, 4)]
    await until_waiting(service, 2)
    assert not await service.all_answered(0.0)
    newcomer = ask(service, worker("b", 2), 4)
    assert await settled(*waiting, newcomer) == [NAME] * 3
    assert not await service.all_answered(0.01)
    late = asyncio.create_task(service.all_answered(20))
    last = ask(service, D, 4)
    assert await settled(last) == [NAME]
    assert await late
    for identity, task in zip((A, B, worker("b", 2), D), [*waiting, newcomer, last], strict=True):
        with pytest.raises(DuplicateName, match=r"b is not unique"):
            members_of(task.result(), identity, "here", 0.0)


async def test_only_the_one_at_fault_is_refused_where_the_others_can_go_on() -> None:
    service = MembershipService()
    waiting = ask(service, A)
    assert await settled(ask(service, D)) == [RANGE]
    assert await settled(ask(service, B), waiting) == [OK, OK]
    assert await settled(ask(service, worker("z", 1, 9))) == [ID]


async def test_a_joiner_whose_connection_ends_is_as_if_it_had_never_come() -> None:
    service = MembershipService()
    leaver = ask(service, A)
    await until_waiting(service, 1)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert not service.table.members
    assert await settled(ask(service, A2), ask(service, B)) == [OK, OK]


async def test_a_joiner_that_asks_again_is_not_taken_out_by_the_end_of_its_first_connection() -> None:
    service = MembershipService()
    first = ask(service, A)
    await until_waiting(service, 1)
    second = ask(service, A)
    await until_waiting(service, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await settled(ask(service, B), second) == [OK, OK]


async def test_a_connection_that_ends_after_the_world_has_formed_changes_nothing() -> None:
    service = MembershipService()
    first, second = ask(service, A), ask(service, B)
    await until_waiting(service, 1)
    assert await settled(second) == [OK]
    first.cancel()
    await asyncio.wait({first}, timeout=20)
    assert [member.identity for member in service.table.members] == [A, B]


async def test_the_world_forms_or_the_time_ends_but_never_both() -> None:
    service = MembershipService()
    first = ask(service, A, timeout_s=0.001)
    await until_waiting(service, 1)
    second = ask(service, B, timeout_s=1.0)
    time.sleep(0.01)  # noqa: ASYNC251  (the loop is late: the last worker and the end of the time come in one round)
    outcomes = await settled(first, second)
    assert outcomes in ([OK, OK], [Outcome.TIMED_OUT, Outcome.TIMED_OUT])
    assert len(service.table.members) == (2 if outcomes == [OK, OK] else 0)


async def test_a_lost_worker_is_replaced_under_its_name() -> None:
    service = MembershipService()
    assert await settled(ask(service, A), ask(service, B)) == [OK, OK]
    assert service.lost(B, "silent") and not service.lost(B, "silent")
    replacement = ask(service, B2)
    assert await settled(replacement) == [OK]
    assert members_of(replacement.result(), B2, "here", 0.0).members == (record(A), record(B2))
    ghost = ask(service, B)
    assert await settled(ghost) == [GONE]
    with pytest.raises(RendezvousError, match="declared lost"):
        members_of(ghost.result(), B, "here", 0.0)


async def test_leaving_is_idempotent_and_only_for_oneself() -> None:
    service = MembershipService()
    assert await settled(ask(service, A), ask(service, B)) == [OK, OK]
    leave = pb.LeaveRequest(identity=identity_to_proto(B))
    with pytest.raises(CallRefused, match="'b'"):
        await service.leave(A, leave)
    for _ in range(2):
        await service.leave(B, leave)
    assert [member.identity for member in service.table.members] == [A]


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(NAME, DuplicateName), (ID, DuplicateName), (SIZE, WorldMismatch), (KIND, WorldMismatch), (RANGE, WorldMismatch),
     (FULL, WorldMismatch), (GONE, RendezvousError), (Outcome.TIMED_OUT, RendezvousError)],
)  # fmt: skip
def test_each_outcome_has_its_error(outcome: pb.JoinReply.Outcome, error: type[RpcdistError]) -> None:
    with pytest.raises(error, match="here") as caught:
        members_of(pb.JoinReply(outcome=outcome, detail="because"), A, "here", 0.0)
    assert type(caught.value) is error and "because" in str(caught.value)


def test_every_outcome_is_known_to_the_client() -> None:
    for outcome in Outcome.values():
        if outcome != OK:
            with pytest.raises(RendezvousError):
                members_of(pb.JoinReply(outcome=Outcome.Name(outcome)), A, "here", 0.0)


@pytest.mark.parametrize(("timeout_s", "timeout_ms"), [(-1.0, 0), (0.5, 500), (float("inf"), 604_800_000)])
def test_the_time_of_a_request_is_bounded(timeout_s: float, timeout_ms: int) -> None:
    made = join_request(record(A), None, timeout_s)
    assert (made.timeout_ms, made.world_size) == (timeout_ms, 0)
