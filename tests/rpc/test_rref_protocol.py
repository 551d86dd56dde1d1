"""The reference counting of one worker as a table: events in, actions out."""

from __future__ import annotations

import pytest

from rpcdist.rpc._rref.events import (
    ChildConfirmed,
    Confirm,
    ConnectionBroken,
    Created,
    CreateRemote,
    CreationAccepted,
    CreationFailed,
    CreationFinished,
    CreationOver,
    CreationProbe,
    CreationQuery,
    DropAll,
    Fail,
    FailValue,
    FetchArrived,
    ForkConfirmed,
    ForkRefused,
    ForkRequest,
    HandleDropped,
    HolderFound,
    HolderLost,
    LeaseEnded,
    MessageArrived,
    Reason,
    Received,
    RefuseCreation,
    RefuseFetch,
    ReleaseValue,
    RRefAction,
    RRefEvent,
    SendControl,
    Serve,
    Share,
    ShareFailed,
    ShareLost,
    ShareQuery,
    UserDeleted,
)
from rpcdist.rpc._rref.identifiers import BoundedSet, Incarnation, UniqueId
from rpcdist.rpc._rref.protocol import RRefProtocol

ME, A, B = Incarnation(0, 100), Incarnation(1, 101), Incarnation(2, 102)
MINE = UniqueId(0, 0, 100)  # a reference, and forks, made by this worker
F, C = UniqueId(0, 1, 100), UniqueId(0, 2, 100)
THEIRS = UniqueId(1, 0, 101)  # the same, made by A
G, D, E = UniqueId(1, 1, 101), UniqueId(1, 2, 101), UniqueId(1, 3, 101)

Table = list[tuple[RRefEvent, list[RRefAction]]]

