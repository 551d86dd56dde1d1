"""Operations and messages of a group over sockets that speak TLS: the threads that wait for bytes decrypt them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from group_functions import EVERY_KIND, operation_for
from inside_groups import TransportPeerLost, TransportTimeout
from point_pairs import in_threads, isend, number, recv, send, state_of
from socket_hubs import LIMIT_S, hubs, write_all
from socket_ranks import FakeControl, Ranks, connections_of, socket_ranks
from transport_in_memory import reference

from rpcdist.collectives._operations.dense import memory_of
from rpcdist.collectives._operations.operation import Kind, Operation
from rpcdist.collectives._transports import transport_base
from rpcdist.collectives._transports.p2p.messenger import Messenger, open_messenger
from rpcdist.collectives._transports.sockets.pair_connections import OperationFrame, PairConnections
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.errors import CollectiveTimeout, GroupAborted, RankLost
from rpcdist.testing import eventually
from rpcdist.testing.limits import UNIT_S
from rpcdist.transport._tls.tls_socket import TlsSocket

SIZE, FAULTY = 3, 0
HALF_A_RECORD = b"\x17\x03\x03\x40\x00" + bytes(100)  # announces 16 KiB
INJECTED = {"garbage": os.urandom(300), "a plain message": b"rpcC" + bytes(60), "half a record": HALF_A_RECORD}
TOLD = GroupAborted("an operation", "another rank told the engine")


@pytest.fixture(autouse=True)
def tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")


@pytest.fixture
def mailboxes() -> Iterator[tuple[Messenger, Messenger]]:
    with hubs(2) as opened:
        addresses = [hub.address.partition(",")[0] for hub in opened]  # without the Unix socket
        members = [open_messenger("test", rank, range(2), hub, "uid", addresses) for rank, hub in enumerate(opened)]
        try:
            yield members[0], members[1]
        finally:
            for member in members:
                member.close()


def operations(kind: Kind, count: int) -> list[Operation]:
    return [operation_for(kind, rank, SIZE, count) for rank in range(SIZE)]


def connections(ranks: Ranks, rank: int) -> list[TlsSocket]:
    found = list(connections_of(ranks.transports[rank]).values())
    assert found and all(isinstance(one, TlsSocket) for one in found)
    return [one for one in found if isinstance(one, TlsSocket)]


def run_and_compare(ranks: Ranks, given: list[Operation]) -> None:
    inputs = [[tensor.clone().view(-1) for tensor in operation.inputs] for operation in given]
    ranks.run_well(given)
    for rank, operation in enumerate(given):
        wanted = reference(operation, rank, inputs)
        assert all(torch.equal(one, other) for one, other in zip(operation.outputs, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 5_000])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.title)
def test_every_operation(kind: Kind, count: int) -> None:
    with socket_ranks(SIZE, unix=False) as ranks:
        for _ in range(3):
            run_and_compare(ranks, operations(kind, count))
        assert connections(ranks, 0)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_TO_ALL], ids=lambda kind: kind.title)
@pytest.mark.parametrize("sockets_per_pair", [1, 3])
def test_messages_of_several_turns(kind: Kind, sockets_per_pair: int) -> None:
    with socket_ranks(SIZE, unix=False, sockets_per_pair=sockets_per_pair) as ranks:
        for _ in range(3):
            run_and_compare(ranks, operations(kind, 2_000_000))


def test_small_all_reduces_of_two_ranks() -> None:
    with socket_ranks(2, unix=False) as ranks:
        for count in (1, 10, 1000) * 3:
            run_and_compare(ranks, [operation_for(Kind.ALL_REDUCE, rank, 2, count) for rank in range(2)])


@pytest.mark.parametrize("fault", ["cut", "garbage", "a plain message", "half a record"])
def test_a_connection_that_breaks_names_the_peer(fault: str) -> None:
    with socket_ranks(SIZE, unix=False) as ranks:
        ranks.run_well(operations(Kind.ALL_TO_ALL, 1))
        for connection in connections(ranks, FAULTY):
            if fault == "cut":
                connection.shutdown(socket.SHUT_RDWR)
            else:  # as somebody on the way would put it there
                os.write(connection.fileno(), INJECTED[fault])
                if fault == "half a record":
                    connection.shutdown(socket.SHUT_WR)
        running = ranks.start(operations(Kind.ALL_REDUCE, 100_000))
        assert isinstance(running.join_any(), TransportPeerLost)
        for control in ranks.controls:
            assert control is not None
            control.fail(TOLD)
        errors = running.join()
        lost = [(rank, error.rank) for rank, error in enumerate(errors) if isinstance(error, TransportPeerLost)]
        assert lost and all(FAULTY in pair for pair in lost), errors


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_half_a_record_is_waited_for_until_the_deadline(count: int) -> None:
    with socket_ranks(2, unix=False) as ranks:
        for _ in range(2):
            ranks.run_well([operation_for(Kind.ALL_REDUCE, rank, 2, 1) for rank in range(2)])
        [connection] = connections(ranks, FAULTY)
        os.write(connection.fileno(), HALF_A_RECORD)
        operation = operation_for(Kind.ALL_REDUCE, 1 - FAULTY, 2, count)
        error = ranks.run([None, operation], timeout_s=5 * UNIT_S)[1 - FAULTY]
        assert isinstance(error, TransportTimeout)
        assert error.waiting_for == {FAULTY}
        [connection] = connections(ranks, 1 - FAULTY)
        assert not connection.has_buffered  # it slept, and did not look again and again


def test_messages_of_all_sizes_both_ways_at_once(mailboxes: tuple[Messenger, Messenger]) -> None:
    sizes = [1, 10, 1_000, 4_096, 16_384, 50_000, 300_000, 3, 1_000_000, 2]

    def run(me: int) -> None:
        works = [isend(mailboxes[me], torch.full((size,), float(size + me)), 1 - me) for size in sizes]
        for size in sizes:
            got = torch.zeros(size)
            recv(mailboxes[me], got, 1 - me)
            assert bool((got == size + 1 - me).all())
        assert all(work.wait() for work in works)

    in_threads(lambda: run(0), lambda: run(1))
    assert isinstance(state_of(mailboxes[0]).outgoing[1].sock, TlsSocket)


def test_a_message_that_is_encrypted_in_part_is_not_left_out(mailboxes: tuple[Messenger, Messenger]) -> None:
    """The socket is full: what comes next would else stand where the rest of a record belongs."""
    send(mailboxes[0], number(1), 1)
    connection = state_of(mailboxes[0]).outgoing[1]
    messages = [isend(mailboxes[0], torch.zeros(4_000), 1) for _ in range(6_000)]
    eventually(lambda: connection.stream.num_owed > 0, "the socket is full")
    with pytest.raises(CollectiveTimeout):
        next(message for message in messages if not message.is_completed()).wait(0.01)
    mailboxes[0]._withdraw(next(iter(state_of(mailboxes[0]).pending)))
    assert connection.ended is not None and "timed out in the middle of the message" in connection.ended
    recv(mailboxes[1], got := number(0), 0)
    assert got == 1
    with pytest.raises(RankLost, match=r"closed the connection|connection was reset"):
        for _ in messages:
            recv(mailboxes[1], torch.zeros(4_000), 0)


def test_what_a_record_holds_is_read_before_a_thread_sleeps(mailboxes: tuple[Messenger, Messenger]) -> None:
    """Many messages in one record: no poll tells of the second."""
    count = 200
    got = [torch.zeros(1) for _ in range(count)]

    def receive() -> None:
        for tensor in got:
            recv(mailboxes[1], tensor, 0)

    receiver = threading.Thread(target=receive)
    receiver.start()
    works = [isend(mailboxes[0], torch.full((1,), float(index)), 1) for index in range(count)]
    receiver.join(LIMIT_S)
    assert not receiver.is_alive() and all(work.wait() for work in works)
    assert all(after - before == 1 for before, after in pairwise(got))


@pytest.mark.parametrize("small", [True, False])
def test_the_rest_of_a_record_is_read_although_no_poll_tells_of_it(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two messages come in one record; the thread that has read the first must not sleep before the second."""
    monkeypatch.setattr(transport_base, "SPIN_LIMIT_S", 0.0)
    with hubs(2) as (mine, theirs), ExitStack() as stack:
        transport = SocketTransport(
            PairConnections(1, theirs, "test group", [mine.address, theirs.address], unix=False)
        )
        stack.callback(transport.close)
        if not small:
            transport._peer = -1  # the other way to run the same plan
        link = mine.connect(theirs.address, "test group/link/0.0", LIMIT_S, unix=False)
        stack.callback(link.close)
        given = [operation_for(Kind.ALL_REDUCE, 1, 2, 4) for _ in range(3)]
        controls = [FakeControl(operation, number + 1) for number, operation in enumerate(given)]
        for control in controls:
            stack.callback(control.close)
        five = torch.full((4,), 5.0)
        payload = bytes(memory_of(five))
        frames = [OperationFrame(0, control.fingerprint, control.sequence, 0) for control in controls]
        messages = [frame.header(0, len(payload)) + payload for frame in frames]
        both = list(zip(given, controls, strict=True))
        for sent, part in ((messages[0], both[:1]), (messages[1] + messages[2], both[1:])):
            write_all(link, sent)
            for operation, control in part:
                began = time.monotonic()
                transport.run(operation, control)
                wanted = reference(operation, 1, [[five], [torch.ones(4)]])
                assert torch.equal(operation.outputs[0], wanted[0])
                assert time.monotonic() - began < LIMIT_S / 2, "it slept although the message was there"
