"""Operations over sockets that cannot succeed end with the right error, on every rank, and soon."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from inside_groups import TransportMismatch, TransportPeerLost, TransportTimeout
from socket_hubs import LIMIT_S, hubs, read_exactly, read_some
from socket_ranks import FakeControl, Ranks, socket_ranks

from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._transports.sockets.pair_connections import HEADER_BYTES, OperationFrame, PairConnections
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.errors import GroupAborted

SUM = ReduceOp.SUM
FAILED = GroupAborted("an operation", "another rank told the engine")


def all_reduce(count: int = 8, op: ReduceOp = SUM, dtype: torch.dtype = torch.float32) -> Operation:
    tensor = torch.ones(count, dtype=dtype)
    return Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), op)


def broadcast(root: int, count: int = 8) -> Operation:
    tensor = torch.ones(count)
    return Operation(Kind.BROADCAST, (tensor,), (tensor,), root=root)


def reduce(root: int) -> Operation:
    tensor = torch.ones(8)
    return Operation(Kind.REDUCE, (tensor,), (tensor,), SUM, root)


def all_gather(size: int, count: int = 8) -> Operation:
    return Operation(Kind.ALL_GATHER, (torch.ones(count),), tuple(torch.ones(count) for _ in range(size)))


def gather(rank: int, size: int, root: int) -> Operation:
    outputs = tuple(torch.ones(8) for _ in range(size)) if rank == root else ()
    return Operation(Kind.GATHER, (torch.ones(8),), outputs, root=root)


def scatter(rank: int, size: int, root: int) -> Operation:
    inputs = tuple(torch.ones(8) for _ in range(size)) if rank == root else ()
    return Operation(Kind.SCATTER, inputs, (torch.ones(8),), root=root)


def reduce_scatter(rank: int, counts: list[int]) -> Operation:
    return Operation(Kind.REDUCE_SCATTER, tuple(map(torch.ones, counts)), (torch.ones(counts[rank]),), SUM)


def all_to_all(sent: list[int], received: list[int]) -> Operation:
    return Operation(Kind.ALL_TO_ALL, tuple(map(torch.ones, sent)), tuple(map(torch.ones, received)))


Make = Callable[[int, int], Operation]  # rank and size to what this rank calls

MISMATCHES: dict[str, Make] = {
    "kind": lambda rank, size: Operation(Kind.BARRIER) if rank == 1 else all_reduce(),
    "kind, all wait for others": lambda rank, size: reduce(rank) if rank % 2 else broadcast((rank + 1) % size),
    "large and small": lambda rank, size: all_reduce(1 << 20) if rank == 0 else all_reduce(8),
    "size": lambda rank, size: all_reduce(7 + (rank == size - 1)),
    "size of large ones": lambda rank, size: all_reduce((1 << 20) + (rank == size - 1)),
    "dtype": lambda rank, size: all_reduce(dtype=torch.int32 if rank == 0 else torch.float32),
    "reduction": lambda rank, size: all_reduce(op=ReduceOp.MAX if rank == 0 else SUM),
    "root of a broadcast": lambda rank, size: broadcast(root=rank),
    "root of a broadcast, each expects from the next": lambda rank, size: broadcast(root=(rank + 1) % size),
    "root of a large broadcast": lambda rank, size: broadcast(root=0 if rank else 1, count=1 << 20),
    "root of a reduce": lambda rank, size: reduce(root=rank),
    "root of a gather": lambda rank, size: gather(rank, size, root=rank),
    "root of a scatter": lambda rank, size: scatter(rank, size, root=(rank + 1) % size),
    "size of an all_gather": lambda rank, size: all_gather(size, 8 + rank),
    "gather and scatter": lambda rank, size: gather(rank, size, 0) if rank else scatter(rank, size, 0),
    "chunks of a reduce_scatter": lambda rank, size: reduce_scatter(
        rank, [1, 2, *[3] * (size - 2)] if rank else [2, 1, *[3] * (size - 2)]
    ),
    "chunks of an all_to_all": lambda rank, size: all_to_all([2] * size, [2] * (size - 1) + [2 + (rank == 0)]),
    "order": lambda rank, size: all_reduce() if rank else Operation(Kind.BARRIER),
}


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with socket_ranks(request.param, unix=False) as ranks:
        yield ranks


def with_sizes(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("group", sizes, indirect=True, ids=lambda size: f"{size} ranks")


@with_sizes(2, 3, 4)
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_found_and_no_rank_succeeds(group: Ranks, case: str) -> None:
    size = len(group.transports)
    group.run_well([Operation(Kind.BARRIER)] * size)
    running = group.start([MISMATCHES[case](rank, size) for rank in range(size)])
    wait_for_error(group, running.join_any())
    errors = running.join()
    assert all(errors), f"a rank succeeded: {errors}"
    found = [error for error in errors if isinstance(error, TransportMismatch)]
    assert found
    for error in found:
        assert len(error.views) == 2
        assert len(set(error.views.values())) == 2, "the views look the same"
        assert all("#2" in view for view in error.views.values()), error.views


def wait_for_error(group: Ranks, error: Exception | None) -> None:
    """The behaviour of the engine: the first rank that fails tells the others."""
    assert isinstance(error, TransportMismatch), error
    for control in group.controls:
        assert control is not None
        control.fail(FAILED)


@with_sizes(3)
def test_views_say_what_differs(group: Ranks) -> None:
    running = group.start([all_to_all([2, 2, 2], [2, 2, 2 + (rank == 0)]) for rank in range(3)])
    wait_for_error(group, running.join_any())
    [error] = [error for error in running.join() if isinstance(error, TransportMismatch)]
    assert error.views == {
        0: "all_to_all #1 (float32) expecting 12 bytes",
        2: "all_to_all #1 (float32) sending 8 bytes",
    }


@with_sizes(2, 4)
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_a_timeout_names_who_is_missing(group: Ranks, missing: int, count: int) -> None:
    size = len(group.transports)
    operations = [None if rank == missing else all_reduce(count) for rank in range(size)]
    errors = group.run(operations, timeout_s=0.3 if count == 1 else 1.5)  # in which all that can be sent is sent
    for rank in range(size):
        if rank != missing:
            error = errors[rank]
            assert isinstance(error, TransportTimeout)
            assert error.waiting_for and rank not in error.waiting_for
    assert any(isinstance(error, TransportTimeout) and missing in error.waiting_for for error in errors)


@with_sizes(2)
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_ends_the_wait_at_once(group: Ranks, connected: bool, rank: int) -> None:
    if connected:
        group.run_well([Operation(Kind.BARRIER)] * 2)
    running = group.start([all_reduce() if each == rank else None for each in range(2)])
    control = group.controls[rank]
    assert control is not None
    began = time.monotonic()
    control.fail(FAILED)
    assert running.join()[rank] is FAILED
    assert time.monotonic() - began < LIMIT_S / 2


@with_sizes(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count", [1, 1 << 22])
def test_the_end_of_a_peer_is_noticed(group: Ranks, rank: int, count: int) -> None:
    group.run_well([Operation(Kind.BARRIER)] * 2)
    running = group.start([all_reduce(count) if each == rank else None for each in range(2)])
    group.transports[1 - rank].close()
    error = running.join()[rank]
    assert isinstance(error, TransportPeerLost) and error.rank == 1 - rank


def test_an_unreachable_peer_is_lost() -> None:
    with hubs(2) as (mine, other):
        transport = SocketTransport(PairConnections(0, mine, "test group", [mine.address, other.address], unix=False))
        other.close()
        control = FakeControl(Operation(Kind.BARRIER), 1)
        try:
            with pytest.raises(TransportPeerLost, match="does not accept such sockets") as caught:
                transport.run(Operation(Kind.BARRIER), control)
            assert caught.value.rank == 1
        finally:
            control.close()
            transport.close()
            transport.close()


# ------------------------------------------------------------ a peer by hand


@contextmanager
def scripted_peer(operation: Operation) -> Iterator[tuple[socket.socket, Callable[[], Exception | None]]]:
    """Rank 1 runs an operation, and rank 0 is a bare socket of the test; the callable waits for rank 1's end."""
    with hubs(2) as (mine, theirs):
        transport = SocketTransport(
            PairConnections(1, theirs, "test group", [mine.address, theirs.address], unix=False)
        )
        control = FakeControl(operation, 1)
        errors: list[Exception] = []

        def run() -> None:
            try:
                transport.run(operation, control)
            except Exception as exc:
                errors.append(exc)

        thread = threading.Thread(target=run)
        thread.start()

        def end() -> Exception | None:
            thread.join(LIMIT_S + 5)
            assert not thread.is_alive()
            return errors[0] if errors else None

        try:
            with mine.connect(theirs.address, "test group/link/0.0", LIMIT_S, unix=False) as link:
                assert isinstance(link, socket.socket)
                link.settimeout(LIMIT_S)
                yield link, end
        finally:
            control.fail(FAILED)
            end()
            transport.close()
            control.close()


