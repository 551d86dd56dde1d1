"""`all_reduce` of sparse (COO) tensors: the sum of all ranks' entries, which may be at different indices.

The ranks tell each other how many entries each has, then exchange indices and values, and every rank adds up all of
them in the order of the ranks, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation, ReduceOp, dtype_code
from rpcdist.collectives._operations.reduce_kernels import canonical_op
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveMismatch, ConfigError

Run = Callable[[Operation], object]


def all_reduce_sparse(
    place: Place,
    tensor: torch.Tensor,
    op: object,
    async_op: bool,
    submit: Callable[[Lowered, bool], Work],
    run_part: Run | None,
) -> Work:
    """Replaces a sparse COO tensor by the sum of all ranks' tensors, which have its shape and dtype.

    It counts as one operation of the group, and its limit covers all of it. With a backend whose operations have no
    parts (`nccl`, and those that users register) it blocks until the counts are known, also with `async_op`.

    Args:
        place: rank and size of the group.
        tensor: the caller's tensor; it is changed in place.
        op: SUM, ours or torch's.
        async_op: whether to return before the operation is done.
        submit: submits an operation to the backend; the second argument says whether it is asynchronous.
        run_part: runs an operation as a part of the current one; None for a backend whose operations have no parts.

    Raises:
        ConfigError: another operation than SUM, or a dtype that groups do not carry.
    """
    if canonical_op(op)[0] is not ReduceOp.SUM:
        raise ConfigError("all_reduce of sparse tensors supports ReduceOp.SUM only; call to_dense() for the others")
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"Invalid scalar type: groups do not carry tensors of {tensor.dtype}")
    exchange = _Exchange(place.rank, place.size, tensor, place.staged)
    facts = exchange.facts_operation()
    if run_part is not None:
        lowered = Lowered(facts, lambda: exchange.go_on(run_part), [tensor], ())
        return submit(lowered, async_op)

    def run(operation: Operation) -> None:
        submit(Lowered(operation, None, [], ()), False)

    run(facts)
    exchange.go_on(run)
    return Work.finished("all_reduce of a sparse tensor", [tensor])


class _Exchange:
    """One rank's part of the exchange.

    Args:
        rank: this process's rank in the group.
        size: number of ranks in the group.
        tensor: the caller's tensor; `go_on` changes it.
        staged: whether tensors of other devices go through the CPU's memory.
    """

    def __init__(self, rank: int, size: int, tensor: torch.Tensor, staged: bool) -> None:
        self._rank = rank
        self._tensor = tensor
        self._device = torch.device("cpu") if staged else tensor.device
        self._mine = tensor.detach().coalesce()
        facts = [self._mine._nnz(), self._mine.sparse_dim(), dtype_code(tensor.dtype), *tensor.shape]
        self._facts = torch.tensor(facts, dtype=torch.int64, device=self._device)
        self._all_facts = torch.empty(size, len(facts), dtype=torch.int64, device=self._device)

    def facts_operation(self) -> Operation:
        """Gathers the facts of all ranks; a rank with another number of dimensions has another size: a mismatch."""
        return Operation(Kind.ALL_GATHER, (self._facts,), tuple(self._all_facts.unbind()))

    def go_on(self, run: Run) -> None:
        """Exchanges the entries and replaces the caller's tensor, once the facts have been gathered."""
        everybody: list[list[int]] = self._all_facts.tolist()
        self._compare(everybody)
        counts = [facts[0] for facts in everybody]
        with torch.no_grad():
            indices = self._gather(self._mine.indices().t(), counts, run)
            values = self._gather(self._mine.values(), counts, run)
            total = torch.sparse_coo_tensor(indices.t(), values, self._tensor.shape, check_invariants=False).coalesce()
            self._tensor.copy_(total)

    def _compare(self, everybody: list[list[int]]) -> None:
        """Every rank sees the same difference, so all of them raise."""
        if any(facts[1:] != everybody[0][1:] for facts in everybody):
            views = {rank: _view(facts) for rank, facts in enumerate(everybody)}
            raise CollectiveMismatch("all_reduce", f"the ranks called different operations: {views}")

    def _gather(self, mine: torch.Tensor, counts: list[int], run: Run) -> torch.Tensor:
        """Concatenates the rows of all ranks; for the exchange, each rank's are padded to the longest."""
        longest = max(counts)
        gathered = torch.zeros(len(counts), longest, *mine.shape[1:], dtype=mine.dtype, device=self._device)
        if gathered.numel():
            gathered[self._rank, : len(mine)] = mine
            parts = tuple(gathered.unbind())
            run(Operation(Kind.ALL_GATHER, (parts[self._rank],), parts))
        rows = [part[:count] for part, count in zip(gathered, counts, strict=True)]
        return torch.cat(rows).to(self._tensor.device)


def _view(facts: list[int]) -> str:
    _, sparse_dim, code, *shape = facts
    dtype = str(DTYPES[code]).removeprefix("torch.")
    return f"all_reduce of a sparse tensor ({dtype}, shape {tuple(shape)}, {sparse_dim} sparse dimensions)"
