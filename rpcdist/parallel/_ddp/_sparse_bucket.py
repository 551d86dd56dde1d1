"""The reduction of a sparse gradient: ranks may have different rows, so they exchange rows and add them up.

During the backward pass the ranks exchange the numbers of their rows, and at its end the rows themselves.
"""

from __future__ import annotations

from typing import Final

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.parallel._ddp._dense_bucket import BucketEntry

DENSE: Final = -1


class SparseBucket:
    """One parameter with sparse gradients. The reducer's lock guards it.

    Args:
        number: position in the order of communication.
        member: the parameter.
        group: the ranks that reduce.

    Attributes:
        indices: the parameter's.
        num_missing: 1 while its gradient is not ready in this iteration, else 0.
    """

    def __init__(self, number: int, member: BucketEntry, group: ProcessGroup) -> None:
        self.number = number
        self.members = [member]
        self.indices = frozenset({member.index})
        self.num_missing = 0
        self._group = group
        self._gradient: torch.Tensor | None = None
        self._counts = torch.empty(0)

    def __repr__(self) -> str:
        return f"<bucket {self.number}: sparse gradient of {self.members[0].name}>"

    @property
    def num_bytes(self) -> int:
        return self.members[0].parameter.nbytes

    def start(self, gradient: torch.Tensor | None) -> Work:
        """Starts the exchange of the numbers of rows; a missing gradient has none."""
        size, device = self._group.size(), self.members[0].parameter.device
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.detach().coalesce()
        self._gradient = gradient
        count = 0 if gradient is None else gradient._nnz() if gradient.is_sparse else DENSE
        mine = torch.tensor([count], dtype=torch.int64, device=device)
        self._counts = torch.empty(size, dtype=torch.int64, device=device)
        work = collectives.all_gather_single(self._counts, mine, group=self._group, async_op=True)
        assert work is not None
        return work

    def finish(self, divisor: float) -> torch.Tensor:
        """The sum of all ranks' gradients, divided by `divisor`. All ranks must call it in the order of the buckets."""
        gradient, self._gradient = self._gradient, None
        counts: list[int] = self._counts.tolist()
        with torch.no_grad():
            if DENSE in counts:
                return self._reduce_dense(gradient).div_(divisor)
            return self._exchange(gradient, counts, divisor)

    def _reduce_dense(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """The sum if some rank has a dense gradient."""
        if gradient is None:
            dense = torch.zeros_like(self.members[0].parameter, memory_format=torch.contiguous_format)
        else:
            dense = gradient.to_dense().contiguous() if gradient.is_sparse else gradient.clone()
        collectives.all_reduce(dense, ReduceOp.SUM, group=self._group)
        return dense

    def _exchange(self, gradient: torch.Tensor | None, counts: list[int], divisor: float) -> torch.Tensor:
        parameter = self.members[0].parameter
        longest = max(counts)
        if longest == 0:
            return torch.zeros_like(parameter, layout=torch.sparse_coo)
        # The rows of an embedding's gradient: one sparse dimension, all others dense.
        indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(longest, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        if gradient is not None and gradient._nnz():
            indices[: gradient._nnz()] = gradient.indices()[0]
            values[: gradient._nnz()] = gradient.values()
        all_indices, all_values = self._gather(indices), self._gather(values)
        kept = torch.cat([torch.arange(count) + rank * longest for rank, count in enumerate(counts)]).to(indices.device)
        total = torch.sparse_coo_tensor(
            all_indices[kept].unsqueeze(0), all_values[kept], parameter.shape, check_invariants=False
        ).coalesce()
        total.values().div_(divisor)
        return total

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.new_empty(self._group.size() * mine.shape[0], *mine.shape[1:])
        collectives.all_gather_single(everyone, mine, group=self._group)
        return everyone
