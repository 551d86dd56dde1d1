"""A coordinator in the place of another one: the workers that come back, those that it asks, and those that are
lost.
"""

from __future__ import annotations

import asyncio
import resource
import time
from functools import partial

import pytest
from membership_workers import (
    A2,
    B2,
    GONE,
    NAME,
    OK,
    A,
    B,
    C,
    D,
    ask,
    ask_the_missing,
    end_of_time,
    record,
    settled,
    until_waiting,
    worker,
)

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import CallRefused
from rpcdist.ids import Identity
from rpcdist.rpc._membership import recovery as recovery_module
from rpcdist.rpc._membership.recovery import Recovery, max_at_once
from rpcdist.rpc._membership.roster import MembershipTable
from rpcdist.rpc._membership.roster_messages import members_from_bytes, members_of, return_request
from rpcdist.rpc._membership.roster_service import MembershipService
from rpcdist.rpc._peers.directory import Member, Roster
from rpcdist.testing import UNIT_S


def back(
    service: MembershipService,
    identity: Identity,
    *known: Identity,
    world_size: int = 3,
    attempt: str = "",
    version: int = 9,
) -> asyncio.Task[pb.JoinReply]:
    """A worker that was in the job announces itself."""
    roster = Roster(version, [record(other) for other in known])
    request = return_request(record(identity), world_size or None, 30.0, roster, attempt)
    return asyncio.create_task(service.join(identity, request))


async def test_workers_are_taken_back_once_all_have_come() -> None:
    service = MembershipService(recovery_s=10 * UNIT_S)  # half of which it waits for newcomers
    first, second = ask(service, A2, 3), back(service, B, A, B, C)
    await until_waiting(service, 2)
    with pytest.raises(CallRefused, match="is being rebuilt"):
        await service.members(B, pb.MembersRequest())
    third = back(service, C, A, B, C, version=12)
    assert await settled(first, second, third) == [OK] * 3
    assert members_of(third.result(), C, "here", 1.0) == Roster(13, (record(A2), record(B), record(C)), {})
    assert service.table.formed


async def is_dead(member: Member) -> bool:
    return False


async def test_who_neither_comes_back_nor_answers_is_lost_and_its_rank_is_free() -> None:
    service = MembershipService(is_dead, recovery_s=0.05)
    waiting = [ask(service, A2, 3), back(service, C, A, B, C)]
    assert await settled(*waiting) == [OK] * 2
    roster = members_of(waiting[1].result(), C, "here", 1.0)
    assert [member.identity for member in roster.members] == [A2, C] and list(roster.departures) == [B]
    assert "neither joined the next one nor answered" in roster.departures[B]
    assert await settled(ask(service, worker("another-name", 1, 300), 3)) == [OK]


@pytest.mark.parametrize("world_size", [3, 0], ids=["static", "elastic"])
async def test_who_lives_and_notices_nothing_stays_in_the_job(world_size: int) -> None:
    """It was declared lost when the time was over: a slow worker, or one whose network breaks silently."""
    service = MembershipService(recovery_s=0.05)
    waiting = [ask(service, A2, world_size), back(service, C, A, B, C, world_size=world_size)]
    assert await settled(*waiting) == [OK] * 2
    roster = members_of(waiting[1].result(), C, "here", 1.0)
    assert [member.identity for member in roster.members] == [A2, B, C] and not roster.departures
    assert await settled(ask(service, B2, world_size)) == [NAME]
    announced = back(service, B, A, B, C, world_size=world_size, version=50)
    assert await settled(announced) == [OK]
    assert announced.result().version >= 50  # of what it knows, nothing would be believed that is older


async def test_who_lives_stays_although_the_coordinator_stood_still() -> None:
    """All times were over when it went on, and those that it had not asked yet were lost."""
    service = MembershipService(recovery_s=0.01)
    waiting = [ask(service, A2, 3), back(service, C, A, B, C)]
    await until_waiting(service, 2)
    time.sleep(0.05)  # noqa: ASYNC251  (the process stands still)
    assert await settled(*waiting) == [OK] * 2
    assert [member.identity for member in service.table.members] == [A2, B, C]


async def test_who_has_not_answered_yet_is_waited_for() -> None:
    asked, answers = asyncio.Event(), asyncio.Event()

    async def slow(member: Member) -> bool:
        asked.set()
        await answers.wait()
        return True

    service = MembershipService(slow, recovery_s=20.0)
    waiting = [ask(service, A2, 3), back(service, C, A, B, C)]
    await until_waiting(service, 2)
    ask_the_missing(service)
    await asked.wait()
    end_of_time(service)
    await until_waiting(service, 2)
    answers.set()
    assert await settled(*waiting) == [OK] * 2
    assert [member.identity for member in service.table.members] == [A2, B, C]


async def test_who_never_answers_holds_nobody_up_for_long() -> None:
    async def silent(member: Member) -> bool:
        return await asyncio.Event().wait()

    service = MembershipService(silent, recovery_s=0.05)
    assert await settled(ask(service, A2, 3), back(service, C, A, B, C)) == [OK] * 2
    assert [member.identity for member in service.table.members] == [A2, C]
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "survivor" in task.get_name()]


async def test_one_that_lies_about_an_address_evicts_nobody() -> None:
    async def probe(member: Member) -> bool:
        return member == record(B)

    service = MembershipService(probe, recovery_s=0.05)
    lie = return_request(record(D), 4, 30.0, Roster(9, [Member(B, "elsewhere:1")]), "")
    lying = asyncio.create_task(service.join(D, lie))
    assert await settled(ask(service, A2, 4), lying, back(service, C, A, B, C, D, world_size=4)) == [OK] * 3
    assert [member.identity for member in service.table.members] == [A2, B, C, D]


