"""Workers, and their calls of the coordinator's service, for the tests of membership."""

from __future__ import annotations

import asyncio

from rpcdist._proto import membership_pb2 as pb
from rpcdist.ids import Identity
from rpcdist.rpc._membership.recovery import Recovery
from rpcdist.rpc._membership.roster_messages import join_request
from rpcdist.rpc._membership.roster_service import MembershipService
from rpcdist.rpc._peers.directory import Member

Outcome = pb.JoinReply.Outcome
OK, NAME, ID = Outcome.OK, Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID
SIZE, KIND = Outcome.WORLD_SIZE_DIFFERS, Outcome.STATIC_AND_DYNAMIC
RANGE, FULL, GONE = Outcome.ID_OUT_OF_RANGE, Outcome.WORLD_FULL, Outcome.INCARNATION_GONE


def worker(name: str, rank: int, incarnation: int = 0) -> Identity:
    return Identity(name, rank, incarnation or 100 + rank)


def record(identity: Identity) -> Member:
    return Member(identity, f"127.0.0.1:{5000 + identity.incarnation}")


A, B, C, D = worker("a", 0), worker("b", 1), worker("c", 2), worker("d", 3)
A2, B2 = worker("a", 0, 200), worker("b", 1, 201)


def request(identity: Identity, world_size: int = 2, timeout_s: float = 30.0) -> pb.JoinRequest:
    return join_request(record(identity), world_size, timeout_s)


def ask(
    service: MembershipService, identity: Identity, world_size: int = 2, timeout_s: float = 30.0
) -> asyncio.Task[pb.JoinReply]:
    return asyncio.create_task(service.join(identity, request(identity, world_size, timeout_s)))


async def settled(*tasks: asyncio.Task[pb.JoinReply]) -> list[pb.JoinReply.Outcome]:
    async with asyncio.timeout(20):
        return [(await task).outcome for task in tasks]


async def until_waiting(service: MembershipService, number: int) -> None:
    await asyncio.sleep(0)  # one round of the loop: every handler runs up to where it waits
    assert len(service._waiting) == number


def recovery_of(service: MembershipService) -> Recovery:
    """The recovery that is under way; its timers do as the following functions do."""
    assert service._recovery is not None
    return service._recovery


def ask_the_missing(service: MembershipService) -> None:
    """Asks the workers that have not come back whether they live."""
    recovery_of(service)._ask_the_missing()


def end_of_time(service: MembershipService, asked_before: bool = False) -> None:
    """Ends it when its time is over, once those who were asked have answered, unless they were `asked_before`."""
    recovery = recovery_of(service)
    end = recovery._end if asked_before else recovery._end_of_time
    end()
