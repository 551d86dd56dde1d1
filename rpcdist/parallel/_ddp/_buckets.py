"""Buckets: which gradients are reduced together, how they are packed before and delivered afterwards.

Gradients become ready roughly in the reverse order of the parameters. At first buckets are filled in that order; after
one backward pass, in the order in which gradients became ready. A bucket has one dtype and one device. Each parameter
with sparse gradients has its own bucket. torch assigns the gradients to buckets.

[Note: in place]
A flat buffer costs memory and two copies of every gradient. Gradients of at least `OWN_BYTES` alone are large enough
for the network, so each of them is reduced in place by its own operation; only smaller gradients of a bucket are packed
into the buffer. The choice depends only on the sizes of the parameters, so all ranks agree. A gradient is copied if its
memory is shared, or if its layout differs from that of its parameter. With `gradient_as_bucket_view` the packed
gradients become views of the buffer, and are not copied while they are kept. Comm hooks need all gradients of a bucket
in one buffer (`flat`). On a GPU all gradients are packed as well, as copies are cheaper there than operations of NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup, ReduceOp, Work
from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._parameters import Trained

MEBIBYTE: Final = 1 << 20
DEFAULT_FIRST_BUCKET_BYTES: Final = MEBIBYTE
DEFAULT_CAP_MB: Final = 25
NO_LIMIT: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """Size limits of buckets. The gradient that reaches the limit is the last one of its bucket; all gradients reach 0.

    Attributes:
        num_bytes: limit of all buckets except the first.
        first_bytes: limit of the first bucket; smaller by default, so that its reduction starts early.
        listed: one limit per bucket; replaces the other two.
    """

    num_bytes: int
    first_bytes: int
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None = None) -> BucketCaps:
        """Makes the limits from `bucket_cap_mb` and `bucket_cap_mb_list` of `DistributedDataParallel`.

        Raises:
            ConfigError: a cap is negative.
        """
        for cap in (cap_mb, *(cap_mb_list or ())):
            if cap is not None and not cap >= 0:
                raise ConfigError(f"a bucket cap of {cap} MiB is invalid; pass 0 or more, or None")
        if cap_mb_list:
            listed = tuple(int(cap * MEBIBYTE) for cap in cap_mb_list)
            return cls(max(listed), max(listed), listed)
        if cap_mb is None:
            return cls(DEFAULT_CAP_MB * MEBIBYTE, DEFAULT_FIRST_BUCKET_BYTES)
        return cls(int(cap_mb * MEBIBYTE), int(cap_mb * MEBIBYTE))

    def initial_limits(self, order_is_fixed: bool) -> list[int]:
        """Returns the limits for the first iterations.

        Args:
            order_is_fixed: whether buckets are never rebuilt. If they are rebuilt, one bucket takes all gradients until
                the order of readiness is known, because reductions in another order could interleave differently with
                other collectives of the backward pass.
        """
        if self.listed:
            return list(self.listed)
        return self.rebuilt_limits() if order_is_fixed else [NO_LIMIT]

    def rebuilt_limits(self) -> list[int]:
        """Returns the limits when the order of readiness is known."""
        return list(self.listed) or [self.first_bytes, self.num_bytes]


def initial_buckets(parameters: Sequence[Trained], caps: BucketCaps, order_is_fixed: bool) -> list[list[int]]:
    """Returns the buckets before any backward pass, in the order in which they are expected to become ready."""
    return _assign(parameters, caps.initial_limits(order_is_fixed), ())[0][::-1]


def rebuilt_buckets(parameters: Sequence[Trained], caps: BucketCaps, ready_order: Sequence[int]) -> list[list[int]]:
    """Returns the buckets by the order in which the gradients of a whole backward pass became ready."""
    buckets, limits = _assign(parameters, caps.rebuilt_limits(), ready_order)
    # torch appends those that are not full in the order of a hash table, which may differ between ranks.
    sizes = [sum([parameters[index].tensor.nbytes for index in bucket]) for bucket in buckets]
    num_full = sum([size >= limit for size, limit in zip(sizes, limits, strict=True)])
    first_ready = {index: position for position, index in enumerate(ready_order)}
    return buckets[:num_full] + sorted(buckets[num_full:], key=lambda bucket: first_ready[bucket[0]])


def _assign(
    parameters: Sequence[Trained], limits: Sequence[int], ready_order: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Returns the buckets as lists of indices of parameters, and the size limit of each in bytes.

    Args:
        limits: size limits in bytes of the first bucket of each dtype and device, the second, and so on; the last limit
            applies to all later buckets.
        ready_order: all indices, in the order in which buckets are filled and closed; if empty, buckets are filled in
            the order of `parameters`, and sorted by their smallest index.
    """
    ready = [parameters[index] for index in ready_order] or parameters
    tensors: list[torch.Tensor] = [each.tensor for each in ready]
    sparse = [each.sparse for each in parameters]
    return torch.distributed._compute_bucket_assignment_by_size(tensors, list(limits), sparse, list(ready_order))