def header(operation: Operation, round_number: int, size_bytes: int) -> bytes:
    return OperationFrame(0, operation.fingerprint(1), 1, 0).header(round_number, size_bytes)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [0, 10, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 200_000])
def test_a_socket_cut_in_the_middle_of_a_message(sent: int, reset: bool) -> None:
    count = 1 << 20
    operation = all_reduce(count)
    message = header(operation, 0, 2 * count) + bytes(2 * count)
    with scripted_peer(operation) as (link, end):
        reader = threading.Thread(target=read_until_cut, args=(link,))
        reader.start()
        link.sendall(message[:sent])
        if reset:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.shutdown(socket.SHUT_RDWR)
        link.close()  # the fault
        reader.join(LIMIT_S)
        error = end()
        assert isinstance(error, TransportPeerLost) and error.rank == 0 and error.reason


def read_until_cut(link: socket.socket) -> None:
    try:
        while link.recv(1 << 16):
            pass
    except OSError:
        pass


def test_a_slow_peer_is_waited_for() -> None:
    """Every byte comes alone, the header's too."""
    operation = all_reduce(5)
    message = header(operation, 0, 20) + struct.pack("<5f", *range(5))
    with scripted_peer(operation) as (link, end):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(message)):
            link.sendall(message[index : index + 1])
            time.sleep(0.001)  # the other side reads each byte by itself
        assert read_exactly(link, HEADER_BYTES + 20)[:HEADER_BYTES] == header(operation, 0, 20)
        assert end() is None
        assert operation.outputs[0].tolist() == [1, 2, 3, 4, 5]


