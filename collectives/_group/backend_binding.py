"""`BackendBinding`: one group's operations on the tensors of one device type, and the backend that carries them.

`all_reduce` also takes sparse (COO) tensors, whose entries may be at different indices. The ranks exchange the numbers
of their entries, then indices and values, and every rank adds up all entries in rank order, so that all get the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.collectives._group.operation_hooks import HOOK_NAMES, HookOpName, OperationHooks
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.dense import Copies, is_ready
from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp, dtype_code, whole_number
from rpcdist.collectives._operations.reduce_kernels import canonical_op
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveMismatch, ConfigError

MAX_TAG = 2**31 - 1


class BackendBinding:
    """Passes a group's operations on one device type to the backend for that type.

    Attributes:
        place: rank and size of the group, and whether tensors are staged in CPU memory; for lowering.
        timeout_s: the limit of operations without their own; None takes the backend's.
        hooks: called around each operation; may be None.
    """

    __slots__ = ("backend", "hooks", "place", "timeout_s")

    def __init__(self, backend: GroupBackend, place: Place) -> None:
        self.backend = backend
        self.place = place
        self.timeout_s: float | None = None
        self.hooks: OperationHooks | None = None

    def run(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work | None:
        """Runs an operation; returns Work only if it is asynchronous, as torch's functions do."""
        work = self.submit(lowered, async_op, timeout_s)
        return work if async_op else None

    def submit(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work:
        """Runs an operation, and always returns its Work."""
        if self.hooks is None:
            return self.carry_out(lowered, async_op, timeout_s)
        operation, _, result, given = lowered
        name, outputs = HOOK_NAMES[operation.kind], [] if operation.inputs is operation.outputs else result
        run = partial(self.carry_out, lowered, async_op, timeout_s)
        return self.hooks.around(name, async_op, list(given), outputs, operation.root, run)

    def carry_out(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work:
        """Like `submit`, but without hooks: for a part of the caller's operation."""
        operation, finish, result, _ = lowered
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        work = self.backend.submit(operation, asynchronous=async_op, timeout_s=limit_s, finish=finish, result=result)
        return self._limited(work, limit_s)

    def _limited(self, work: Work, limit_s: float | None) -> Work:
        work.limit_s = self.backend.context.timeout_s if limit_s is None else limit_s
        return work

    def all_reduce(self, tensor: torch.Tensor, op: object, async_op: bool, timeout_s: float | None = None) -> Work:
        """`all_reduce` of a dense or sparse tensor; no other operation takes sparse tensors."""
        if not tensor.is_sparse:
            return self.submit(lowering.all_reduce(self.place, tensor, op), async_op, timeout_s)

        def carry_out(lowered: Lowered, asynchronous: bool) -> Work:
            return self.carry_out(lowered, asynchronous, timeout_s)

        def run() -> Work:
            run_part = self.backend.here().run_part if self.backend.runs_parts else None
            return all_reduce_sparse(self.place, tensor, op, async_op, carry_out, run_part)

        return run() if self.hooks is None else self.hooks.around(HookOpName.ALLREDUCE, async_op, [tensor], [], -1, run)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: object, async_op: bool) -> list[Work]:
        """`all_reduce` of dense tensors of one dtype that share no memory, in as few operations as possible."""
        if len(tensors) > 1 and self.backend.reduces_many:
            return [self.submit(lowering.all_reduce_many(self.place, tensors, op), async_op)]
        return [self.all_reduce(tensor, op, async_op) for tensor in tensors]

    def send(self, tensor: torch.Tensor, peer: int, tag: int, asynchronous: bool = True) -> Work:
        tag = self._checked_tag(peer, tag, "destination")
        if self.hooks is None:
            return self._send(tensor, peer, tag, asynchronous)
        run = partial(self._send, tensor, peer, tag, asynchronous)
        return self.hooks.around(HookOpName.SEND, True, [tensor], [], peer, run)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, asynchronous: bool) -> Work:
        dense = tensor if is_ready(tensor) else Copies(self.place.staged, moves_only=True).read(tensor)
        work = self.backend.send(dense, peer, tag, asynchronous=asynchronous, timeout_s=self.timeout_s)
        return self._limited(work, self.timeout_s)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, asynchronous: bool = True) -> Work:
        """Receives from a rank of the group, or starts to; from the first rank that sends if `peer` is None."""
        tag = self._checked_tag(peer, tag, "source")
        if self.hooks is None:
            return self._recv(tensor, peer, tag, asynchronous)
        run = partial(self._recv, tensor, peer, tag, asynchronous)
        return self.hooks.around(HookOpName.RECV, True, [], [tensor], -1 if peer is None else peer, run)

    def _recv(self, tensor: torch.Tensor, peer: int | None, tag: int, asynchronous: bool) -> Work:
        limit_s, dense, finish = self.timeout_s, tensor, None
        if not is_ready(tensor):
            copies = Copies(self.place.staged, moves_only=True)
            dense, finish = copies.write(tensor), copies.finish()
        work = self.backend.recv(dense, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, finish=finish)
        return self._limited(work, limit_s)

    def _checked_tag(self, peer: int | None, tag: int, role: str) -> int:
        if type(tag) is not int:
            tag = whole_number(tag, "tag")
        if not 0 <= tag <= MAX_TAG:
            raise ConfigError(f"Tag must be nonnegative and below 2**31, not {tag}")
        if peer is None:
            return tag
        rank, size, _ = self.place
        if not 0 <= peer < size:
            raise ConfigError(f"Invalid {role} rank {peer}: the group's ranks are 0 to {size - 1}")
        if peer == rank:
            text = f"Invalid {role} rank: {role} rank should not be the same as the rank of the current process."
            raise ConfigError(text)
        return tag


