"""A backend among the threads of one process: small, slow and obviously right, so that it can be a reference.

Every operation is an exchange: each rank puts a copy of its inputs on a table, waits until all copies are there, and
computes its own outputs from them with plain torch. Importing this module registers it under the name "local".
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from functools import reduce

import torch

from rpcdist.collectives import Backend, BackendBase, GroupContext, ReduceOp, Work
from rpcdist.collectives._operations.operation import Kind, Operation, describe_fingerprint
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, GroupAborted

__all__ = ["LocalBackend"]

Copies = tuple[torch.Tensor, ...]


class Network:
    """The table of one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.deposits: dict[int, dict[int, tuple[bytes, Copies]]] = defaultdict(dict)
        self.num_readers: dict[int, int] = defaultdict(int)
        self.messages: dict[tuple[int, int], deque[tuple[int, torch.Tensor]]] = defaultdict(deque)
        self.aborted: str | None = None

    def wait(self, ready: Callable[[], bool], deadline: Deadline, title: str, missing: Callable[[], str]) -> None:
        """Call it with `changed` held."""
        if not self.changed.wait_for(lambda: ready() or self.aborted is not None, deadline.wait_s()):
            raise CollectiveTimeout(title, f"{missing()} did not arrive in time")
        if not ready():
            raise GroupAborted(title, str(self.aborted))

    def exchange(
        self, rank: int, sequence: int, fingerprint: bytes, inputs: Copies, deadline: Deadline, title: str
    ) -> list[Copies]:
        """The inputs of all ranks, once all of them have come and want the same."""
        with self.changed:
            table = self.deposits[sequence]
            table[rank] = (fingerprint, inputs)
            self.changed.notify_all()
            self.wait(
                lambda: len(table) == self.size,
                deadline,
                title,
                lambda: f"ranks {sorted(set(range(self.size)) - table.keys())}",
            )
            self.num_readers[sequence] += 1
            if self.num_readers[sequence] == self.size:
                del self.deposits[sequence], self.num_readers[sequence]
        views = {rank: describe_fingerprint(data) for rank, (data, _) in sorted(table.items())}
        if len({data for data, _ in table.values()}) > 1:
            raise CollectiveMismatch(title, f"the ranks differ: {views}")
        return [table[rank][1] for rank in range(self.size)]


_networks: dict[bytes, Network] = {}
_lock = threading.Lock()


class LocalBackend(BackendBase):
    """See `rpcdist.collectives.BackendBase`."""

    name = "local"

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        key = context.store.compare_set("network", "", uuid.uuid4().hex)
        with _lock:
            self.network = _networks.setdefault(key, Network(context.size))
        self._sequence = 0
        self._closed = False
        self._receive_order = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name=f"local backend {context.rank}")
        self._worker.start()
        self._receivers: list[threading.Thread] = []
        self.batches: list[str] = []

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        sequence, self._sequence = self._sequence, self._sequence + 1
        title = f"{operation.kind.title} #{sequence} of group {self.context.name!r}"
        check_operation(operation, self.context.rank, self.context.size)
        work = Work(title, result)
        deadline = Deadline.after(self.context.timeout_s if timeout_s is None else timeout_s)
        # Copied now, so that a caller who changes an input too early is seen to get away with it nowhere else.
        inputs = tuple(tensor.clone() for tensor in operation.inputs)
        fingerprint = operation.fingerprint(sequence)

        def job() -> None:
            try:
                found = self.network.exchange(self.context.rank, sequence, fingerprint, inputs, deadline, title)
                compute(operation, found, self.context.rank, self._factors(sequence, operation, deadline, title))
                if finish is not None:
                    finish()
                work.complete()
            except CollectiveError as exc:
                work.fail(exc)

        self._jobs.put(job)
        if not asynchronous:
            work.wait()
        return work

    def _factors(self, sequence: int, operation: Operation, deadline: Deadline, title: str) -> list[torch.Tensor]:
        if operation.reduce_op is not ReduceOp.PREMUL_SUM:
            return []
        mine = torch.as_tensor(operation.factor).reshape(-1)
        deposits = self.network.exchange(self.context.rank, -sequence - 1, b"factor", (mine,), deadline, title)
        return [tensor for (tensor,) in deposits]

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool = False, timeout_s: float | None = None
    ) -> Work:
        assert tensor.is_contiguous() and not tensor.requires_grad
        with self.network.changed:
            self.network.messages[peer, tag].append((self.context.rank, tensor.clone()))
            self.network.changed.notify_all()
        return Work.finished(f"send to {peer}", [tensor])

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        assert tensor.is_contiguous() and not tensor.requires_grad
        title = f"recv from {'anyone' if peer is None else peer}"
        work = Work(title, [tensor])
        deadline = Deadline.after(self.context.timeout_s if timeout_s is None else timeout_s)
        inbox = self.network.messages[self.context.rank, tag]
        before = self._receivers[-1] if self._receivers else None

        def job() -> None:
            if before is not None:  # receives are served in the order of the calls
                before.join()
            try:
                with self.network.changed:
                    self.network.wait(
                        lambda: any(peer in (None, source) for source, _ in inbox),
                        deadline,
                        title,
                        lambda: "the sender",
                    )
                    source, data = next(each for each in inbox if peer in (None, each[0]))
                    for place, each in enumerate(inbox):
                        if each[1] is data:
                            del inbox[place]
                            break
                if data.dtype is not tensor.dtype or data.numel() != tensor.numel():
                    raise CollectiveMismatch(title, f"{data.numel()} of {data.dtype} came")
                tensor.copy_(data.view_as(tensor))
                if finish is not None:
                    finish()
                work.complete(source)
            except CollectiveError as exc:
                work.fail(exc)

        receiver = threading.Thread(target=job, name="local receive")
        self._receivers.append(receiver)
        receiver.start()
        if not asynchronous:
            work.wait()
        return work

    def start_batch(self) -> None:
        self.batches.append("start")

    def end_batch(self) -> None:
        self.batches.append("end")

    def abort(self, reason: str) -> None:
        with self.network.changed:
            self.network.aborted = self.network.aborted or reason
            self.network.changed.notify_all()

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._worker.join(timeout_s)
        if self._worker.is_alive():
            self.abort("the group was closed")
        self._worker.join()
        for receiver in self._receivers:
            receiver.join()


