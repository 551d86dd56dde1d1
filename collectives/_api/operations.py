"""The collective operations, with the names, defaults and in-place semantics of torch.distributed.

All ranks of the group call the same functions in the same order. `src` and `dst` are ranks in the world, `group_src`
and `group_dst` ranks in the group; pass one of the two. With `async_op` a function returns `Work` at once, and the
tensors must not be touched until it is done; otherwise it returns None when this rank's part is done. On a rank outside
the group (`GroupMember.NON_GROUP_MEMBER`) every function warns and does nothing.

Tensors may be contiguous or not, empty, or without dimensions. Every function raises TypeError or ConfigError (a
ValueError) for wrong arguments before it sends any data, and CollectiveError when the operation fails:
CollectiveMismatch, CollectiveTimeout, RankLost or GroupAborted. After one of these the group cannot be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Concatenate, ParamSpec

import torch

from rpcdist.collectives._group.world import Group, member_group, resolve_group_rank, resolve_root
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.operation import (
    ReduceOp,
    barrier_timeout,
    check_same_dtype,
    check_tensor,
    check_tensor_list,
    check_timeout,
)
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError, begins_traceback

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "monitored_barrier", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
]  # fmt: skip

P = ParamSpec("P")


@begins_traceback
def all_reduce(
    tensor: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Replaces the tensor, on every rank, by the reduction of all ranks' tensors; all ranks get the same bits.

    With SUM it may be a sparse (COO) tensor; the ranks' entries may have different indices, and the sum is coalesced.
    """
    check_tensor(tensor, "tensor")
    pg = member_group(group, "all_reduce")
    if pg is None:
        return None
    work = pg.binding(tensor.device.type).all_reduce(tensor, op, async_op)
    return work if async_op else None


@begins_traceback
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Replaces the tensor on rank `dst` by the reduction of all ranks' tensors; other ranks keep their tensors."""
    check_tensor(tensor, "tensor")
    pg = member_group(group, "reduce")
    if pg is None:
        return None
    root = resolve_group_rank(pg, dst, group_dst)
    binding = pg.binding(tensor.device.type)
    return binding.run(lowering.reduce(binding.place, tensor, root, op), async_op)


@begins_traceback
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Replaces the tensor on every rank by the tensor of rank `src`."""
    check_tensor(tensor, "tensor")
    pg = member_group(group, "broadcast")
    if pg is None:
        return None
    root = resolve_group_rank(pg, src, group_src)
    binding = pg.binding(tensor.device.type)
    return binding.run(lowering.broadcast(binding.place, tensor, root), async_op)


@begins_traceback
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Puts the tensor of rank i into `tensor_list[i]`; all tensors have the same number of elements."""
    check_tensor_list(tensor_list, "tensor_list")
    check_tensor(tensor, "tensor")
    check_same_dtype([*tensor_list, tensor])
    return _run(lowering.all_gather, group, async_op, [tensor, *tensor_list], tensor_list, tensor)


