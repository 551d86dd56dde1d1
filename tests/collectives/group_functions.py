"""The functions that the ranks of `rank_pool` run in the tests of the `tcp` backend."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from inside_groups import GroupContext
from leak_guard import LeakGuard
from own_shortages import no_free_descriptor
from transport_in_memory import reference, wide

from rpcdist.collectives import FileStore, tcp
from rpcdist.collectives._group import engine_backend
from rpcdist.collectives._group.backend_binding import BackendBinding
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.watch import Watch
from rpcdist.collectives._operations.lowering import Place
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import unsupported
from rpcdist.collectives._transports.sockets import pair_connections
from rpcdist.collectives.tcp import TcpBackend, TcpOptions
from rpcdist.deadline import Deadline
from rpcdist.errors import RankLost
from rpcdist.testing import eventually
from rpcdist.transport.shared_memory import SegmentError

LIMIT_S = 30.0
CLOSE_LIMIT_S = 5.0

state: dict[str, TcpBackend] = {}
"""The objects that functions keep from one call to the next."""


def open_group(rank: int, size: int, path: str, shared: object = True, timeout_s: float = LIMIT_S) -> str:
    """Makes a group; `shared` says whether this rank may use shared memory, or "tcp", or is a list for all ranks."""
    close_group(rank, size)
    allowed = shared[rank] if isinstance(shared, list) else shared is True
    context = GroupContext(
        name=os.path.basename(path),
        rank=rank,
        ranks=tuple(range(size)),
        store=FileStore(path, size),
        timeout_s=timeout_s,
        options=TcpOptions(shared_memory=allowed, unix_sockets=shared != "tcp"),
    )
    backend = state["backend"] = TcpBackend(context)
    return repr(backend)


def close_group(rank: int, size: int) -> None:
    backend = state.pop("backend", None)
    if backend is not None:
        backend.close(CLOSE_LIMIT_S)


def open_without_descriptors(rank: int, size: int, path: str) -> tuple[str, list[str]]:
    """Makes a group for which rank 1 has no file descriptors left at the very end; the error, and what stays open."""

    def fail(*_arguments: object, **_named: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    guard = LeakGuard()
    before = guard.snapshot()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(engine_backend, "Engine", fail)
        try:
            open_group(rank, size, path)
            backend().submit(Operation(Kind.BARRIER)).wait()
        except (OSError, RankLost) as exc:
            found = str(exc)
        else:
            found = "a group"
    close_group(rank, size)
    return found, guard.leaks(before)


def open_with_late_memory(rank: int, size: int, path: str) -> str:
    """Makes a group in which rank 0 gives up sharing memory before its loop has passed the memory to rank 1."""
    held: list[Callable[[], None]] = []
    pass_memory, exchange = Watch.pass_memory, Watch.exchange

    def make_apart(context: GroupContext, deadline: Deadline, unix_sockets: bool, memory_bytes: int) -> GroupWatch:
        watch = GroupWatch(context, deadline, unix_sockets, 0)
        connect = watch.hub.connect

        def connect_for_others(address: str, purpose: str, *given: Any, **named: Any) -> Any:
            if "/memory/" in purpose:
                raise SegmentError("no memory")
            return connect(address, purpose, *given, **named)

        patch.setattr(watch.hub, "connect", connect_for_others)
        return watch

    def exchange_after(watch: Watch, *given: Any) -> Any:
        while held:
            held.pop()()
        return exchange(watch, *given)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(tcp, "SLOW_ANSWER_LIMIT_S", 0.5)
            patch.setattr(Watch, "pass_memory", lambda *given: held.append(partial(pass_memory, *given)))
            patch.setattr(Watch, "exchange", exchange_after)
        if rank == 2:
            patch.setattr(tcp, "GroupWatch", make_apart)
        made = open_group(rank, size, path)
    backend().submit(Operation(Kind.BARRIER)).wait()
    return made


def reduce_without_descriptors(rank: int, size: int, short: int, mark: str) -> str:
    """Adds up numbers in a new group in which one rank has no free file descriptor; the error.

    The short rank gives up long before the group's timeout, at which the others would blame it in other words.
    """
    operation = Operation(Kind.ALL_REDUCE, (torch.ones(1),), (torch.ones(1),), ReduceOp.SUM)
    with pytest.MonkeyPatch.context() as patch, _shortage(rank == short, mark):
        if rank == short:
            patch.setattr(pair_connections, "GROUP_CONNECT_LIMIT_S", 1.0)
        return _error_of(lambda: backend().submit(operation).wait())


def send_without_descriptors(rank: int, size: int, short: int, mark: str, timeout_s: float) -> tuple[str, str]:
    """Sends from rank 0 to rank 1, of which one has no free file descriptor; the error, and that of a second try."""
    tensor = torch.full((3,), float(1 - rank))
    message = backend().send if rank == 0 else backend().recv

    def exchange(limit_s: float) -> None:
        message(tensor, 1 - rank, 0, asynchronous=False, timeout_s=limit_s)

    with _shortage(rank == short, mark):
        first = _error_of(lambda: exchange(timeout_s))
    # The second message is for the second receive: the first one has given up before it is sent.
    os.mkdir(f"{mark}.{rank}")
    eventually(lambda: os.path.isdir(f"{mark}.{1 - rank}"), "the other rank has ended its first try")
    second = _error_of(lambda: exchange(LIMIT_S))
    assert tensor.eq(1).all()
    return first, second


@contextmanager
def _shortage(is_here: bool, mark: str) -> Iterator[None]:
    """No descriptor is free here, or else it has come so far at the rank that has none."""
    with no_free_descriptor() if is_here else nullcontext():
        if is_here:
            os.mkdir(mark)  # which takes no descriptor
        eventually(lambda: os.path.isdir(mark), "the other rank has no descriptor")
        yield


def _error_of(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def backend() -> TcpBackend:
    return state["backend"]


# ---------------------------------------------------------------- right results


def check_operations(rank: int, size: int, seed: int, count: int, asynchronous: bool) -> int:
    """Random operations, the same on all ranks, each compared with the reference; returns how many reduced."""
    draw = random.Random(seed)
    num_reduced = 0
    works = []
    for _ in range(count):
        make = draw_operation(draw, size)
        operations = [make(other) for other in range(size)]
        mine = operations[rank]
        num_reduced += mine.reduce_op is not None
        expected = reference(mine, rank, [[t.clone().view(-1) for t in op.inputs] for op in operations])
        work = backend().submit(mine, asynchronous=asynchronous)
        works.append((work, mine, expected))
        if not asynchronous:
            compare(mine, expected)
    for work, mine, expected in works if asynchronous else []:
        work.wait()
        compare(mine, expected)
    return num_reduced


def compare(operation: Operation, expected: list[torch.Tensor]) -> None:
    for output, wanted in zip(operation.outputs, expected, strict=True):
        found, right = wide(output.view(-1)), wide(wanted)
        close = torch.equal(found, right)
        if not close and (found.is_floating_point() or found.is_complex()):
            tolerance = TOLERANCES.get(output.dtype, 1e-5)
            close = torch.allclose(found, right, rtol=tolerance, atol=tolerance)
        assert close, (operation.kind, operation.reduce_op, output.dtype, output.numel(), output, wanted)


TOLERANCES = {
    torch.float16: 3e-2, torch.bfloat16: 6e-2, torch.complex32: 3e-2, torch.float8_e4m3fn: 0.25, torch.float8_e5m2: 0.5,
}  # fmt: skip
LENGTHS = (0, 1, 2, 3, 7, 64, 1000, 4096, 20_000, 300_001)


def draw_operation(draw: random.Random, size: int) -> Callable[[int], Operation]:
    """One operation, as a function of the rank."""
    kind = Kind(draw.randint(Kind.ALL_REDUCE, Kind.BARRIER))
    op, dtype = draw.choice(list(ReduceOp)), draw.choice(DTYPES)
    reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
    while reduces and (unsupported(op, dtype) is not None or (op is ReduceOp.PREMUL_SUM and dtype is torch.bool)):
        op, dtype = draw.choice(list(ReduceOp)), draw.choice(DTYPES)
    length, root, salt = draw.choice(LENGTHS), draw.randrange(size), draw.randrange(1000)
    lengths = [draw.choice(LENGTHS[:7]) for _ in range(size)]
    table = [[draw.choice(LENGTHS[:7]) for _ in range(size)] for _ in range(size)]
    factor = 2.0 if op is ReduceOp.PREMUL_SUM else None

    def values(rank: int, count: int, chunk: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(salt * 1000 + rank * 10 + chunk)
        if dtype is torch.bool:
            return torch.randint(0, 2, (count,), generator=generator, dtype=torch.bool)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randint(-3, 4, (count,), generator=generator).to(torch.float32).to(dtype)
        return torch.randint(0, 4, (count,), generator=generator).to(dtype)

    def empty(count: int) -> torch.Tensor:
        return torch.zeros(count).to(dtype)

    def make(rank: int) -> Operation:
        common: dict[str, Any] = {"reduce_op": op if reduces else None, "factor": factor if reduces else None}
        if kind is Kind.BARRIER:
            return Operation(kind)
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST):
            buffer = values(rank, length)
            return Operation(kind, (buffer,), (buffer,), root=-1 if kind is Kind.ALL_REDUCE else root, **common)
        if kind in (Kind.ALL_GATHER, Kind.GATHER):
            outputs = tuple(empty(length) for _ in range(size)) if kind is Kind.ALL_GATHER or rank == root else ()
            return Operation(kind, (values(rank, length),), outputs, root=-1 if kind is Kind.ALL_GATHER else root)
        if kind is Kind.SCATTER:
            chunks = tuple(values(rank, length, chunk) for chunk in range(size)) if rank == root else ()
            return Operation(kind, chunks, (empty(length),), root=root)
        if kind is Kind.REDUCE_SCATTER:
            chunks = tuple(values(rank, lengths[chunk], chunk) for chunk in range(size))
            return Operation(kind, chunks, (empty(lengths[rank]),), **common)
        inputs = tuple(values(rank, table[rank][other], other) for other in range(size))
        return Operation(kind, inputs, tuple(empty(table[other][rank]) for other in range(size)))

    return make


def same_bits(rank: int, size: int) -> bytes:
    """A sum whose rounding depends on the order; the result has to be the same on all ranks."""
    found = b""
    for count in (3, 5000, 200_001):
        tensor = torch.rand(count, generator=torch.Generator().manual_seed(rank)) * 10**rank
        backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))
        found += tensor[:100].numpy().tobytes() + tensor.sum().numpy().tobytes()
    return found


# ---------------------------------------------------------------- failures


def reduce_many(rank: int, size: int, asynchronous: bool) -> tuple[int, list[float]]:
    """How many operations three tensors take, one of which is not contiguous, and an element of each result."""
    binding = BackendBinding(backend(), Place(rank, size))
    tensors = [torch.full((5,), rank + 1.0), torch.zeros(0), torch.full((3, 400_000), 10.0 * rank).t()]
    works = binding.all_reduce_many(tensors, ReduceOp.SUM, asynchronous)
    for work in works:
        work.wait()
    assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in tensors if tensor.numel())
    return len(works), [tensor.sum().item() / max(1, tensor.numel()) for tensor in tensors]


def until_it_fails(rank: int, size: int, count: int, victim: int, how: str) -> tuple[str, str, float]:
    """Reduces 4 MiB again and again; the victim ends itself in between. Returns type, text and time of the failure."""
    tensor = torch.ones(1 << 20)
    try:
        for _ in range(count):
            backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.MAX))
        if rank == victim:
            if how == "after forking":
                _fork_a_child_that_lives()
            backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.MAX), asynchronous=True)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.MAX))
    except Exception as exc:
        return type(exc).__name__, str(exc), time.time()
    return "nothing", "", time.time()


def _fork_a_child_that_lives() -> None:
    """As a DataLoader's worker does: it holds copies of whatever its parent did not take away from it."""
    if os.fork() == 0:
        signal.alarm(10)
        signal.pause()
        os._exit(0)