_OWN_USES: Final = 2
"""The use count of a storage with one tensor: the references of the tensor and of `untyped_storage()`."""


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor have no gaps and overlaps in memory, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def as_run(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient's memory as a flat tensor if it is laid out like the parameter, otherwise None."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() == parameter.stride() and fills_its_memory(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return None


def view_like(run: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor with the parameter's shape, and with its strides if the parameter fills its memory."""
    if not parameter.is_contiguous() and fills_its_memory(parameter):
        return run.as_strided(parameter.shape, parameter.stride(), run.storage_offset())
    return run.view(parameter.shape)


def is_private(tensor: torch.Tensor) -> bool:
    """Whether no other tensor uses its memory, since the engine may give one gradient to two parameters."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES)


OWN_BYTES: Final = 1 << 19


class DenseBucket:
    """Dense gradients of one dtype and device. The reducer's lock guards the object.

    Args:
        flat: whether all gradients are packed, as always on a GPU; see [Note: in place].

    Attributes:
        runs: the flat tensors that are reduced; empty between `scatter` and `gather`.
    """

    def __init__(self, number: int, members: Sequence[Trained], flat: bool) -> None:
        self.number = number
        self.members = list(members)
        flat = flat or members[0].tensor.is_cuda
        self.runs: list[torch.Tensor] = []
        self.packed = [member for member in members if flat or member.tensor.nbytes < OWN_BYTES]
        self._own = [member for member in members if not flat and member.tensor.nbytes >= OWN_BYTES]
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._reduced: list[torch.Tensor] = []  # the runs of the other members, as gradients

    @property
    def num_bytes(self) -> int:
        return sum(member.tensor.nbytes for member in self.members)

    @property
    def buffer(self) -> torch.Tensor:
        """The flat tensor of the packed gradients, allocated at the first use."""
        if self._buffer is None:
            parameter = self.packed[0].tensor
            counts = [member.tensor.numel() for member in self.packed]
            self._buffer = torch.zeros(sum(counts), dtype=parameter.dtype, device=parameter.device)
            parts = zip(self._buffer.split(counts), self.packed, strict=True)
            self._views = [view_like(part, member.tensor) for part, member in parts]
        return self._buffer

    # ------------------------------------------------------------ from gradients to runs

    def gather(self, gradient_of: Callable[[Trained], torch.Tensor | None], in_place: bool) -> list[torch.Tensor]:
        """Returns the flat tensors to reduce; a missing gradient is zeros. `in_place` allows to overwrite others."""
        with torch.no_grad():
            self._reduced.clear()
            self.runs = [self._own_run(member, gradient_of(member), in_place) for member in self._own]
            if self.packed:
                self.runs.append(self.buffer)
                self._pack([gradient_of(member) for member in self.packed])
        return self.runs

    def _pack(self, gradients: Sequence[torch.Tensor | None]) -> None:
        targets, sources = [], []
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _own_run(self, member: Trained, gradient: torch.Tensor | None, in_place: bool) -> torch.Tensor:
        parameter = member.tensor
        if gradient is None:
            run = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            self._reduced.append(view_like(run, parameter))
            return run
        fits = in_place and not gradient.is_sparse and gradient.dtype is parameter.dtype and is_private(gradient)
        if fits and (own := as_run(gradient.detach(), parameter)) is not None:
            self._reduced.append(gradient)
            return own
        run = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        view = view_like(run, parameter)
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self._reduced.append(view)
        return run

    # ------------------------------------------------------------ from runs to gradients

    def scatter(self, deliver: Callable[[list[Trained], list[torch.Tensor], bool], None]) -> None:
        """Delivers the reduced gradients, with whether they stay valid in the next iteration, and drops the runs."""
        reduced, self._reduced, self.runs = self._reduced, [], []
        if self._own:
            deliver(self._own, reduced, True)
        if self.packed:
            deliver(self.packed, self._views, False)


DENSE: Final = -1


class SparseBucket:
    """One parameter with sparse gradients. The reducer's lock guards the object."""

    def __init__(self, number: int, member: Trained, group: ProcessGroup) -> None:
        self.number = number
        self.members = [member]
        self._group = group
        self._gradient: torch.Tensor | None = None
        self._counts = torch.empty(0, device="cpu")

    @property
    def num_bytes(self) -> int:
        return self.members[0].tensor.nbytes

    def exchange_sizes(self, gradient: torch.Tensor | None) -> Work:
        """Starts the exchange of the numbers of rows; a missing gradient has 0."""
        size, device = self._group.size(), self.members[0].tensor.device
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
        """Returns the sum of all ranks' gradients, divided by `divisor`. All ranks call it in bucket order."""
        gradient, self._gradient = self._gradient, None
        counts: list[int] = self._counts.tolist()
        with torch.no_grad():
            if DENSE in counts:
                return self._reduce_dense(gradient).div_(divisor)
            return self._exchange(gradient, counts, divisor)

    def _reduce_dense(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Returns the sum if some rank has a dense gradient."""
        if gradient is None:
            dense = torch.zeros_like(self.members[0].tensor, memory_format=torch.contiguous_format)
        else:
            dense = gradient.to_dense().contiguous() if gradient.is_sparse else gradient.clone()
        collectives.all_reduce(dense, ReduceOp.SUM, group=self._group)
        return dense

    def _exchange(self, gradient: torch.Tensor | None, counts: list[int], divisor: float) -> torch.Tensor:
        parameter = self.members[0].tensor
        longest = max(counts)
        if longest == 0:
            return torch.zeros_like(parameter, layout=torch.sparse_coo)
        # An embedding's gradient has one sparse dimension, the rows; all others are dense.
        indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(longest, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
        if gradient is not None and gradient._nnz():
            indices[: gradient._nnz()] = gradient.indices()[0]
            values[: gradient._nnz()] = gradient.values()
        all_indices, all_values = self._gather(indices), self._gather(values)
        kept = torch.cat([torch.arange(count, device="cpu") + rank * longest for rank, count in enumerate(counts)])
        kept = kept.to(indices.device)
        total = torch.sparse_coo_tensor(
            all_indices[kept].unsqueeze(0),
            all_values[kept],
            parameter.shape,
            device=parameter.device,
            check_invariants=False,
        ).coalesce()
        total.values().div_(divisor)
        return total

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.new_empty(self._group.size() * mine.shape[0], *mine.shape[1:])
        collectives.all_gather_single(everyone, mine, group=self._group)
        return everyone