TABLES: dict[str, Table] = {
    "remote, then dropped before the reply": [
        (CreateRemote(MINE, F, A), []),
        (HandleDropped(MINE, F), []),
        (Created(MINE, F), [Confirm(MINE, F), SendControl(A, UserDeleted(MINE, F))]),
    ],
    "G2: a dropped parent waits for its child": [
        (CreateRemote(MINE, F, A), []),
        (Created(MINE, F), [Confirm(MINE, F)]),
        (Share(MINE, F, C, B), []),
        (HandleDropped(MINE, F), []),
        (MessageArrived(B, ChildConfirmed(MINE, C)), [SendControl(A, UserDeleted(MINE, F))]),
        (MessageArrived(B, ChildConfirmed(MINE, C)), []),
    ],
    "a child asks the owner, then tells its parent": [
        (Received(THEIRS, D, G, B, A), [SendControl(B, ForkRequest(THEIRS, D))]),
        (MessageArrived(B, ForkConfirmed(THEIRS, D)), [Confirm(THEIRS, D), SendControl(A, ChildConfirmed(THEIRS, D))]),
        (MessageArrived(B, ForkConfirmed(THEIRS, D)), []),
        (HandleDropped(THEIRS, D), [SendControl(B, UserDeleted(THEIRS, D))]),
        (MessageArrived(B, ForkConfirmed(THEIRS, D)), [SendControl(B, UserDeleted(THEIRS, D))]),
    ],
    "the owner's own share needs no confirmation": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (HandleDropped(THEIRS, D), [SendControl(A, UserDeleted(THEIRS, D))]),
    ],
    "owner: the value lives while its function runs or a user holds it": [
        (CreationAccepted(THEIRS, G, A), []),
        (MessageArrived(B, ForkRequest(THEIRS, D)), [SendControl(B, ForkConfirmed(THEIRS, D))]),
        (MessageArrived(A, UserDeleted(THEIRS, G)), []),
        (MessageArrived(B, UserDeleted(THEIRS, D)), []),
        (CreationFinished(THEIRS), [ReleaseValue(THEIRS)]),
    ],
    "owner: messages that overtake the call of remote() wait for it": [
        (FetchArrived(THEIRS, G, A), [SendControl(A, CreationProbe(THEIRS))]),
        (MessageArrived(B, ForkRequest(THEIRS, D)), []),
        (CreationAccepted(THEIRS, G, A), [SendControl(B, ForkConfirmed(THEIRS, D)), Serve(THEIRS, G, A)]),
    ],
    "owner: a stale request for a value that is gone": [
        (MessageArrived(B, ForkRequest(THEIRS, D)), [SendControl(A, CreationProbe(THEIRS))]),
        (
            MessageArrived(A, CreationOver(THEIRS)),
            [
                FailValue(THEIRS, Reason.UNKNOWN),
                SendControl(B, ForkRefused(THEIRS, D, Reason.UNKNOWN)),
                ReleaseValue(THEIRS),
            ],
        ),
    ],
    "owner: a call that its creator gave up is refused": [
        (
            MessageArrived(A, CreationQuery(THEIRS, G)),
            [SendControl(A, ForkRefused(THEIRS, G, Reason.CREATION_FAILED))],
        ),
        (CreationAccepted(THEIRS, G, A), [RefuseCreation(THEIRS, G, Reason.CREATION_FAILED)]),
    ],
    "creator: a failed call is asked about, and held if it arrived": [
        (CreateRemote(MINE, F, A), []),
        (CreationFailed(MINE, F), [SendControl(A, CreationQuery(MINE, F))]),
        (MessageArrived(A, ForkConfirmed(MINE, F)), [Confirm(MINE, F)]),
        (HandleDropped(MINE, F), [SendControl(A, UserDeleted(MINE, F))]),
    ],
    "a fork that comes home becomes a local handle": [
        (Share(MINE, MINE, C, A), []),
        (Received(MINE, D, C, ME, A), [SendControl(A, ChildConfirmed(MINE, D)), Confirm(MINE, D)]),
        (MessageArrived(A, UserDeleted(MINE, C)), []),
        (HandleDropped(MINE, MINE), []),
        (HandleDropped(MINE, D), [ReleaseValue(MINE)]),
    ],
    "a share that was lost": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (ShareFailed(MINE, C), [SendControl(A, ShareQuery(MINE, C))]),
        (MessageArrived(A, ShareLost(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "a broken connection: every share is asked for, except those on the way": [
        (CreateRemote(MINE, F, B), []),
        (Share(MINE, F, C, A), []),
        (Share(THEIRS, THEIRS, D, A), []),
        (ConnectionBroken(A, frozenset({D})), [SendControl(A, ShareQuery(MINE, C))]),
        (ConnectionBroken(B), []),
    ],
    "the receiver of a lost share refuses it when it comes late": [
        (MessageArrived(A, ShareQuery(THEIRS, D)), [SendControl(A, ShareLost(THEIRS, D))]),
        (Received(THEIRS, D, None, A, A), [Fail(THEIRS, D, Reason.SHARE_LOST)]),
    ],
    "a share that arrived is kept, whatever its sender fears": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (MessageArrived(A, ShareQuery(THEIRS, D)), []),
    ],
    "G4: the lease of a user ends, and it comes back": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (LeaseEnded(A), [ReleaseValue(MINE)]),
        (MessageArrived(A, ForkRequest(MINE, D)), [SendControl(A, ForkRefused(MINE, D, Reason.LEASE_EXPIRED))]),
        (
            FetchArrived(MINE, C, A),
            [RefuseFetch(MINE, C, A, Reason.LEASE_EXPIRED), SendControl(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))],
        ),
        (CreationAccepted(THEIRS, G, A), [RefuseCreation(THEIRS, G, Reason.LEASE_EXPIRED)]),
    ],
    "G4: who comes back is told which forks are gone, and may hold new ones": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (LeaseEnded(A), [ReleaseValue(MINE)]),
        (HolderFound(A), [SendControl(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))]),
        (HolderFound(A), []),
        (CreationAccepted(THEIRS, G, A), []),
        (MessageArrived(A, UserDeleted(MINE, C)), []),
        (
            FetchArrived(MINE, C, A),
            [RefuseFetch(MINE, C, A, Reason.LEASE_EXPIRED), SendControl(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))],
        ),
        (CreationFinished(THEIRS), []),
        (FetchArrived(THEIRS, G, A), [Serve(THEIRS, G, A)]),
        (MessageArrived(A, UserDeleted(THEIRS, G)), [ReleaseValue(THEIRS)]),
    ],
    "G4: the late user gives up what the owner names": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (Received(THEIRS, G, None, A, A), [Confirm(THEIRS, G)]),
        (
            MessageArrived(A, ForkRefused(THEIRS, D, Reason.LEASE_EXPIRED)),
            [SendControl(A, UserDeleted(THEIRS, D)), Fail(THEIRS, D, Reason.LEASE_EXPIRED)],
        ),
        (MessageArrived(A, ForkRefused(THEIRS, E, Reason.LEASE_EXPIRED)), []),
        (Received(THEIRS, E, None, A, A), [Fail(THEIRS, E, Reason.SHARE_LOST)]),
    ],
    "G5: the owner is lost": [
        (Received(THEIRS, D, G, A, B), [SendControl(A, ForkRequest(THEIRS, D))]),
        (
            HolderLost(A),
            [
                SendControl(A, UserDeleted(THEIRS, D)),
                Fail(THEIRS, D, Reason.OWNER_LOST),
                SendControl(B, ChildConfirmed(THEIRS, D)),
            ],
        ),
        (CreateRemote(MINE, F, A), [Fail(MINE, F, Reason.OWNER_LOST)]),
    ],
    "shutdown: everything counts as dropped": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (Share(MINE, MINE, C, B), []),
        (DropAll(), [SendControl(A, UserDeleted(THEIRS, D))]),
        (MessageArrived(B, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: a value goes to who holds the fork that he names": [
        (Share(MINE, MINE, C, A), []),
        (FetchArrived(MINE, C, A), [Serve(MINE, C, A)]),
        (FetchArrived(MINE, C, B), [RefuseFetch(MINE, C, B, Reason.NOT_HELD)]),
        (FetchArrived(MINE, D, B), [RefuseFetch(MINE, D, B, Reason.NOT_HELD)]),
        (FetchArrived(MINE, MINE, A), [RefuseFetch(MINE, MINE, A, Reason.NOT_HELD)]),
        (MessageArrived(B, ForkRequest(MINE, D)), [SendControl(B, ForkConfirmed(MINE, D))]),
        (FetchArrived(MINE, D, B), [Serve(MINE, D, B)]),
        (MessageArrived(B, UserDeleted(MINE, D)), []),
        (FetchArrived(MINE, D, B), [RefuseFetch(MINE, D, B, Reason.NOT_HELD)]),
        (HandleDropped(MINE, MINE), []),
        (MessageArrived(A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
        (FetchArrived(MINE, C, A), [RefuseFetch(MINE, C, A, Reason.UNKNOWN)]),
    ],
    "G6: who waits for a creation gets what he holds then": [
        (FetchArrived(THEIRS, D, B), [RefuseFetch(THEIRS, D, B, Reason.UNKNOWN)]),
        (FetchArrived(THEIRS, G, A), [SendControl(A, CreationProbe(THEIRS))]),
        (FetchArrived(THEIRS, E, A), []),
        (FetchArrived(THEIRS, D, B), [RefuseFetch(THEIRS, D, B, Reason.NOT_HELD)]),
        (MessageArrived(B, ForkRequest(THEIRS, D)), []),
        (FetchArrived(THEIRS, D, B), []),
        (FetchArrived(THEIRS, D, A), [RefuseFetch(THEIRS, D, A, Reason.NOT_HELD)]),
        (
            CreationAccepted(THEIRS, G, A),
            [
                SendControl(B, ForkConfirmed(THEIRS, D)),
                Serve(THEIRS, G, A),
                RefuseFetch(THEIRS, E, A, Reason.NOT_HELD),
                Serve(THEIRS, D, B),
            ],
        ),
    ],
    "G6: a child named too early by its maker does not stand in the way of its holder": [
        (FetchArrived(THEIRS, D, A), [SendControl(A, CreationProbe(THEIRS))]),
        (MessageArrived(B, ForkRequest(THEIRS, D)), []),
        (FetchArrived(THEIRS, D, B), [RefuseFetch(THEIRS, D, A, Reason.NOT_HELD)]),
        (CreationAccepted(THEIRS, G, A), [SendControl(B, ForkConfirmed(THEIRS, D)), Serve(THEIRS, D, B)]),
    ],
    "G6: the fork of another is requested": [
        (Share(MINE, MINE, C, A), []),
        (MessageArrived(B, ForkRequest(MINE, C)), [SendControl(B, ForkRefused(MINE, C, Reason.NOT_HELD))]),
        (HandleDropped(MINE, MINE), []),
        (MessageArrived(B, UserDeleted(MINE, C)), []),
        (MessageArrived(A, ForkRequest(MINE, C)), [SendControl(A, ForkConfirmed(MINE, C))]),
        (MessageArrived(A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: the fork of one who waits is requested": [
        (MessageArrived(B, ForkRequest(THEIRS, D)), [SendControl(A, CreationProbe(THEIRS))]),
        (MessageArrived(A, ForkRequest(THEIRS, D)), [SendControl(A, ForkRefused(THEIRS, D, Reason.NOT_HELD))]),
        (CreationAccepted(THEIRS, G, A), [SendControl(B, ForkConfirmed(THEIRS, D))]),
    ],
    "G6: somebody else creates, gives up, or asks about, the reference of a worker": [
        (CreationAccepted(THEIRS, G, B), [RefuseCreation(THEIRS, G, Reason.NOT_HELD)]),
        (CreationAccepted(MINE, G, A), [RefuseCreation(MINE, G, Reason.NOT_HELD)]),
        (CreationAccepted(THEIRS, C, A), [RefuseCreation(THEIRS, C, Reason.NOT_HELD)]),
        (MessageArrived(B, CreationQuery(THEIRS, G)), []),
        (MessageArrived(B, ForkRequest(THEIRS, D)), [SendControl(A, CreationProbe(THEIRS))]),
        (MessageArrived(B, CreationOver(THEIRS)), []),
        (MessageArrived(B, CreationQuery(THEIRS, G)), []),
        (CreationAccepted(THEIRS, G, A), [SendControl(B, ForkConfirmed(THEIRS, D))]),
    ],
    "G6: a value of ours comes with the fork of another": [
        (Share(MINE, MINE, C, A), []),
        (Received(MINE, C, G, ME, B), [SendControl(B, ChildConfirmed(MINE, C)), Confirm(MINE, C)]),
        (HandleDropped(MINE, C), []),
        (HandleDropped(MINE, MINE), []),
        (FetchArrived(MINE, C, A), [Serve(MINE, C, A)]),
        (MessageArrived(A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: verdicts on a fork count from its owner": [
        (Received(THEIRS, D, G, B, A), [SendControl(B, ForkRequest(THEIRS, D))]),
        (MessageArrived(A, ForkConfirmed(THEIRS, D)), []),
        (MessageArrived(A, ForkRefused(THEIRS, D, Reason.UNKNOWN)), []),
        (MessageArrived(A, ForkRefused(THEIRS, D, Reason.LEASE_EXPIRED)), []),
        (MessageArrived(B, ForkConfirmed(THEIRS, D)), [Confirm(THEIRS, D), SendControl(A, ChildConfirmed(THEIRS, D))]),
        (MessageArrived(B, ForkRefused(THEIRS, E, Reason.LEASE_EXPIRED)), []),
        (Received(THEIRS, E, G, B, A), [SendControl(B, ForkRequest(THEIRS, E))]),
    ],
    "G6: the end of a share counts from who got it, the question about it from who made it": [
        (CreateRemote(MINE, F, A), []),
        (Created(MINE, F), [Confirm(MINE, F)]),
        (Share(MINE, F, C, B), []),
        (HandleDropped(MINE, F), []),
        (MessageArrived(A, ChildConfirmed(MINE, C)), []),
        (MessageArrived(A, ShareLost(MINE, C)), []),
        (MessageArrived(B, ShareLost(MINE, C)), [SendControl(A, UserDeleted(MINE, F))]),
        (MessageArrived(B, ShareQuery(THEIRS, D)), []),
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (MessageArrived(B, CreationProbe(MINE)), [SendControl(B, CreationOver(MINE))]),
    ],
    "a fork can be deleted by its holder only": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (MessageArrived(B, UserDeleted(MINE, C)), []),
        (MessageArrived(A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
}


@pytest.mark.parametrize("name", TABLES, ids=str)
def test_table(name: str) -> None:
    protocol = RRefProtocol(ME)
    for event, expected in TABLES[name]:
        is_served = isinstance(event, FetchArrived) and protocol.owners.serves_at_once(
            event.rref, event.fork, event.sender
        )
        assert protocol.handle(event) == expected, event
        if is_served:
            assert [type(action) for action in expected] == [Serve], event


def test_bounded_set_forgets_the_oldest() -> None:
    members = BoundedSet[int](2)
    for member in (1, 2, 3):
        members.add(member)
    assert list(members) == [2, 3] and 1 not in members