def attempt(rank: int, size: int, name: str, *arguments: object) -> tuple[str, str]:
    """Runs another function of this module; returns the type and the text of what it raised."""
    try:
        globals()[name](rank, size, *arguments)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return "nothing", ""


def mismatched(rank: int, size: int, case: str) -> None:
    """Calls something else on the last rank."""
    odd = rank == size - 1
    tensor = torch.ones(4)
    operation = Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM)
    if case == "operation" and odd:
        operation = Operation(Kind.BARRIER)
    elif case == "dtype" and odd:
        tensor = torch.ones(4, dtype=torch.int32)
        operation = Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM)
    elif case == "size":
        tensor = torch.ones(40_000 if odd else 30_000)
        operation = Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM)
    elif case == "reduction" and odd:
        operation = Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.MAX)
    elif case == "root":
        operation = Operation(Kind.BROADCAST, (tensor,), (tensor,), root=1 if odd else 0)
    elif case == "order":
        if odd:
            operation = Operation(Kind.BROADCAST, (tensor,), (tensor,), root=0)
        backend().submit(operation)
        raise AssertionError("the first operation went through")
    elif case == "all_to_all":
        inputs = tuple(torch.ones(3) for _ in range(size))
        outputs = tuple(torch.ones(2 if odd and other == 0 else 3) for other in range(size))
        operation = Operation(Kind.ALL_TO_ALL, inputs, outputs)
    backend().submit(operation)