def check_operation(operation: Operation, rank: int, size: int) -> None:
    """That the functions keep what `Operation` promises to backends."""
    kind, inputs, outputs = operation.kind, operation.inputs, operation.outputs
    for tensor in (*inputs, *outputs):
        assert tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and not tensor.requires_grad
        assert tensor.dtype is operation.dtype
        assert tensor.device.type == "cpu"
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST):
        assert len(inputs) == len(outputs) == 1 and inputs[0] is outputs[0]
        return
    at_root = rank == operation.root
    chunks, one = size, 1
    expected = {
        Kind.ALL_GATHER: (one, chunks),
        Kind.GATHER: (one, chunks if at_root else 0),
        Kind.SCATTER: (chunks if at_root else 0, one),
        Kind.REDUCE_SCATTER: (chunks, one),
        Kind.ALL_TO_ALL: (chunks, chunks),
        Kind.BARRIER: (0, 0),
    }[kind]
    assert (len(inputs), len(outputs)) == expected
    for place, source in enumerate(inputs):
        for other, target in enumerate(outputs):
            allowed = (kind is Kind.ALL_GATHER and other == rank) or (kind is Kind.REDUCE_SCATTER and place == rank)
            same = source.data_ptr() == target.data_ptr() and source.nbytes == target.nbytes
            assert (allowed and same) or not overlap(source, target), f"{kind.title}: input {place}, output {other}"


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin = max(one.data_ptr(), other.data_ptr())
    end = min(one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes)
    return begin < end


def compute(operation: Operation, ranks: list[Copies], me: int, factors: list[torch.Tensor]) -> None:
    """Writes this rank's outputs from all ranks' inputs: the table in `_operations/operation.py`, literally."""
    kind, root, outputs = operation.kind, operation.root, operation.outputs
    if kind is Kind.ALL_REDUCE or (kind is Kind.REDUCE and me == root):
        put(outputs[0], combine(operation.reduce_op, [inputs[0] for inputs in ranks], factors))
    elif kind is Kind.BROADCAST:
        put(outputs[0], ranks[root][0])
    elif kind is Kind.ALL_GATHER or (kind is Kind.GATHER and me == root):
        for output, inputs in zip(outputs, ranks, strict=True):
            put(output, inputs[0])
    elif kind is Kind.SCATTER:
        put(outputs[0], ranks[root][me])
    elif kind is Kind.REDUCE_SCATTER:
        put(outputs[0], combine(operation.reduce_op, [inputs[me] for inputs in ranks], factors))
    elif kind is Kind.ALL_TO_ALL:
        for output, inputs in zip(outputs, ranks, strict=True):
            put(output, inputs[me])


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    assert target.numel() == source.numel()
    target.copy_(source.view_as(target))


def combine(op: ReduceOp | None, tensors: list[torch.Tensor], factors: list[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.view(-1) for tensor in tensors]
    dtype = flat[0].dtype
    if dtype is torch.bool:
        both = {
            ReduceOp.SUM: torch.logical_or,
            ReduceOp.MAX: torch.logical_or,
            ReduceOp.BOR: torch.logical_or,
            ReduceOp.PRODUCT: torch.logical_and,
            ReduceOp.MIN: torch.logical_and,
            ReduceOp.BAND: torch.logical_and,
            ReduceOp.BXOR: torch.logical_xor,
        }
        assert op is not None
        return reduce(both[op], flat)
    if op is ReduceOp.PREMUL_SUM:
        flat = [tensor * factor.to(dtype) for tensor, factor in zip(flat, factors, strict=True)]
    wide = [tensor.to(torch.int64) if dtype in (torch.uint16, torch.uint32) else tensor for tensor in flat]
    if op is ReduceOp.AVG:
        total = reduce(torch.add, wide)
        if dtype.is_floating_point or dtype.is_complex:
            return total / len(wide)
        return torch.div(total, len(wide), rounding_mode="trunc").to(dtype)
    functions: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PREMUL_SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    assert op is not None
    return reduce(functions[op], wide).to(dtype)


def make_local(context: GroupContext, options: object) -> LocalBackend:
    return LocalBackend(context)


Backend.register_backend("local", make_local, extended_api=True, devices=["cpu"])
