"""Collectives that gradients flow through, with the names of `torch.distributed.nn.functional`.

Each function returns new tensors, and leaves its input alone. Its backward is a collective as well, so every rank has
to run the backward pass of the same calls: on every rank the input requires grad or on none, and a rank whose result is
of no use to it (`gather` and `reduce` elsewhere than at `dst`) still calls `backward`, e.g. on the sum of what it got.
Gradients are those of the sum of all ranks' losses; they can be differentiated again.

Only sums and averages have gradients. Where torch computes wrong ones (of MAX, for example), these functions raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd import Function

from rpcdist.collectives._api import operations
from rpcdist.collectives._group.world import Group, group_or_default
from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives._operations.reduce_kernels import canonical_op
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Context = Any  # torch gives its contexts whatever attributes they are given


def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """The tensor of rank `src`. Its gradient is the sum of all ranks' gradients at `src`, and zero elsewhere."""
    pg = group_or_default(group)
    return _apply(_Broadcast, pg, pg.group_rank(src), tensor)


def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> tuple[torch.Tensor, ...]:
    """All ranks' tensors, by rank, at `dst`; zeros of the same shapes elsewhere."""
    pg = group_or_default(group)
    return _apply_many(_Gather, pg, pg.group_rank(dst), tensor)


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: Group = None) -> torch.Tensor:
    """Tensor i of rank `src` on rank i. The other ranks pass tensors of the same shape, whose values do not count."""
    pg = group_or_default(group)
    return _apply(_Scatter, pg, pg.group_rank(src), *tensors)


def reduce(tensor: torch.Tensor, dst: int, op: object = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """The sum or average of all ranks' tensors at `dst`; a copy of its own on every other rank.

    Raises:
        ConfigError: another operation, where a gradient is wanted.
    """
    pg = group_or_default(group)
    return _apply(_Reduce, pg, pg.group_rank(dst), _check(op, tensor), tensor)


def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: object = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """The sum or average of all ranks' `input_list[i]` on rank i; `output` gets it, too, without its gradient.

    Raises:
        ConfigError: another operation, where a gradient is wanted.
    """
    pg = group_or_default(group)
    return _apply(_ReduceScatter, pg, _check(op, *input_list), output, *input_list)


def all_gather(tensor: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """All ranks' tensors, by rank; the gradient of the own one is the sum of all ranks' gradients of it."""
    return _apply_many(_AllGather, group_or_default(group), tensor)


def all_to_all(
    output_tensor_list: list[torch.Tensor], input_tensor_list: Sequence[torch.Tensor], group: Group = None
) -> tuple[torch.Tensor, ...]:
    """Tensor j of rank i is tensor i of what rank j gets; `output_tensor_list` gets them, too, without gradients."""
    return _apply_many(_AllToAll, group_or_default(group), output_tensor_list, *input_tensor_list)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """The same with the parts of all ranks in one tensor, cut along its first dimension; equal parts by default."""
    pg = group_or_default(group)
    return _apply(_AllToAllSingle, pg, output, output_split_sizes, input_split_sizes, input)


def all_reduce(tensor: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """The sum or average of all ranks' tensors; its gradient is the sum or average of all ranks' gradients.

    Raises:
        ConfigError: another operation, where a gradient is wanted.
    """
    return _apply(_AllReduce, group_or_default(group), _check(op, tensor), tensor)


def _check(op: object, *tensors: torch.Tensor) -> object:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        kind = canonical_op(op)[0]
        if kind not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigError(
                f"{kind.name} has no gradient here, only SUM and AVG have; detach() the tensor, or use no_grad()"
            )
    return op


def _apply(function: type[Function], *arguments: object) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(*arguments))


def _apply_many(function: type[Function], *arguments: object) -> tuple[torch.Tensor, ...]:
    return cast("tuple[torch.Tensor, ...]", function.apply(*arguments))


def _zeros_like_all(tensor: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]


# ---------------------------------------------------------------- each one's backward is another one

# Roots are ranks in the group. `forward` runs without gradients; `backward` records them if it can be differentiated
# itself.


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        copy = tensor.clone(memory_format=torch.contiguous_format)
        operations.broadcast(copy, group=group, group_src=root)
        return copy

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        total = _apply(_Reduce, ctx.group, ctx.root, ReduceOp.SUM, gradient)
        if ctx.group.rank() != ctx.root:  # zero, whatever is in it, and still a part of the graph
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return None, None, total


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, root: int, op: object, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.root, ctx.op = group, root, op
        copy = tensor.clone(memory_format=torch.contiguous_format)
        operations.reduce(copy, op=op, group=group, group_dst=root)
        return copy

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        return None, None, None, _share(ctx, _apply(_Broadcast, ctx.group, ctx.root, gradient))


class _Gather(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, root: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.root = group, root
        outputs = _zeros_like_all(tensor, group)
        operations.gather(tensor, outputs if group.rank() == root else None, group=group, group_dst=root)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _apply(_Scatter, ctx.group, ctx.root, *gradients)


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, root: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        shapes = {tensor.shape for tensor in tensors}
        if len(tensors) != group.size() or len(shapes) != 1:
            raise ConfigError(f"scatter wants {group.size()} tensors of one shape on every rank, one for each of them")
        output = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        given = list(tensors) if group.rank() == root else None
        operations.scatter(output, given, group=group, group_src=root)
        return output

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_apply_many(_Gather, ctx.group, ctx.root, gradient)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, op: object, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        copy = tensor.clone(memory_format=torch.contiguous_format)
        operations.all_reduce(copy, op, group)
        return copy

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _apply(_AllReduce, ctx.group, ctx.op, gradient)


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Context, group: ProcessGroup, op: object, output: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        operations.reduce_scatter(output, list(tensors), op, group)
        return output

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *_apply_many(_AllGather, ctx.group, _share(ctx, gradient))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Context, group: ProcessGroup, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        outputs = _zeros_like_all(tensor, group)
        operations.all_gather(outputs, tensor, group)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        total = torch.empty_like(gradients[ctx.group.rank()], memory_format=torch.contiguous_format)
        return None, _apply(_ReduceScatter, ctx.group, ReduceOp.SUM, total, *gradients)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Context, group: ProcessGroup, outputs: list[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.shapes = [tensor.shape for tensor in tensors]
        operations.all_to_all(list(outputs), list(tensors), group)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs = [gradients[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *_apply_many(_AllToAll, ctx.group, outputs, *gradients)


class _AllToAllSingle(Function):
    @staticmethod
    def forward(
        ctx: Context,
        group: ProcessGroup,
        output: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.group, ctx.shape = group, tensor.shape
        ctx.splits = input_splits, output_splits  # the other way round
        operations.all_to_all_single(output, tensor, output_splits, input_splits, group)
        return output

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output = gradient.new_empty(ctx.shape)
        return None, None, None, None, _apply(_AllToAllSingle, ctx.group, output, *ctx.splits, gradient)


def _share(ctx: Context, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, divided by the number of ranks where their average was taken."""
    return gradient / ctx.group.size() if canonical_op(ctx.op)[0] is ReduceOp.AVG else gradient
