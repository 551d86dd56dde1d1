"""The program of every rank in the tests of the `mpi` backend: `mpirun -n N python mpi_program.py FOLDER SCENARIO...`.

Prints "ok SCENARIO" for each scenario that passed, on rank 0.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
from backend_contract import check_moves, check_reductions, same, values
from mpi4py import MPI

from rpcdist.collectives import FileStore, PrefixStore
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives.mpi import MpiBackend
from rpcdist.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted

LIMIT_S = 30.0
RANK = MPI.COMM_WORLD.Get_rank()
SIZE = MPI.COMM_WORLD.Get_size()
KEPT: list[MpiBackend] = []


def group(store: FileStore, name: str, ranks: tuple[int, ...], timeout_s: float = LIMIT_S) -> MpiBackend:
    return MpiBackend(GroupContext(name, ranks.index(RANK), ranks, PrefixStore(name, store), timeout_s))


def reductions(backend: MpiBackend, store: FileStore) -> None:
    check_reductions(backend)


def moves(backend: MpiBackend, store: FileStore) -> None:
    check_moves(backend)


def asynchronous(backend: MpiBackend, store: FileStore) -> None:
    tensors = [torch.full((50_000,), float(RANK + index)) for index in range(20)]
    works = [
        backend.submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM), asynchronous=True)
        for tensor in tensors
    ]
    for index, work in enumerate(works):
        work.wait(LIMIT_S)
        assert tensors[index][0].item() == sum(rank + index for rank in range(SIZE))


def messages(backend: MpiBackend, store: FileStore) -> None:
    """Every rank posts everything to everyone first, with large tensors, and several of one tag."""
    for dtype in (torch.bfloat16, torch.float64):
        sends, recvs = [], []
        for peer in (rank for rank in range(SIZE) if rank != RANK):
            for tag in (0, 5):
                for number in range(3):
                    tensor = values(RANK, 200_000 if number == 1 else number, dtype, tag + number)
                    sends.append(backend.send(tensor, peer, tag, asynchronous=True))
        for peer in (rank for rank in range(SIZE) if rank != RANK):
            for tag in (5, 0):
                for number in range(3):
                    tensor = torch.empty(200_000 if number == 1 else number, dtype=dtype)
                    work = backend.recv(tensor, peer, tag, asynchronous=True)
                    recvs.append((work, tensor, peer, tag + number))
        for work, tensor, peer, salt in recvs:
            work.wait(LIMIT_S)
            assert work.source_rank() == peer
            same(tensor, values(peer, tensor.numel(), dtype, salt), "message")
        for work in sends:
            work.wait(LIMIT_S)
    any_source(backend)


def any_source(backend: MpiBackend) -> None:
    if RANK:
        backend.send(torch.tensor([RANK]), 0, 9)
        return
    seen = []
    for _ in range(SIZE - 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        work = backend.recv(tensor, None, 9)
        assert work.source_rank() == tensor.item()
        seen.append(tensor.item())
    assert sorted(seen) == list(range(1, SIZE))


def subgroup(backend: MpiBackend, store: FileStore) -> None:
    """The last two ranks, in the other order, while the whole group works as well."""
    ranks = (SIZE - 1, SIZE - 2)
    if RANK in ranks:
        half = group(store, "half", ranks)
        tensor = torch.tensor([half.context.rank])
        half.submit(Operation(Kind.BROADCAST, (tensor,), (tensor,), root=1))
        assert tensor.item() == 1
        half.close(LIMIT_S)
    backend.submit(Operation(Kind.BARRIER))


def mismatch(backend: MpiBackend, store: FileStore) -> None:
    bad = group(store, "bad", tuple(range(SIZE)))
    tensor = torch.ones(4 if RANK else 5)
    try:
        bad.submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))
        raise AssertionError("no mismatch was found")
    except CollectiveMismatch as exc:
        assert "rank 0 called all_reduce #1 (SUM, 5 elements of float32)" in str(exc), exc
        assert "rank 1 called all_reduce #1 (SUM, 4 elements of float32)" in str(exc), exc
    bad.close(5.0)


def message_mismatch(backend: MpiBackend, store: FileStore) -> None:
    bad = group(store, "bad message", tuple(range(SIZE)))
    try:
        if RANK == 0:
            bad.recv(torch.ones(3), 1, 0)
        else:
            if RANK == 1:
                bad.send(torch.ones(4), 0, 0, asynchronous=True)
            bad.recv(torch.ones(3), 0, 1)
        raise AssertionError("no mismatch was found")
    except CollectiveMismatch as exc:
        assert "rank 1 sent 16 bytes of float32, but rank 0 expects 12 bytes of float32" in str(exc), exc
    bad.close(5.0)


def late(backend: MpiBackend, store: FileStore) -> None:
    """Rank 0 does not come; all are told."""
    slow = group(store, "slow", tuple(range(SIZE)))
    if RANK:
        try:
            slow.submit(Operation(Kind.BARRIER), timeout_s=0.5)
            raise AssertionError("no timeout")
        except CollectiveTimeout as exc:
            assert "rank 0 did not arrive" in str(exc), exc
    backend.submit(Operation(Kind.BARRIER))
    slow.close(5.0)


def abort(backend: MpiBackend, store: FileStore) -> None:
    doomed = group(store, "doomed", tuple(range(SIZE)))
    if RANK == 0:
        timer = threading.Timer(0.3, doomed.abort, ["enough"])
        timer.start()
        try:
            doomed.recv(torch.ones(3), 1, 0)
            raise AssertionError("not aborted")
        except GroupAborted as exc:
            assert "rank 0 aborted the group: enough" in str(exc), exc
        timer.join()
    else:
        work = doomed.recv(torch.ones(3), 0, 0, asynchronous=True)
        try:
            doomed.submit(Operation(Kind.BARRIER))
            raise AssertionError("not aborted")
        except GroupAborted as exc:
            assert "rank 0 aborted the group: enough" in str(exc), exc
        assert isinstance(work.exception(), GroupAborted)
    doomed.close(5.0)


def left_open(backend: MpiBackend, store: FileStore) -> None:
    """Nobody closes it; the end of the process does."""
    forgotten = group(store, "forgotten", tuple(range(SIZE)))
    forgotten.submit(Operation(Kind.BARRIER))
    KEPT.append(forgotten)


def main() -> None:
    store = FileStore(str(Path(sys.argv[1]) / "store"), SIZE)
    backend = group(store, "world", tuple(range(SIZE)))
    for name in sys.argv[2:]:
        globals()[name](backend, store)
        backend.submit(Operation(Kind.BARRIER))
        if RANK == 0:
            print("ok", name, flush=True)
    backend.close(LIMIT_S)
    backend.close(LIMIT_S)
    store.close()


if __name__ == "__main__":
    main()
