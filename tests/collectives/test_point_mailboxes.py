"""Messenger over real socket hubs, within one process and between processes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from point_pairs import BIG, LIMIT_S, in_threads, irecv, isend, number, recv, send, state_of
from socket_hubs import hubs, open_hub

from rpcdist.collectives._transports.p2p.messenger import Messenger, open_messenger
from rpcdist.errors import CollectiveTimeout, ForkedProcess, RankLost
from rpcdist.testing import Program


@contextmanager
def group(size: int) -> Iterator[list[Messenger]]:
    """Messenger of ranks that are 10, 11 ... in the world."""
    with hubs(size) as opened:
        addresses = [hub.address for hub in opened]
        ranks = range(10, 10 + size)
        members = [open_messenger("test", rank, ranks, hub, "uid", addresses) for rank, hub in enumerate(opened)]
        try:
            yield members
        finally:
            for member in members:
                member.close()


def test_messages_find_their_way() -> None:
    with group(3) as members:

        def run(me: int) -> None:
            works = [isend(members[me], torch.full((BIG // 10,), float(me)), peer, 10 * me + peer) for peer in range(3)]
            for peer in range(3):
                got = torch.zeros(BIG // 10)
                assert recv(members[me], got, None, 10 * peer + me).source_rank() == peer
                assert bool((got == peer).all())
            assert all(work.wait() for work in works)

        in_threads(lambda: run(0), lambda: run(1), lambda: run(2))


def test_groups_on_the_same_hubs_do_not_mix() -> None:
    with hubs(2) as opened:
        addresses = [hub.address for hub in opened]
        groups = [
            [open_messenger(uid, rank, range(2), hub, uid, addresses) for rank, hub in enumerate(opened)]
            for uid in ("one", "two")
        ]
        for value, (sender, _) in enumerate(groups):
            send(sender, number(value), 1)
        for value, (_, receiver) in reversed(list(enumerate(groups))):
            got = number(-1)
            recv(receiver, got, 0)
            assert got == value
        for sender, receiver in groups:
            sender.close()
            receiver.close()


def test_errors_name_ranks_of_the_world() -> None:
    with group(2) as members:
        send(members[0], number(0), 1)
        recv(members[1], number(0), 0)
        members[0].close()
        with pytest.raises(RankLost, match=r"recv #2 from rank 10 .*: rank 10: it left the group") as caught:
            recv(members[1], number(0), 0)
        assert caught.value.ranks == (0,)


def test_a_peer_whose_hub_is_closed_cannot_be_reached() -> None:
    with open_hub() as mine:
        with open_hub() as theirs:
            addresses = [mine.address, theirs.address]
        member = open_messenger("test", 0, range(2), mine, "uid", addresses)
        with pytest.raises(RankLost, match="rank 1: it cannot be reached"):
            send(member, number(0), 1)
        member.close()


def test_a_group_of_one_needs_no_hub() -> None:
    member = open_messenger("test", 0, [3])
    with pytest.raises(CollectiveTimeout, match=r"from any rank within 0\.01 s"):
        recv(member, number(0), None, 0, 0.01)
    member.close()


PEER = """
    import os, sys, torch
    from rpcdist.collectives._transports.p2p.messenger import Messenger, open_messenger
    from rpcdist.transport import acquire_node
    from rpcdist.transport.sockets import SocketHub
    node = acquire_node()
    hub = SocketHub(node)
    hub.open("127.0.0.1")
    print(hub.address)
    member = open_messenger("test", 1, range(2), hub, "uid", [sys.argv[1], hub.address])
    options = dict(asynchronous=False, timeout_s=20.0)
    member.send("a send", torch.ones(3), 0, 0, **options)
    got = torch.zeros(3)
    member.recv("a recv", got, 0, 0, **options)
    print(got.tolist())
    child = os.fork()
    if child == 0:
        try:
            member.send("a send", torch.ones(3), 0, 0, **options)
        except RuntimeError as exc:
            os.write(1, f"{type(exc).__name__}\\n".encode())
        import signal
        signal.pause()
        os._exit(0)
    os.write(1, f"{child}\\n".encode())
    member.send("a send", torch.ones(20_000_000), 0, 1, **options)
"""


@pytest.mark.multiproc
@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL and fork as on Linux")
def test_a_killed_process_is_noticed_at_once_although_its_forked_child_lives() -> None:
    with open_hub() as hub, Program(PEER, hub.address) as peer:
        with closing(open_messenger("test", 0, range(2), hub, "uid", [hub.address, peer.line()])) as member:
            got = torch.zeros(3)
            recv(member, got, 1)
            assert got.tolist() == [1, 1, 1]
            send(member, 2 * got, 1)
            assert peer.line() == "[2.0, 2.0, 2.0]"
            words = {peer.line(), peer.line()}
            assert ForkedProcess.__name__ in words
            (child,) = (int(word) for word in words if word.isdigit())
            try:
                assert select.select([state_of(member).incoming[1].sock], [], [], LIMIT_S)[0], "the long message begins"
                peer.process.kill()
                killed = time.monotonic()
                pending = irecv(member, number(0), 1, 9)
                with pytest.raises(RankLost, match="rank 1: it closed the connection in the middle of a message"):
                    recv(member, torch.zeros(20_000_000), 1, 1)
                with pytest.raises(RankLost, match="rank 1"):
                    pending.wait()
                assert time.monotonic() - killed < LIMIT_S / 2  # its child lives until the end of the test
            finally:
                os.kill(child, signal.SIGKILL)