Run = Callable[[Operation], object]


def all_reduce_sparse(
    place: Place,
    tensor: torch.Tensor,
    op: object,
    async_op: bool,
    submit: Callable[[Lowered, bool], Work],
    run_part: Run | None,
) -> Work:
    """Replaces a sparse COO tensor by the sum of all ranks' tensors, which have the same shape and dtype.

    It counts as one operation of the group, and one limit covers all of it. With a backend whose operations have no
    parts (`nccl`, and those that users register) it blocks until the counts are known, even with `async_op`.

    Args:
        submit: submits an operation to the backend; the second argument says whether the operation is asynchronous.
        run_part: runs an operation as a part of the current one; None if the backend has no parts.

    Raises:
        ConfigError: another operation than SUM, or a dtype that groups do not carry.
    """
    if canonical_op(op)[0] is not ReduceOp.SUM:
        raise ConfigError("all_reduce of sparse tensors supports only ReduceOp.SUM; call to_dense() for the others")
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"Invalid scalar type: groups do not carry tensors of {tensor.dtype}")
    device = torch.device("cpu") if place.staged else tensor.device
    mine = tensor.detach().coalesce()
    numbers = [mine._nnz(), mine.sparse_dim(), dtype_code(tensor.dtype), *tensor.shape]
    facts = torch.tensor(numbers, dtype=torch.int64, device=device)
    all_facts = torch.empty(place.size, len(numbers), dtype=torch.int64, device=device)
    # Another number of dimensions has another size, and so is a mismatch.
    first = Operation(Kind.ALL_GATHER, (facts,), tuple(all_facts.unbind()))

    def gather(own: torch.Tensor, counts: list[int], run: Run) -> torch.Tensor:
        """Concatenates the rows of all ranks; each rank pads its rows to the longest for the exchange."""
        gathered = torch.zeros(place.size, max(counts), *own.shape[1:], dtype=own.dtype, device=device)
        if gathered.numel():
            gathered[place.rank, : len(own)] = own
            parts = tuple(gathered.unbind())
            run(Operation(Kind.ALL_GATHER, (parts[place.rank],), parts))
        rows = [part[:count] for part, count in zip(gathered, counts, strict=True)]
        return torch.cat(rows).to(tensor.device)

    def exchange(run: Run) -> None:
        """Exchanges the entries and replaces the caller's tensor, after the facts were gathered."""
        everybody: list[list[int]] = all_facts.tolist()
        if any(one[1:] != everybody[0][1:] for one in everybody):  # all ranks see the same facts, so all of them raise
            views = {rank: _view(one) for rank, one in enumerate(everybody)}
            raise CollectiveMismatch("all_reduce", f"the ranks called different operations: {views}")
        counts = [one[0] for one in everybody]
        with torch.no_grad():
            indices = gather(mine.indices().t(), counts, run)
            values = gather(mine.values(), counts, run)
            options: dict[str, Any] = {"device": values.device, "check_invariants": False}
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.shape, **options).coalesce())

    if run_part is not None:
        return submit(Lowered(first, lambda: exchange(run_part), [tensor], ()), async_op)

    def run(operation: Operation) -> None:
        submit(Lowered(operation, None, [], ()), False)

    run(first)
    exchange(run)
    return Work.finished("all_reduce of a sparse tensor", [tensor])


def _view(facts: list[int]) -> str:
    _, sparse_dim, code, *shape = facts
    dtype = str(DTYPES[code]).removeprefix("torch.")
    return f"all_reduce of a sparse tensor ({dtype}, shape {tuple(shape)}, {sparse_dim} sparse dimensions)"