def test_a_peer_that_reads_slowly_is_waited_for() -> None:
    count = 1 << 22
    operation = broadcast(root=1, count=count)
    with scripted_peer(operation) as (link, end):
        link.sendall(header(operation, 0, 0))
        received = read_exactly(link, HEADER_BYTES)
        assert received == header(operation, 0, 4 * count)
        got = 0
        while got < 4 * count:
            got += len(link.recv(1 << 18))
            time.sleep(0.0005)  # the other side fills the buffers in the meantime
        assert end() is None


@pytest.mark.parametrize(
    ("bad", "view"),
    [
        (b"GET / HTTP/1.1\r\n" * 10, "unreadable bytes"),
        (bytes(HEADER_BYTES), "unreadable bytes"),
        (header(all_reduce(), 3, 32), "at step 1.3"),
        (header(all_reduce(), 0, 8), "sending 8 bytes"),
    ],
)
def test_what_is_no_header_of_this_step_is_a_mismatch_and_touches_nothing(bad: bytes, view: str) -> None:
    operation = all_reduce()
    before = operation.outputs[0].clone()
    with scripted_peer(operation) as (link, end):
        link.sendall(bad + bytes(64))
        error = end()
        assert isinstance(error, TransportMismatch)
        assert view in error.views[0] and error.views[1].startswith("all_reduce #1 (SUM, 8 elements of float32)")
        assert torch.equal(operation.outputs[0], before)


def test_connections_that_are_not_wanted_are_closed() -> None:
    with hubs(2) as (mine, theirs):
        transport = SocketTransport(PairConnections(1, theirs, "test group", [mine.address, theirs.address]))
        try:
            for purpose in ("link/x", "link/0", "link/0.1", "link/1.0", "link/7.0"):
                with mine.connect(theirs.address, f"test group/{purpose}", LIMIT_S) as link:
                    assert read_some(link, 1) == b""
            with mine.connect(theirs.address, "test group/link/0.0", LIMIT_S) as first:
                with mine.connect(theirs.address, "test group/link/0.0", LIMIT_S) as second:
                    assert read_some(second, 1) == b""
                transport.close()
                assert read_some(first, 1) == b""
        finally:
            transport.close()
