"""The program of two processes on one GPU in the tests of the `nccl` backend: `serve` is the start of each of them."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch
from backend_contract import check_moves, check_reductions
from inside_groups import GroupContext

from rpcdist.collectives import FileStore, PrefixStore
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives.nccl import NcclBackend, NcclOptions
from rpcdist.errors import CollectiveTimeout, GroupAborted
from rpcdist.testing import eventually

__all__ = ["serve"]

LIMIT_S = 60.0
DEVICE = torch.device("cuda", 0)


def group(name: str, store: FileStore, rank: int, options: NcclOptions | None = None) -> NcclBackend:
    return NcclBackend(GroupContext(name, rank, (0, 1), PrefixStore(name, store), LIMIT_S, options, DEVICE))


def serve(pipe: Connection, rank: int, path: str) -> None:
    """NCCL takes the ranks for two hosts, since it refuses two ranks of one host on one GPU; sockets connect them."""
    os.environ.update(NCCL_HOSTID=f"stand-in host {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(DEVICE)
    with FileStore(path, 2) as store:
        while (name := pipe.recv()) is not None:
            try:
                function: Callable[[NcclBackend, FileStore], None] = globals()[name]
                backend = group(name, store, rank)
                function(backend, store)
                backend.close(LIMIT_S)
                pipe.send("")
            except BaseException:
                pipe.send(f"rank {rank}:\n{traceback.format_exc()}")


def all_reduce(tensor: torch.Tensor) -> Operation:
    return Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM)


def reductions(backend: NcclBackend, store: FileStore) -> None:
    check_reductions(backend, DEVICE, counts=(0, 130))


def moves(backend: NcclBackend, store: FileStore) -> None:
    check_moves(backend, DEVICE, counts=(0, 1, 1000))


def streams(backend: NcclBackend, store: FileStore) -> None:
    """Work on the current stream, before and after, is in order with asynchronous operations, without host waits."""
    tensor = torch.zeros(1 << 20, device=DEVICE)
    for step in range(20):
        tensor.add_(1)  # enqueued, perhaps not run yet
        work = backend.submit(all_reduce(tensor), asynchronous=True, result=[tensor])
        assert work.wait()
        tensor.sub_(step)
    value, expected = tensor[0].item(), 0.0
    for step in range(20):
        expected = 2 * (expected + 1) - step
    assert value == expected
    other = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(other):
        tensor.fill_(3)
        backend.submit(all_reduce(tensor))
        assert tensor[-1].item() == 6
    future = backend.submit(all_reduce(tensor), asynchronous=True, result=[tensor]).get_future()
    assert future.then(lambda done: done.value()[0][0].item()).wait() == 12
    backend.submit(Operation(Kind.BARRIER))


def messages(backend: NcclBackend, store: FileStore) -> None:
    me, other = backend.context.rank, 1 - backend.context.rank
    for dtype in (torch.bfloat16, torch.complex64):
        sent, got = (
            torch.full((4096,), me + 1, dtype=dtype, device=DEVICE),
            torch.empty(4096, dtype=dtype, device=DEVICE),
        )
        backend.start_batch()
        works = [backend.recv(got, other, 0, asynchronous=True), backend.send(sent, other, 0, asynchronous=True)]
        backend.end_batch()
        assert all(work.wait(LIMIT_S) for work in works)
        assert torch.equal(got, torch.full_like(got, other + 1))
        if me == 0:
            backend.send(sent, 1, 0)
        else:
            backend.recv(got, 0, 0)
            assert torch.equal(got, torch.full_like(got, 1))


def split(backend: NcclBackend, store: FileStore) -> None:
    half = backend.split(GroupContext("reversed", 1 - backend.context.rank, (1, 0), PrefixStore("r", store), LIMIT_S))
    assert half is not None
    tensor = torch.full((3,), float(backend.context.rank), device=DEVICE)
    half.submit(Operation(Kind.BROADCAST, (tensor,), (tensor,), root=0))
    assert tensor.tolist() == [1.0] * 3
    half.close(LIMIT_S)
    backend.submit(Operation(Kind.BARRIER))


def late(backend: NcclBackend, store: FileStore) -> None:
    """Rank 1 does not come: its kernel on rank 0 is aborted, the GPU is free again, and a new group works."""
    slow = group("slow", store, backend.context.rank)
    if backend.context.rank == 0:
        began = time.monotonic()
        try:
            slow.submit(all_reduce(torch.ones(8, device=DEVICE)), asynchronous=True, timeout_s=1.0).wait(LIMIT_S)
            raise AssertionError("no timeout")
        except CollectiveTimeout as exc:
            assert "rank 1 did not arrive" in str(exc), exc
        torch.cuda.synchronize()
        assert time.monotonic() - began < 20
    backend.submit(Operation(Kind.BARRIER))
    slow.close(5.0)
    group("afterwards", store, backend.context.rank).close(LIMIT_S)


def abort(backend: NcclBackend, store: FileStore) -> None:
    """A kernel that waits for rank 1 ends when rank 0 aborts the group."""
    doomed = group("doomed", store, backend.context.rank)
    doomed.submit(all_reduce(torch.ones(8, device=DEVICE)))  # the first one connects the ranks, which waits for all
    if backend.context.rank == 0:
        work = doomed.submit(all_reduce(torch.ones(8, device=DEVICE)), asynchronous=True)
        doomed.abort("enough")
        with pytest.raises(GroupAborted, match="rank 0 aborted the group: enough"):
            work.wait(LIMIT_S)
        store.set("aborted", "")
    else:
        store.wait(["aborted"])
    torch.cuda.synchronize()
    doomed.close(5.0)
    backend.submit(Operation(Kind.BARRIER))


def abort_at_the_first(backend: NcclBackend, store: FileStore) -> None:
    """The first collective waits in NCCL, on the host, for rank 1; it ends when another thread aborts the group."""
    doomed = group("doomed at the first", store, backend.context.rank)
    if backend.context.rank == 0:
        thread = threading.Thread(target=abort_once_under_way, args=(doomed,))
        thread.start()
        with pytest.raises(GroupAborted, match="rank 0 aborted the group: enough"):
            doomed.submit(all_reduce(torch.ones(8, device=DEVICE)), asynchronous=True).wait(LIMIT_S)
        thread.join(LIMIT_S)
        store.set("aborted at the first", "")
    else:
        store.wait(["aborted at the first"])
    torch.cuda.synchronize()
    doomed.close(5.0)
    backend.submit(Operation(Kind.BARRIER))


def abort_once_under_way(backend: NcclBackend) -> None:
    eventually(lambda: backend._watchdog.state.current is not None, "the collective is under way")
    backend.abort("enough")
