"""Every operation over sockets while one rank's connections are cut in the middle of a message, or are very slow.

The faults are a script: a socket of one rank is replaced by one that misbehaves, and counts what it did.
"""

from __future__ import annotations

import socket

import pytest
from group_functions import EVERY_KIND, operation_for
from inside_groups import TransportPeerLost
from socket_ranks import Ranks, connections_of, socket_ranks
from transport_in_memory import reference

from rpcdist.collectives._operations.operation import Kind, Operation
from rpcdist.collectives._transports.sockets.pair_connections import HEADER_BYTES
from rpcdist.errors import GroupAborted

SIZE, FAULTY = 3, 0  # the root of operations that have one
TOLD = GroupAborted("an operation", "another rank told the engine")


class BadSocket:
    """The methods of a socket that a transport uses, with a fault in it.

    Attributes:
        num_faults: how often it misbehaved.
    """

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.num_faults = 0

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()

    def send(self, data: memoryview, flags: int = 0) -> int:
        return self.real.send(data, flags)

    def sendmsg(self, parts: tuple[bytes, memoryview], ancillary: object = (), flags: int = 0) -> int:
        return self.send(memoryview(b"".join(parts)), flags)

    def recv(self, size: int) -> bytes:
        return self.real.recv(size)

    def recv_into(self, room: memoryview) -> int:
        data = self.recv(len(room))
        room[: len(data)] = data
        return len(data)


class CutSocket(BadSocket):
    """Ends after so many bytes in both directions together, without an end of the message."""

    def __init__(self, real: socket.socket, num_bytes: int) -> None:
        super().__init__(real)
        self._left = num_bytes

    def _most(self, size: int) -> int:
        if not self._left:
            raise ConnectionResetError("cut")
        return min(size, self._left)

    def _moved(self, number: int) -> None:
        self._left -= number
        if not self._left:
            self.num_faults += 1
            self.real.shutdown(socket.SHUT_RDWR)

    def send(self, data: memoryview, flags: int = 0) -> int:
        number = self.real.send(data[: self._most(len(data))], flags)
        self._moved(number)
        return number

    def recv(self, size: int) -> bytes:
        data = self.real.recv(self._most(size))
        self._moved(len(data))
        return data


class SlowSocket(BadSocket):
    """Takes and gives little at a time, and every other time nothing."""

    def _little(self, size: int) -> int:
        self.num_faults += 1
        if self.num_faults % 2:
            raise BlockingIOError
        return max(1, min(size, 7 if size <= 1000 else size // 5))

    def send(self, data: memoryview, flags: int = 0) -> int:
        return self.real.send(data[: self._little(len(data))], flags)

    def recv(self, size: int) -> bytes:
        return self.real.recv(self._little(size))


def spoil(ranks: Ranks, make: type[BadSocket], *arguments: int) -> list[BadSocket]:
    """Replaces the connections of the faulty rank."""
    connections = connections_of(ranks.transports[FAULTY])
    for place, real in list(connections.items()):
        connections[place] = make(real, *arguments)
    return list(connections.values())


def operations(kind: Kind, count: int) -> list[Operation]:
    return [operation_for(kind, rank, SIZE, count) for rank in range(SIZE)]


def connect_everybody(ranks: Ranks) -> None:
    ranks.run_well(operations(Kind.ALL_TO_ALL, 1))


@pytest.mark.parametrize("num_bytes", [HEADER_BYTES // 2, HEADER_BYTES + 10_000], ids=["in a header", "in the data"])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.title)
def test_a_socket_cut_in_the_middle_of_a_message(kind: Kind, num_bytes: int) -> None:
    if kind is Kind.BARRIER and num_bytes > HEADER_BYTES:
        pytest.skip("a barrier has no data")
    with socket_ranks(SIZE, unix=False) as ranks:
        connect_everybody(ranks)
        bad = spoil(ranks, CutSocket, num_bytes)
        running = ranks.start(operations(kind, 100_000))
        first = running.join_any()
        assert isinstance(first, TransportPeerLost), first
        for control in ranks.controls:
            assert control is not None
            control.fail(TOLD)  # as the engine of the rank does that noticed it
        errors = running.join()
        assert sum(each.num_faults for each in bad) >= 1, "the fault did not happen"
        # A rank that only sends may be done before the root fails.
        assert errors[FAULTY] or kind not in (Kind.REDUCE, Kind.GATHER)
        assert all(errors) or kind in (Kind.REDUCE, Kind.GATHER), f"a rank succeeded: {errors}"
        lost = [(rank, error.rank) for rank, error in enumerate(errors) if isinstance(error, TransportPeerLost)]
        assert lost and all(FAULTY in pair for pair in lost), lost


@pytest.mark.parametrize("count", [20, 30_000])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.title)
def test_a_slow_rank_is_waited_for(kind: Kind, count: int) -> None:
    with socket_ranks(SIZE, unix=False) as ranks:
        connect_everybody(ranks)
        bad = spoil(ranks, SlowSocket)
        given = operations(kind, count)
        inputs = [[tensor.clone().view(-1) for tensor in operation.inputs] for operation in given]
        ranks.run_well(given)
        assert sum(each.num_faults for each in bad) > 2, "the fault did not happen"
        for rank, operation in enumerate(given):
            wanted = reference(operation, rank, inputs)
            assert [t.tolist() for t in operation.outputs] == [t.tolist() for t in wanted]