def missing(rank: int, size: int, absent: int) -> None:
    """One rank does not come."""
    tensor = torch.ones(4)
    backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))
    if rank != absent:
        backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM), timeout_s=0.5)
    else:
        eventually(lambda: backend()._engine.state.failure is not None, "the others give up", 10)
        backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))


def abort_on_one(rank: int, size: int, aborter: int) -> None:
    tensor = torch.ones(4)
    if rank == aborter:
        backend().abort("for the test")
    backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))


def leave_early(rank: int, size: int, leaver: int) -> None:
    backend().submit(Operation(Kind.BARRIER))
    if rank == leaver:
        close_group(rank, size)
        return
    tensor = torch.ones(4)
    backend().submit(Operation(Kind.ALL_REDUCE, (tensor,), (tensor,), ReduceOp.SUM))


class Kept(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def close_before_sends_have_left(rank: int, size: int) -> list[str]:
    """Rank 0 sends more than a socket takes, which nobody receives; returns what the closing logged."""
    kept = Kept()
    logging.getLogger("rpcdist.collectives").addHandler(kept)
    try:
        if rank == 0:
            for _ in range(2):
                backend().send(torch.ones(6_000_000), 1, 3, asynchronous=True)
            backend().close(0.1)
        return kept.messages
    finally:
        logging.getLogger("rpcdist.collectives").removeHandler(kept)


def open_things(rank: int, size: int) -> dict[str, int]:
    """The resources of this process: descriptors by kind, and threads of groups.

    Groups of earlier tests ended by errors, whose tracebacks hold them until the collector comes: it comes now.
    """
    import gc
    import threading

    gc.collect()
    found = {"sockets": 0, "memory": 0, "pipes": 0}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found["sockets"] += target.startswith("socket:")
        found["memory"] += "memfd:" in target
        found["pipes"] += target.startswith("pipe:")
    found["threads"] = sum("group" in thread.name for thread in threading.enumerate())
    return found


# ---------------------------------------------------------------- every operation


def operation_for(kind: Kind, rank: int, size: int, count: int) -> Operation:
    """One of a kind, with `count` elements in each chunk; rank 0 is the root."""

    def chunks(there: bool = True) -> tuple[torch.Tensor, ...]:
        return tuple(torch.full((count,), float(rank)) for _ in range(size)) if there else ()

    one = (torch.full((count,), float(rank)),)
    return {
        Kind.ALL_REDUCE: lambda: Operation(kind, one, one, ReduceOp.MAX),
        Kind.REDUCE: lambda: Operation(kind, one, one, ReduceOp.MAX, root=0),
        Kind.BROADCAST: lambda: Operation(kind, one, one, root=0),
        Kind.ALL_GATHER: lambda: Operation(kind, one, chunks()),
        Kind.GATHER: lambda: Operation(kind, one, chunks(rank == 0), root=0),
        Kind.SCATTER: lambda: Operation(kind, chunks(rank == 0), one, root=0),
        Kind.REDUCE_SCATTER: lambda: Operation(kind, chunks(), one, ReduceOp.MAX),
        Kind.ALL_TO_ALL: lambda: Operation(kind, chunks(), chunks()),
        Kind.BARRIER: lambda: Operation(kind),
    }[kind]()


def die_in(rank: int, size: int, name: str, victim: int) -> tuple[str, str, float]:
    """Runs one operation again and again; the victim kills itself while its own runs."""
    operation = operation_for(Kind[name], rank, size, 300_000)
    try:
        backend().submit(operation)
        if rank == victim:
            backend().submit(operation, asynchronous=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            backend().submit(operation)
    except Exception as exc:
        return type(exc).__name__, str(exc), time.time()


def come_late(rank: int, size: int, late: int) -> dict[str, tuple[float, float]]:
    """Every operation once, for which one rank comes late; when each began and ended here, on the host's clock."""
    times = {}
    for kind in EVERY_KIND:
        backend().submit(Operation(Kind.BARRIER))
        if rank == late:
            time.sleep(0.1)  # the others are there long before
        operation = operation_for(kind, rank, size, 1000)
        expected = reference(operation, rank, [operation_for(kind, other, size, 1000).inputs for other in range(size)])
        began = time.monotonic()
        backend().submit(operation)
        times[kind.name] = began, time.monotonic()
        compare(operation, expected)
    return times


EVERY_KIND = tuple(Kind(number) for number in range(Kind.ALL_REDUCE, Kind.BARRIER + 1))
