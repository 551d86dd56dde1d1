"""The reference counting of one worker as a table: events in, actions out."""

from __future__ import annotations

import pytest

from rpcdist.rpc._rref.actions import (
    Action,
    Confirm,
    Fail,
    FailValue,
    RefuseCreation,
    RefuseFetch,
    ReleaseValue,
    Send,
    Serve,
)
from rpcdist.rpc._rref.bounded import BoundedSet
from rpcdist.rpc._rref.events import (
    Arrived,
    ConnectionBroken,
    Created,
    CreateRemote,
    CreationAccepted,
    CreationFailed,
    CreationFinished,
    DropAll,
    Event,
    FetchArrived,
    HandleDropped,
    LeaseEnded,
    Received,
    Share,
    ShareFailed,
    WorkerLost,
)
from rpcdist.rpc._rref.identifiers import Node, UniqueId
from rpcdist.rpc._rref.messages import (
    ChildConfirmed,
    CreationOver,
    CreationProbe,
    CreationQuery,
    ForkConfirmed,
    ForkRefused,
    ForkRequest,
    Reason,
    ShareLost,
    ShareQuery,
    UserDeleted,
)
from rpcdist.rpc._rref.protocol import RRefProtocol

ME, A, B = Node(0, 100), Node(1, 101), Node(2, 102)
MINE = UniqueId(0, 0, 100)  # a reference, and forks, made by this worker
F, C = UniqueId(0, 1, 100), UniqueId(0, 2, 100)
THEIRS = UniqueId(1, 0, 101)  # the same, made by A
G, D = UniqueId(1, 1, 101), UniqueId(1, 2, 101)

Table = list[tuple[Event, list[Action]]]

