"""The reference counting of one worker as a table: what happens, and the actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rref_world import (
    Action,
    AnswerFetch,
    FailValue,
    NotedProtocol,
    RefuseCreation,
    ReleaseValue,
    Send,
    SettleHandle,
)

from rpcdist.ids import ProcessId, UniqueId
from rpcdist.rpc._rref.messages import Message, MessageKind, Reason, remember
from rpcdist.rpc._rref.protocol import RRefProtocol

ME, A, B = ProcessId(0, 100), ProcessId(1, 101), ProcessId(2, 102)
MINE = UniqueId(0, 0, 100)  # a reference, and forks, made by this worker
F, C = UniqueId(0, 1, 100), UniqueId(0, 2, 100)
THEIRS = UniqueId(1, 0, 101)  # the same, made by A
G, D, E = UniqueId(1, 1, 101), UniqueId(1, 2, 101), UniqueId(1, 3, 101)

ForkRequest = partial(Message, MessageKind.FORK_REQUEST)
ForkConfirmed = partial(Message, MessageKind.FORK_CONFIRMED)
ForkRefused = partial(Message, MessageKind.FORK_REFUSED)
ChildConfirmed = partial(Message, MessageKind.CHILD_CONFIRMED)
UserDeleted = partial(Message, MessageKind.USER_DELETED)
ShareQuery = partial(Message, MessageKind.SHARE_QUERY)
ShareLost = partial(Message, MessageKind.SHARE_LOST)
CreationQuery = partial(Message, MessageKind.CREATION_QUERY)
CreationProbe = partial(Message, MessageKind.CREATION_PROBE)
CreationOver = partial(Message, MessageKind.CREATION_OVER)

P = RRefProtocol
Table = list[tuple[Callable[..., Reason | None], tuple[Any, ...], list[Action]]]
"""An event, as a method of the protocol and its arguments, and the actions that it calls."""

TABLES: dict[str, Table] = {
    "remote, then dropped before the reply": [
        (P.create_remote, (MINE, F, A), []),
        (P.handle_dropped, (MINE, F), []),
        (P.created, (F,), [SettleHandle(F), Send(A, UserDeleted(MINE, F))]),
    ],
    "G2: a dropped parent waits for its child": [
        (P.create_remote, (MINE, F, A), []),
        (P.created, (F,), [SettleHandle(F)]),
        (P.share, (MINE, F, C, B), []),
        (P.handle_dropped, (MINE, F), []),
        (P.message_arrived, (B, ChildConfirmed(MINE, C)), [Send(A, UserDeleted(MINE, F))]),
        (P.message_arrived, (B, ChildConfirmed(MINE, C)), []),
    ],
    "a child asks the owner, then tells its parent": [
        (P.received, (THEIRS, D, G, B, A), [Send(B, ForkRequest(THEIRS, D))]),
        (
            P.message_arrived,
            (B, ForkConfirmed(THEIRS, D)),
            [SettleHandle(D), Send(A, ChildConfirmed(THEIRS, D))],
        ),
        (P.message_arrived, (B, ForkConfirmed(THEIRS, D)), []),
        (P.handle_dropped, (THEIRS, D), [Send(B, UserDeleted(THEIRS, D))]),
        (P.message_arrived, (B, ForkConfirmed(THEIRS, D)), [Send(B, UserDeleted(THEIRS, D))]),
    ],
    "the owner's own share needs no confirmation": [
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D)]),
        (P.handle_dropped, (THEIRS, D), [Send(A, UserDeleted(THEIRS, D))]),
    ],
    "owner: the value lives while its function runs or a user holds it": [
        (P.creation_accepted, (THEIRS, G, A), []),
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), [Send(B, ForkConfirmed(THEIRS, D))]),
        (P.message_arrived, (A, UserDeleted(THEIRS, G)), []),
        (P.message_arrived, (B, UserDeleted(THEIRS, D)), []),
        (P.creation_finished, (THEIRS,), [ReleaseValue(THEIRS)]),
    ],
    "owner: messages that overtake the call of remote() wait for it": [
        (P.fetch_arrived, (THEIRS, G, A), [Send(A, CreationProbe(THEIRS))]),
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), []),
        (
            P.creation_accepted,
            (THEIRS, G, A),
            [Send(B, ForkConfirmed(THEIRS, D)), AnswerFetch(THEIRS, G, A)],
        ),
    ],
    "owner: a stale request for a value that is gone": [
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), [Send(A, CreationProbe(THEIRS))]),
        (
            P.message_arrived,
            (A, CreationOver(THEIRS)),
            [
                FailValue(THEIRS, Reason.UNKNOWN),
                Send(B, ForkRefused(THEIRS, D, Reason.UNKNOWN)),
                ReleaseValue(THEIRS),
            ],
        ),
    ],
    "owner: a call that its creator gave up is refused": [
        (
            P.message_arrived,
            (A, CreationQuery(THEIRS, G)),
            [Send(A, ForkRefused(THEIRS, G, Reason.CREATION_FAILED))],
        ),
        (P.creation_accepted, (THEIRS, G, A), [RefuseCreation(Reason.CREATION_FAILED)]),
    ],
    "creator: a failed call is asked about, and held if it arrived": [
        (P.create_remote, (MINE, F, A), []),
        (P.creation_failed, (MINE, F), [Send(A, CreationQuery(MINE, F))]),
        (P.message_arrived, (A, ForkConfirmed(MINE, F)), [SettleHandle(F)]),
        (P.handle_dropped, (MINE, F), [Send(A, UserDeleted(MINE, F))]),
    ],
    "a fork that comes home becomes a local handle": [
        (P.share, (MINE, MINE, C, A), []),
        (P.received, (MINE, D, C, ME, A), [Send(A, ChildConfirmed(MINE, D)), SettleHandle(D)]),
        (P.message_arrived, (A, UserDeleted(MINE, C)), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.handle_dropped, (MINE, D), [ReleaseValue(MINE)]),
    ],
    "a share that was lost": [
        (P.share, (MINE, MINE, C, A), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.share_failed, (MINE, C), [Send(A, ShareQuery(MINE, C))]),
        (P.message_arrived, (A, ShareLost(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "a broken connection: every share is asked for, except those on the way": [
        (P.create_remote, (MINE, F, B), []),
        (P.share, (MINE, F, C, A), []),
        (P.share, (THEIRS, THEIRS, D, A), []),
        (P.connection_broken, (A, frozenset({D})), [Send(A, ShareQuery(MINE, C))]),
        (P.connection_broken, (B,), []),
    ],
    "the receiver of a lost share refuses it when it comes late": [
        (P.message_arrived, (A, ShareQuery(THEIRS, D)), [Send(A, ShareLost(THEIRS, D))]),
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D, Reason.SHARE_LOST)]),
    ],
    "a share that arrived is kept, whatever its sender fears": [
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D)]),
        (P.message_arrived, (A, ShareQuery(THEIRS, D)), []),
    ],
    "G4: the lease of a user ends, and it comes back": [
        (P.share, (MINE, MINE, C, A), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.lease_ended, (A,), [ReleaseValue(MINE)]),
        (
            P.message_arrived,
            (A, ForkRequest(MINE, D)),
            [Send(A, ForkRefused(MINE, D, Reason.LEASE_EXPIRED))],
        ),
        (
            P.fetch_arrived,
            (MINE, C, A),
            [AnswerFetch(MINE, C, A, Reason.LEASE_EXPIRED), Send(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))],
        ),
        (P.creation_accepted, (THEIRS, G, A), [RefuseCreation(Reason.LEASE_EXPIRED)]),
    ],
    "G4: a worker that comes back is told which forks are gone, and may hold new ones": [
        (P.share, (MINE, MINE, C, A), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.lease_ended, (A,), [ReleaseValue(MINE)]),
        (P.holder_found, (A,), [Send(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))]),
        (P.holder_found, (A,), []),
        (P.creation_accepted, (THEIRS, G, A), []),
        (P.message_arrived, (A, UserDeleted(MINE, C)), []),
        (
            P.fetch_arrived,
            (MINE, C, A),
            [AnswerFetch(MINE, C, A, Reason.LEASE_EXPIRED), Send(A, ForkRefused(MINE, C, Reason.LEASE_EXPIRED))],
        ),
        (P.creation_finished, (THEIRS,), []),
        (P.fetch_arrived, (THEIRS, G, A), [AnswerFetch(THEIRS, G, A)]),
        (P.message_arrived, (A, UserDeleted(THEIRS, G)), [ReleaseValue(THEIRS)]),
    ],
    "G4: the late user gives up what the owner names": [
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D)]),
        (P.received, (THEIRS, G, None, A, A), [SettleHandle(G)]),
        (
            P.message_arrived,
            (A, ForkRefused(THEIRS, D, Reason.LEASE_EXPIRED)),
            [Send(A, UserDeleted(THEIRS, D)), SettleHandle(D, Reason.LEASE_EXPIRED)],
        ),
        (P.message_arrived, (A, ForkRefused(THEIRS, E, Reason.LEASE_EXPIRED)), []),
        (P.received, (THEIRS, E, None, A, A), [SettleHandle(E, Reason.SHARE_LOST)]),
    ],
    "G5: the owner is lost": [
        (P.received, (THEIRS, D, G, A, B), [Send(A, ForkRequest(THEIRS, D))]),
        (
            P.holder_lost,
            (A,),
            [
                Send(A, UserDeleted(THEIRS, D)),
                SettleHandle(D, Reason.OWNER_LOST),
                Send(B, ChildConfirmed(THEIRS, D)),
            ],
        ),
        (P.create_remote, (MINE, F, A), [SettleHandle(F, Reason.OWNER_LOST)]),
    ],
    "shutdown: everything counts as dropped": [
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D)]),
        (P.share, (MINE, MINE, C, B), []),
        (P.drop_all, (), [Send(A, UserDeleted(THEIRS, D))]),
        (P.message_arrived, (B, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: a value goes to who holds the fork that he names": [
        (P.share, (MINE, MINE, C, A), []),
        (P.fetch_arrived, (MINE, C, A), [AnswerFetch(MINE, C, A)]),
        (P.fetch_arrived, (MINE, C, B), [AnswerFetch(MINE, C, B, Reason.NOT_HELD)]),
        (P.fetch_arrived, (MINE, D, B), [AnswerFetch(MINE, D, B, Reason.NOT_HELD)]),
        (P.fetch_arrived, (MINE, MINE, A), [AnswerFetch(MINE, MINE, A, Reason.NOT_HELD)]),
        (P.message_arrived, (B, ForkRequest(MINE, D)), [Send(B, ForkConfirmed(MINE, D))]),
        (P.fetch_arrived, (MINE, D, B), [AnswerFetch(MINE, D, B)]),
        (P.message_arrived, (B, UserDeleted(MINE, D)), []),
        (P.fetch_arrived, (MINE, D, B), [AnswerFetch(MINE, D, B, Reason.NOT_HELD)]),
        (P.handle_dropped, (MINE, MINE), []),
        (P.message_arrived, (A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
        (P.fetch_arrived, (MINE, C, A), [AnswerFetch(MINE, C, A, Reason.UNKNOWN)]),
    ],
    "G6: a worker that waits for a creation gets what it holds then": [
        (P.fetch_arrived, (THEIRS, D, B), [AnswerFetch(THEIRS, D, B, Reason.UNKNOWN)]),
        (P.fetch_arrived, (THEIRS, G, A), [Send(A, CreationProbe(THEIRS))]),
        (P.fetch_arrived, (THEIRS, E, A), []),
        (P.fetch_arrived, (THEIRS, D, B), [AnswerFetch(THEIRS, D, B, Reason.NOT_HELD)]),
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), []),
        (P.fetch_arrived, (THEIRS, D, B), []),
        (P.fetch_arrived, (THEIRS, D, A), [AnswerFetch(THEIRS, D, A, Reason.NOT_HELD)]),
        (
            P.creation_accepted,
            (THEIRS, G, A),
            [
                Send(B, ForkConfirmed(THEIRS, D)),
                AnswerFetch(THEIRS, G, A),
                AnswerFetch(THEIRS, E, A, Reason.NOT_HELD),
                AnswerFetch(THEIRS, D, B),
            ],
        ),
    ],
    "G6: a child named too early by its maker does not stand in the way of its holder": [
        (P.fetch_arrived, (THEIRS, D, A), [Send(A, CreationProbe(THEIRS))]),
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), []),
        (P.fetch_arrived, (THEIRS, D, B), [AnswerFetch(THEIRS, D, A, Reason.NOT_HELD)]),
        (
            P.creation_accepted,
            (THEIRS, G, A),
            [Send(B, ForkConfirmed(THEIRS, D)), AnswerFetch(THEIRS, D, B)],
        ),
    ],
    "G6: the fork of another is requested": [
        (P.share, (MINE, MINE, C, A), []),
        (
            P.message_arrived,
            (B, ForkRequest(MINE, C)),
            [Send(B, ForkRefused(MINE, C, Reason.NOT_HELD))],
        ),
        (P.handle_dropped, (MINE, MINE), []),
        (P.message_arrived, (B, UserDeleted(MINE, C)), []),
        (P.message_arrived, (A, ForkRequest(MINE, C)), [Send(A, ForkConfirmed(MINE, C))]),
        (P.message_arrived, (A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: the fork of one who waits is requested": [
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), [Send(A, CreationProbe(THEIRS))]),
        (
            P.message_arrived,
            (A, ForkRequest(THEIRS, D)),
            [Send(A, ForkRefused(THEIRS, D, Reason.NOT_HELD))],
        ),
        (P.creation_accepted, (THEIRS, G, A), [Send(B, ForkConfirmed(THEIRS, D))]),
    ],
    "G6: somebody else creates, gives up, or asks about, the reference of a worker": [
        (P.creation_accepted, (THEIRS, G, B), [RefuseCreation(Reason.NOT_HELD)]),
        (P.creation_accepted, (MINE, G, A), [RefuseCreation(Reason.NOT_HELD)]),
        (P.creation_accepted, (THEIRS, C, A), [RefuseCreation(Reason.NOT_HELD)]),
        (P.message_arrived, (B, CreationQuery(THEIRS, G)), []),
        (P.message_arrived, (B, ForkRequest(THEIRS, D)), [Send(A, CreationProbe(THEIRS))]),
        (P.message_arrived, (B, CreationOver(THEIRS)), []),
        (P.message_arrived, (B, CreationQuery(THEIRS, G)), []),
        (P.creation_accepted, (THEIRS, G, A), [Send(B, ForkConfirmed(THEIRS, D))]),
    ],
    "G6: a value of ours comes with the fork of another": [
        (P.share, (MINE, MINE, C, A), []),
        (P.received, (MINE, C, G, ME, B), [Send(B, ChildConfirmed(MINE, C)), SettleHandle(C)]),
        (P.handle_dropped, (MINE, C), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.fetch_arrived, (MINE, C, A), [AnswerFetch(MINE, C, A)]),
        (P.message_arrived, (A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
    "G6: verdicts on a fork count from its owner": [
        (P.received, (THEIRS, D, G, B, A), [Send(B, ForkRequest(THEIRS, D))]),
        (P.message_arrived, (A, ForkConfirmed(THEIRS, D)), []),
        (P.message_arrived, (A, ForkRefused(THEIRS, D, Reason.UNKNOWN)), []),
        (P.message_arrived, (A, ForkRefused(THEIRS, D, Reason.LEASE_EXPIRED)), []),
        (
            P.message_arrived,
            (B, ForkConfirmed(THEIRS, D)),
            [SettleHandle(D), Send(A, ChildConfirmed(THEIRS, D))],
        ),
        (P.message_arrived, (B, ForkRefused(THEIRS, E, Reason.LEASE_EXPIRED)), []),
        (P.received, (THEIRS, E, G, B, A), [Send(B, ForkRequest(THEIRS, E))]),
    ],
    "G6: the end of a share counts from who got it, the question about it from who made it": [
        (P.create_remote, (MINE, F, A), []),
        (P.created, (F,), [SettleHandle(F)]),
        (P.share, (MINE, F, C, B), []),
        (P.handle_dropped, (MINE, F), []),
        (P.message_arrived, (A, ChildConfirmed(MINE, C)), []),
        (P.message_arrived, (A, ShareLost(MINE, C)), []),
        (P.message_arrived, (B, ShareLost(MINE, C)), [Send(A, UserDeleted(MINE, F))]),
        (P.message_arrived, (B, ShareQuery(THEIRS, D)), []),
        (P.received, (THEIRS, D, None, A, A), [SettleHandle(D)]),
        (P.message_arrived, (B, CreationProbe(MINE)), [Send(B, CreationOver(MINE))]),
    ],
    "a fork can be deleted by its holder only": [
        (P.share, (MINE, MINE, C, A), []),
        (P.handle_dropped, (MINE, MINE), []),
        (P.message_arrived, (B, UserDeleted(MINE, C)), []),
        (P.message_arrived, (A, UserDeleted(MINE, C)), [ReleaseValue(MINE)]),
    ],
}


@pytest.mark.parametrize("name", TABLES, ids=str)
def test_table(name: str) -> None:
    protocol = NotedProtocol(ME)
    for happens, args, expected in TABLES[name]:
        is_served = happens == RRefProtocol.fetch_arrived and protocol.owners.serves_at_once(*args)
        assert protocol.step(happens, *args) == expected, (happens, args)
        if is_served:
            assert expected == [AnswerFetch(*args)], (happens, args)


def test_bounded_set_forgets_the_oldest() -> None:
    members: dict[int, None] = {}
    for member in (1, 2, 3):
        remember(members, member, limit=2)
    assert list(members) == [2, 3] and 1 not in members