async def test_as_many_addresses_as_a_worker_may_say_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "MAX_NAMED", 20)
    num_asked = 0

    async def count(member: Member) -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    service = MembershipService(count, recovery_s=0.05)
    invented = [worker(f"w{number}", number) for number in range(2, 60)]
    assert await settled(ask(service, A2, 0), back(service, B, *invented, world_size=0)) == [OK] * 2
    assert num_asked == 20


@pytest.mark.parametrize("lie", ["addresses of one worker", "workers"])
async def test_one_that_names_hundreds_holds_nobody_up(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing answers, a question takes as long as it may; the liar comes first, and names the true one, too."""
    monkeypatch.setattr(recovery_module, "max_at_once", lambda: 4)
    asked: list[Member] = []

    async def probe(member: Member) -> bool:
        asked.append(member)
        return member == record(B) or await asyncio.Event().wait()

    service = MembershipService(probe, recovery_s=20.0)
    invented = (
        [Member(B, f"elsewhere:{port}") for port in range(1, 600)]
        if lie == "addresses of one worker"
        else [record(worker(f"w{number}", 1, number)) for number in range(1000, 1600)]
    )
    request = return_request(record(D), 4, 30.0, Roster(9, [*invented, record(B)]), "")
    lying = asyncio.create_task(service.join(D, request))
    waiting = [ask(service, A2, 4), lying, back(service, C, A, B, C, D, world_size=4)]
    await until_waiting(service, 3)
    ask_the_missing(service)
    await asyncio.sleep(0)
    assert record(B) in asked and len(asked) == 4
    end_of_time(service, asked_before=True)
    assert await settled(*waiting) == [OK] * 3
    assert [member.identity for member in service.table.members] == [A2, B, C, D]


@pytest.mark.parametrize(
    ("descriptors", "questions"), [(20, 16), (256, 64), (1024, 256), (1 << 20, 1000), (resource.RLIM_INFINITY, 1000)]
)
def test_questions_leave_descriptors_for_all_else(
    descriptors: int, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, resource.RLIM_INFINITY))
    assert max_at_once() == questions


async def test_all_are_asked_though_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "max_at_once", lambda: 3)
    num_now = most = 0

    async def probe(member: Member) -> bool:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        await asyncio.sleep(0)
        num_now -= 1
        return True

    service = MembershipService(probe, recovery_s=0.05)
    missing = [worker(f"w{rank}", rank) for rank in range(2, 30)]
    assert await settled(ask(service, A2, 0), back(service, B, A, B, *missing, world_size=0)) == [OK] * 2
    assert [member.identity for member in service.table.members] == [A2, B, *missing]
    assert most == 3


async def test_a_dynamic_world_waits_for_those_that_are_known() -> None:
    service = MembershipService(recovery_s=20.0)
    assert await settled(ask(service, A2, 0)) == [OK]
    first = back(service, B, A, B, C, world_size=0)
    newcomer = ask(service, D, 0)
    await until_waiting(service, 2)
    second = back(service, C, A, B, C, world_size=0)
    assert await settled(first, newcomer, second) == [OK] * 3
    assert [len(members_from_bytes(task.result().members)) for task in (first, newcomer, second)] == [4] * 3


async def test_newcomers_win_over_workers_that_are_left_from_another_job() -> None:
    """Also if the one that is left over has made the world complete: newcomers have half of the recovery's time."""
    service = MembershipService(recovery_s=20.0)
    coordinator, left_over = ask(service, A2, 2), back(service, B, A, B, world_size=2)
    await until_waiting(service, 2)
    newcomer = ask(service, worker("another-name", 1, 300), 2)
    assert await settled(coordinator, left_over, newcomer) == [OK, GONE, OK]
    assert "was restarted, and another process joined as 'another-name'" in left_over.result().detail
    assert [member.identity.name for member in service.table.members] == ["a", "another-name"]
    assert not service.has_predecessor


async def test_a_recovery_ends_once_and_not_after_it_was_given_up() -> None:
    ended: list[str] = []
    has_ended = asyncio.Event()

    def end() -> None:
        ended.append("the other")
        has_ended.set()

    given_up = Recovery(MembershipTable(), is_dead, 0.0, 0.0, partial(ended.append, "given up"), 0)
    Recovery(MembershipTable(), is_dead, 0.0, 0.0, end, 0)
    given_up.close()
    async with asyncio.timeout(20):
        await has_ended.wait()
    await asyncio.sleep(0)  # all timers of both were due at the same time
    assert ended == ["the other"]


@pytest.mark.parametrize(("attempt", "outcome"), [("1", OK), ("2", GONE)])
async def test_only_the_same_attempt_is_taken_back(attempt: str, outcome: pb.JoinReply.Outcome) -> None:
    service = MembershipService(attempt="1", recovery_s=0.0)
    coordinator = ask(service, A2, 2, timeout_s=0.2)
    assert await settled(back(service, B, A, B, world_size=2, attempt=attempt)) == [outcome]
    await settled(coordinator)


async def test_what_a_worker_that_comes_back_may_claim_is_bounded() -> None:
    service = MembershipService()
    with pytest.raises(CallRefused, match="which is invalid"):
        await back(service, B, A, B, version=1 << 63)
    with pytest.raises(CallRefused, match="joins as itself"):
        await service.join(C, return_request(record(B), 3, 1.0, Roster(9, []), ""))


async def test_who_has_the_place_of_a_worker_that_comes_back_late_keeps_it() -> None:
    service = MembershipService(recovery_s=0.0)
    assert await settled(ask(service, A2, 2), ask(service, B2, 2)) == [OK] * 2
    assert await settled(back(service, B, A, B, world_size=2)) == [NAME]
    assert [member.identity for member in service.table.members] == [A2, B2] and service.table.broken is None