TABLES: dict[str, Table] = {
    "remote, then dropped before the reply": [
        (CreateRemote(MINE, F, A), []),
        (HandleDropped(MINE, F), []),
        (Created(MINE, F), [Confirm(MINE, F), Send(A, UserDeleted(MINE, F))]),
    ],
    "G2: a dropped parent waits for its child": [
        (CreateRemote(MINE, F, A), []),
        (Created(MINE, F), [Confirm(MINE, F)]),
        (Share(MINE, F, C, B), []),
        (HandleDropped(MINE, F), []),
        (Arrived(B, ChildConfirmed(MINE, C)), [Send(A, UserDeleted(MINE, F))]),
        (Arrived(B, ChildConfirmed(MINE, C)), []),
    ],
    "a child asks the owner, then tells its parent": [
        (Received(THEIRS, D, G, B, A), [Send(B, ForkRequest(THEIRS, D))]),
        (Arrived(B, ForkConfirmed(THEIRS, D)), [Confirm(THEIRS, D), Send(A, ChildConfirmed(THEIRS, D))]),
        (Arrived(B, ForkConfirmed(THEIRS, D)), []),
        (HandleDropped(THEIRS, D), [Send(B, UserDeleted(THEIRS, D))]),
        (Arrived(B, ForkConfirmed(THEIRS, D)), [Send(B, UserDeleted(THEIRS, D))]),
    ],
    "the owner's own share needs no confirmation": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (HandleDropped(THEIRS, D), [Send(A, UserDeleted(THEIRS, D))]),
    ],
    "owner: the value lives while its function runs or a user holds it": [
        (CreationAccepted(THEIRS, G, A), []),
        (Arrived(B, ForkRequest(THEIRS, D)), [Send(B, ForkConfirmed(THEIRS, D))]),
        (Arrived(A, UserDeleted(THEIRS, G)), []),
        (Arrived(B, UserDeleted(THEIRS, D)), []),
        (CreationFinished(THEIRS), [ReleaseValue(THEIRS)]),
    ],
    "owner: messages that overtake the call of remote() wait for it": [
        (FetchArrived(THEIRS, G, A), [Send(A, CreationProbe(THEIRS))]),
        (Arrived(B, ForkRequest(THEIRS, D)), []),
        (CreationAccepted(THEIRS, G, A), [Send(B, ForkConfirmed(THEIRS, D)), Serve(THEIRS, G)]),
    ],
    "owner: a stale request for a value that is gone": [
        (Arrived(B, ForkRequest(THEIRS, D)), [Send(A, CreationProbe(THEIRS))]),
        (
            Arrived(A, CreationOver(THEIRS)),
            [
                FailValue(THEIRS, Reason.UNKNOWN),
                Send(B, ForkRefused(THEIRS, D, Reason.UNKNOWN)),
                ReleaseValue(THEIRS),
            ],
        ),
    ],
    "owner: a call that its creator gave up is refused": [
        (
            Arrived(A, CreationQuery(THEIRS, G)),
            [Send(A, ForkRefused(THEIRS, G, Reason.CREATION_FAILED))],
        ),
        (CreationAccepted(THEIRS, G, A), [RefuseCreation(THEIRS, G, Reason.CREATION_FAILED)]),
    ],
    "creator: a failed call is asked about, and held if it arrived": [
        (CreateRemote(MINE, F, A), []),
        (CreationFailed(MINE, F), [Send(A, CreationQuery(MINE, F))]),
        (Arrived(A, ForkConfirmed(MINE, F)), [Confirm(MINE, F)]),
        (HandleDropped(MINE, F), [Send(A, UserDeleted(MINE, F))]),
    ],
    "a fork that comes home becomes a local handle": [
        (Share(MINE, MINE, C, A), []),
        (Received(MINE, D, C, ME, A), [Send(A, ChildConfirmed(MINE, D)), Confirm(MINE, D)]),
        (Arrived(A, UserDeleted(MINE, C)), []),
        (HandleDropped(MINE, MINE), []),
        (HandleDropped(MINE, D), [ReleaseValue(MINE)]),
    ],
    "a share that was lost": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (ShareFailed(MINE, C, A), [Send(A, ShareQuery(MINE, C))]),
        (Arrived(A, ShareLost(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "a broken connection: every share is asked for, except those on the way": [
        (CreateRemote(MINE, F, B), []),
        (Share(MINE, F, C, A), []),
        (Share(THEIRS, THEIRS, D, A), []),
        (ConnectionBroken(A, frozenset({D})), [Send(A, ShareQuery(MINE, C))]),
        (ConnectionBroken(B), []),
    ],
    "the receiver of a lost share refuses it when it comes late": [
        (Arrived(A, ShareQuery(THEIRS, D)), [Send(A, ShareLost(THEIRS, D))]),
        (Received(THEIRS, D, None, A, A), [Fail(THEIRS, D, Reason.SHARE_LOST)]),
    ],
    "a share that arrived is kept, whatever its sender fears": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (Arrived(A, ShareQuery(THEIRS, D)), []),
    ],
    "G4: the lease of a user ends, and it comes back": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (LeaseEnded(A), [ReleaseValue(MINE)]),
        (Arrived(A, ForkRequest(MINE, D)), [Send(A, ForkRefused(MINE, D, Reason.LEASE_EXPIRED))]),
        (
            FetchArrived(MINE, C, A),
            [RefuseFetch(MINE, C, Reason.LEASE_EXPIRED), Send(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))],
        ),
        (CreationAccepted(THEIRS, G, A), [RefuseCreation(THEIRS, G, Reason.LEASE_EXPIRED)]),
    ],
    "G4: the late user gives up everything of that owner": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (Received(THEIRS, G, None, A, A), [Confirm(THEIRS, G)]),
        (
            Arrived(A, ForkRefused(THEIRS, D, Reason.LEASE_EXPIRED)),
            [Fail(THEIRS, D, Reason.LEASE_EXPIRED), Fail(THEIRS, G, Reason.LEASE_EXPIRED)],
        ),
    ],
    "G5: the owner is lost": [
        (Received(THEIRS, D, G, A, B), [Send(A, ForkRequest(THEIRS, D))]),
        (
            WorkerLost(A),
            [
                Send(A, UserDeleted(THEIRS, D)),
                Fail(THEIRS, D, Reason.OWNER_LOST),
                Send(B, ChildConfirmed(THEIRS, D)),
            ],
        ),
        (CreateRemote(MINE, F, A), [Fail(MINE, F, Reason.OWNER_LOST)]),
    ],
    "shutdown: everything counts as dropped": [
        (Received(THEIRS, D, None, A, A), [Confirm(THEIRS, D)]),
        (Share(MINE, MINE, C, B), []),
        (DropAll(), [Send(A, UserDeleted(THEIRS, D))]),
        (Arrived(B, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "a fork can be deleted by its holder only": [
        (Share(MINE, MINE, C, A), []),
        (HandleDropped(MINE, MINE), []),
        (Arrived(B, UserDeleted(MINE, C)), []),
        (Arrived(A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
}


@pytest.mark.parametrize("name", TABLES, ids=str)
def test_table(name: str) -> None:
    protocol = RRefProtocol(ME)
    for event, expected in TABLES[name]:
        assert protocol.handle(event) == expected, event


def test_bounded_set_forgets_the_oldest() -> None:
    members = BoundedSet[int](2)
    for member in (1, 2, 3):
        members.add(member)
    assert list(members) == [2, 3] and 1 not in members
    members.discard_if(lambda member: member == 2)
    assert list(members) == [3]
