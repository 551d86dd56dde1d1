"""The messages of the membership: requests of workers, and the answers of the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from google.protobuf.message import DecodeError

from rpcdist._proto import membership_pb2 as pb
from rpcdist.errors import DuplicateName, ProtocolViolation, RendezvousError, WorldMismatch, listed, raised_as
from rpcdist.ids import Identity
from rpcdist.rpc._peers.directory import Member, Roster
from rpcdist.rpc.options import MAX_ROLE_LENGTH
from rpcdist.time_limits import PARKED_LIMIT_S
from rpcdist.transport.identities import identity_from_proto, identity_to_proto

Outcome = pb.JoinReply.Outcome
_MAX_ADDRESS_LENGTH = 300


def member_to_proto(member: Member) -> pb.Member:
    return pb.Member(identity=identity_to_proto(member.identity), address=member.address, role=member.role)


def member_from_proto(member: pb.Member) -> Member:
    if len(member.role) > MAX_ROLE_LENGTH or len(member.address) > _MAX_ADDRESS_LENGTH:  # every member keeps them
        lengths = f"{len(member.role)} and {len(member.address)} characters"
        raise ProtocolViolation(f"the role and address of a member are too long: {lengths}")
    return Member(identity_from_proto(member.identity), member.address, member.role)


@lru_cache(maxsize=1 << 12)
def _piece(member: Member) -> bytes:
    return pb.MemberList(members=[member_to_proto(member)]).SerializeToString()


def members_to_bytes(members: Iterable[Member]) -> bytes:
    """A `MemberList`: protobuf's lists are joined by joining their bytes, so that each worker is encoded only once."""
    return b"".join(map(_piece, members))


@lru_cache(maxsize=8)
def members_from_bytes(encoded: bytes) -> tuple[Member, ...]:
    """The inverse of `members_to_bytes`. Workers of one process, which get the same list, share the result.

    Raises:
        ProtocolViolation: these bytes are not such a list.
    """
    with raised_as(ProtocolViolation, "a list of workers cannot be parsed", DecodeError):
        return tuple(map(member_from_proto, pb.MemberList.FromString(encoded).members))


def news_message(roster: Roster) -> pb.MembershipMessage:
    return pb.MembershipMessage(
        version=roster.version,
        base=roster.base,
        members=members_to_bytes(roster.members),
        departures=departures_to_proto(roster.departures),
    )


def news_of(message: pb.MembershipMessage) -> Roster:
    members, departures = members_from_bytes(message.members), departures_from_proto(message.departures)
    return Roster(message.version, members, departures, message.base)


def join_request(me: Member, world_size: int | None, timeout_s: float) -> pb.JoinRequest:
    """The request of a worker that joins; `world_size` is None if workers join and leave."""
    timeout_ms = round(min(max(timeout_s, 0.0), PARKED_LIMIT_S) * 1000)
    return pb.JoinRequest(member=member_to_proto(me), world_size=world_size or 0, timeout_ms=timeout_ms)


def return_request(
    me: Member, world_size: int | None, timeout_s: float, roster: Roster, attempt: str
) -> pb.JoinRequest:
    """The request of a worker whose coordinator was lost, to the process that took the coordinator's place.

    Args:
        world_size: see `join_request`.
        timeout_s: limit on the wait for the other members.
        roster: the members, as it knows them.
        attempt: the start of the job's processes to which it belongs.
    """
    request = join_request(me, world_size, timeout_s)
    request.known_version = roster.version
    request.known.extend(map(member_to_proto, roster.members))
    request.attempt = attempt
    return request


def departures_to_proto(departures: Mapping[Identity, str]) -> list[pb.Departure]:
    return [pb.Departure(identity=identity_to_proto(gone), reason=reason) for gone, reason in departures.items()]


def departures_from_proto(departures: Iterable[pb.Departure]) -> dict[Identity, str]:
    return {identity_from_proto(gone.identity): gone.reason for gone in departures}


def members_of(reply: pb.JoinReply, me: Identity, coordinator: str, waited_s: float) -> Roster:
    """Reads the coordinator's answer.

    Args:
        reply: the answer to `Join` or `Members`.
        coordinator: its address, for the error.
        waited_s: how long this worker waited, in seconds, for the error.

    Returns:
        The workers, by rank, and the version of this list.

    Raises:
        DuplicateName: two workers have the same name or rank.
        WorldMismatch: the workers disagree about the size or kind of the world, or it is complete without this one.
        RendezvousError: not all workers joined in time, or this process was declared lost.
    """
    members = members_from_bytes(reply.members)
    outcome = reply.outcome
    if outcome == Outcome.OK:
        return Roster(reply.version, members, departures_from_proto(reply.departures))
    text = f"worker {me.name!r} (rank {me.id}) could not join the job at {coordinator}: "
    if outcome == Outcome.TIMED_OUT:
        raise RendezvousError(text + _timed_out(reply, me, members, waited_s))
    if outcome in (Outcome.DUPLICATE_NAME, Outcome.DUPLICATE_ID):
        raise DuplicateName(text + reply.detail)
    if outcome == Outcome.INCARNATION_GONE:
        raise RendezvousError(text + reply.detail)
    raise WorldMismatch(text + (reply.detail or f"outcome {outcome}"))


def _timed_out(reply: pb.JoinReply, me: Identity, members: Sequence[Member], waited_s: float) -> str:
    missing = f"these ranks have not joined: {listed(reply.missing)}" if reply.missing else "the job was not complete"
    others = listed(member.identity.name for member in members if member.identity != me) or "no others"
    return (
        f"after {waited_s:.1f} s, {missing} (also waiting: {others}{'; ' + reply.detail if reply.detail else ''}). "
        "Check that all ranks were started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and see their logs"
    )