@begins_traceback
def all_gather_single(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Puts the tensors of all ranks into one, concatenated or stacked: (size * n, ...) or (size, n, ...).

    Nothing is copied when both are contiguous; `input_tensor` may be this rank's own part of `output_tensor`.
    """
    check_tensor(input_tensor, "input_tensor")
    check_tensor(output_tensor, "output_tensor")
    return _run(lowering.all_gather_single, group, async_op, [input_tensor, output_tensor], output_tensor, input_tensor)


all_gather_into_tensor = all_gather_single
"""Another name for `all_gather_single`."""


@begins_traceback
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Puts the tensor of rank i into `gather_list[i]` on rank `dst` (0 by default); other ranks pass no list."""
    check_tensor(tensor, "tensor")
    outputs = gather_list or []
    check_tensor_list(outputs, "gather_list")
    check_same_dtype([tensor, *outputs])
    pg = member_group(group, "gather")
    if pg is None:
        return None
    root = resolve_root(pg, dst, group_dst)
    check_list_at(pg.rank() == root, outputs, "gather_list", "destination")
    return _run(lowering.gather, pg, async_op, [tensor, *outputs], outputs, tensor, root)


@begins_traceback
def gather_single(
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Like `gather`, with one output on rank `dst`, concatenated or stacked: (size * n, ...) or (size, n, ...).

    Nothing is copied when both are contiguous. Other ranks do not use `gather_tensor`.
    """
    check_tensor(tensor, "tensor")
    pg = member_group(group, "gather_single")
    if pg is None:
        return None
    root = resolve_root(pg, dst, group_dst)
    if pg.rank() != root:
        gather_tensor = None
    elif gather_tensor is None:
        raise ConfigError("gather_tensor must be specified on the destination rank")
    else:
        check_tensor(gather_tensor, "gather_tensor")
    tensors = [tensor] if gather_tensor is None else [tensor, gather_tensor]
    return _run(lowering.gather_single, pg, async_op, tensors, gather_tensor, tensor, root)


gather_into_tensor = gather_single
"""Another name for `gather_single`."""


@begins_traceback
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Puts `scatter_list[i]` of rank `src` (0 by default) into the tensor of rank i; other ranks pass no list."""
    check_tensor(tensor, "tensor")
    inputs = scatter_list or []
    check_tensor_list(inputs, "scatter_list")
    check_same_dtype([tensor, *inputs])
    pg = member_group(group, "scatter")
    if pg is None:
        return None
    root = resolve_root(pg, src, group_src)
    check_list_at(pg.rank() == root, inputs, "scatter_list", "source")
    return _run(lowering.scatter, pg, async_op, [tensor, *inputs], tensor, inputs, root)


@begins_traceback
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Puts the reduction of all ranks' `input_list[i]` into the output of rank i."""
    check_tensor(output, "output")
    check_tensor_list(input_list, "input_list")
    check_same_dtype([output, *input_list])
    return _run(lowering.reduce_scatter, group, async_op, [output, *input_list], output, input_list, op)


@begins_traceback
def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Like `reduce_scatter`, with the chunks of all ranks in one tensor, concatenated or stacked.

    Nothing is copied when both are contiguous; `output` may be this rank's own part of `input`.
    """
    check_tensor(output, "output")
    check_tensor(input, "input")
    return _run(lowering.reduce_scatter_single, group, async_op, [output, input], output, input, op)


reduce_scatter_tensor = reduce_scatter_single
"""Another name for `reduce_scatter_single`."""


@begins_traceback
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Puts `input_tensor_list[j]` of rank i into `output_tensor_list[i]` of rank j; lengths may differ."""
    check_tensor_list(output_tensor_list, "output_tensor_list")
    check_tensor_list(input_tensor_list, "input_tensor_list")
    check_same_dtype([*output_tensor_list, *input_tensor_list])
    pg = member_group(group, "all_to_all")
    if pg is None:
        return None
    if not input_tensor_list:
        raise ConfigError("all_to_all: `input_tensor_list` is empty; pass one tensor for each rank")
    tensors = [*input_tensor_list, *output_tensor_list]
    return _run(lowering.all_to_all, pg, async_op, tensors, output_tensor_list, input_tensor_list)


@begins_traceback
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Like `all_to_all`, with the parts of all ranks in one tensor, cut along its first dimension.

    Args:
        output: the parts from all ranks, one after the other.
        input: the parts for all ranks.
        output_split_sizes: lengths of the parts from each rank; equal by default.
        input_split_sizes: lengths of the parts for each rank; equal by default.
    """
    check_tensor(output, "output")
    check_tensor(input, "input")
    check_same_dtype([output, input])
    tensors, lower = [input, output], lowering.all_to_all_single
    splits = [() if sizes is None else sizes for sizes in (output_split_sizes, input_split_sizes)]
    return _run(lower, group, async_op, tensors, output, input, *splits)


@begins_traceback
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Waits until all ranks of the group have called it.

    Args:
        group: the default group by default.
        async_op: whether to return `Work` instead of waiting.
        device_ids: accepted for compatibility with torch and ignored; the group's own device is used.
        timeout: the group's by default.
    """
    pg = member_group(group, "barrier")
    if pg is None:
        return None
    timeout_s = None if timeout is None else check_timeout(timeout).total_seconds()
    bound = pg.bound_device_id
    binding = pg.binding(pg.object_device if bound is None else bound.type)
    return binding.run(lowering.barrier(), async_op, timeout_s)


@begins_traceback
def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Like `barrier`; its error names all ranks that did not call it, with and without `wait_all_ranks`.

    Raises:
        ConfigError: the group has no backend for the CPU.
    """
    pg = member_group(group, "monitored_barrier")
    if pg is None:
        return
    if "cpu" not in pg.device_types:
        raise ConfigError("monitored_barrier is only implemented for groups that have a backend for the CPU.")
    pg.monitored_barrier(barrier_timeout(timeout, stacklevel=4), wait_all_ranks)


def _run(
    lower: Callable[Concatenate[Place, P], Lowered],
    group: Group,
    async_op: bool,
    tensors: Sequence[torch.Tensor],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Work | None:
    """Runs an operation on the backend for the device of `tensors`; `lower` makes it from the further arguments."""
    pg = member_group(group, lower.__name__, stacklevel=5)
    if pg is None:
        return None
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ConfigError(f"all tensors must be on one device, not some on {device} and others on {tensor.device}")
    binding = pg.binding(device.type)
    return binding.run(lower(binding.place, *args, **kwargs), async_op)


def check_list_at(is_root: bool, given: Sequence[object], name: str, root: str) -> None:
    if is_root and not given:
        raise ConfigError(f"Argument ``{name}`` must be specified on {root} rank.")
    if given and not is_root:
        raise ConfigError(f"Argument ``{name}`` must NOT be specified on non-{root} ranks.")
