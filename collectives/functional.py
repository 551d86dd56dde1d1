"""Collectives with gradients, with the names of `torch.distributed.nn.functional`.

Each function returns new tensors and does not change its input. Its backward is a collective as well, so every rank
must run the backward pass of the same calls: the input requires grad on every rank or on none, and a rank that does not
need its result (`gather` and `reduce` on ranks other than `dst`) still calls `backward`, e.g. on the sum of its result.
Gradients are those of the sum of all ranks' losses; they can be differentiated again.

Only sums and averages have gradients. For other operations, such as MAX, torch computes wrong gradients; these
functions raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import Function

from rpcdist.collectives._api import operations
from rpcdist.collectives._group.world import Group, group_or_default, resolve_group_rank
from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives._operations.reduce_kernels import canonical_op
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce",
    "reduce_scatter", "scatter",
]  # fmt: skip


Tensors = tuple[torch.Tensor, ...]


def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """Returns the tensor of rank `src`. Its gradient is the sum of all ranks' gradients on `src`, zero elsewhere."""
    pg = group_or_default(group)
    return _broadcast(pg, resolve_group_rank(pg, src, None), tensor)


def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns all ranks' tensors, by rank, on `dst`; zeros of the same shapes elsewhere."""
    pg = group_or_default(group)
    return _gather(pg, resolve_group_rank(pg, dst, None), tensor)


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: Group = None) -> torch.Tensor:
    """Returns tensor i of rank `src` on rank i. Other ranks pass tensors of the same shape, with any values."""
    pg = group_or_default(group)
    return _scatter(pg, resolve_group_rank(pg, src, None), tensors)


def reduce(tensor: torch.Tensor, dst: int, op: object = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """Returns the sum or average of all ranks' tensors on `dst`; a copy of the input on every other rank.

    Raises:
        ConfigError: the input requires grad, and `op` is another operation.
    """
    pg = group_or_default(group)
    return _reduce(pg, resolve_group_rank(pg, dst, None), _check(op, tensor), tensor)


def reduce_scatter(
    output: torch.Tensor, input_list: Sequence[torch.Tensor], op: object = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Returns the sum or average of all ranks' `input_list[i]` on rank i, and copies it to `output` without gradient.

    Raises:
        ConfigError: an input requires grad, and `op` is another operation.
    """
    return _reduce_scatter(group_or_default(group), _check(op, *input_list), output, input_list)


def all_gather(tensor: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Returns all ranks' tensors, by rank; the gradient of the input is the sum of all ranks' gradients of it."""
    return _all_gather(group_or_default(group), tensor)


def all_to_all(
    output_tensor_list: list[torch.Tensor], input_tensor_list: Sequence[torch.Tensor], group: Group = None
) -> tuple[torch.Tensor, ...]:
    """Returns on rank j, as tensor i, tensor j of rank i; copies them to `output_tensor_list` without gradients."""
    return _all_to_all(group_or_default(group), output_tensor_list, input_tensor_list)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Like `all_to_all`, with all parts in one tensor, cut along its first dimension; equal parts by default."""
    return _all_to_all_single(group_or_default(group), output, output_split_sizes, input_split_sizes, input)


def all_reduce(tensor: torch.Tensor, op: object = ReduceOp.SUM, group: Group = None) -> torch.Tensor:
    """Returns the sum or average of all ranks' tensors; its gradient is the sum or average of all ranks' gradients.

    Raises:
        ConfigError: the input requires grad, and `op` is another operation.
    """
    return _all_reduce(group_or_default(group), _check(op, tensor), tensor)


def _check(op: object, *tensors: torch.Tensor) -> object:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        kind = canonical_op(op)[0]
        if kind not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ConfigError(
                f"{kind.name} has no gradient in rpcdist, only SUM and AVG have; detach() the tensor, or use no_grad()"
            )
    return op


# ---------------------------------------------------------------- the backward of each is another one

# Roots are ranks in the group.


class _Collective(Function):
    """A collective with a gradient.

    `run` runs on the tensors without gradients. `back` computes their gradients from those of the results, and records
    its own gradients if it can be differentiated; it must not hold tensors, which would live as long as the graph.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.back(*gradients)


def _broadcast(group: ProcessGroup, root: int, tensor: torch.Tensor) -> torch.Tensor:
    def back(gradient: torch.Tensor) -> Tensors:
        total = _reduce(group, root, ReduceOp.SUM, gradient)
        if group.rank() != root:  # zero for any content, and still a part of the graph
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return (total,)

    return _apply(_on_copy(operations.broadcast, group=group, group_src=root), back, tensor)


def _reduce(group: ProcessGroup, root: int, op: object, tensor: torch.Tensor) -> torch.Tensor:
    def back(gradient: torch.Tensor) -> Tensors:
        return (_share(group, op, _broadcast(group, root, gradient)),)

    return _apply(_on_copy(operations.reduce, op=op, group=group, group_dst=root), back, tensor)


def _gather(group: ProcessGroup, root: int, tensor: torch.Tensor) -> Tensors:
    def run(tensor: torch.Tensor) -> Tensors:
        outputs = _zeros_like_all(tensor, group)
        operations.gather(tensor, outputs if group.rank() == root else None, group=group, group_dst=root)
        return tuple(outputs)

    def back(*gradients: torch.Tensor) -> Tensors:
        return (_scatter(group, root, gradients),)

    return _apply_many(run, back, tensor)


def _scatter(group: ProcessGroup, root: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        shapes = {tensor.shape for tensor in tensors}
        if len(tensors) != group.size() or len(shapes) != 1:
            raise ConfigError(f"scatter needs {group.size()} tensors of one shape on every rank, one for each rank")
        output = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        given = list(tensors) if group.rank() == root else None
        operations.scatter(output, given, group=group, group_src=root)
        return output

    def back(gradient: torch.Tensor) -> Tensors:
        return _gather(group, root, gradient)

    return _apply(run, back, *tensors)


def _all_reduce(group: ProcessGroup, op: object, tensor: torch.Tensor) -> torch.Tensor:
    def back(gradient: torch.Tensor) -> Tensors:
        return (_all_reduce(group, op, gradient),)

    return _apply(_on_copy(operations.all_reduce, op=op, group=group), back, tensor)


def _reduce_scatter(
    group: ProcessGroup, op: object, output: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    def run(output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        operations.reduce_scatter(output, list(tensors), op, group)
        return output

    def back(gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_all_gather(group, _share(group, op, gradient))

    return _apply(run, back, output, *tensors)


def _all_gather(group: ProcessGroup, tensor: torch.Tensor) -> Tensors:
    def run(tensor: torch.Tensor) -> Tensors:
        outputs = _zeros_like_all(tensor, group)
        operations.all_gather(outputs, tensor, group)
        return tuple(outputs)

    def back(*gradients: torch.Tensor) -> Tensors:
        total = torch.empty_like(gradients[group.rank()], memory_format=torch.contiguous_format)
        return (_reduce_scatter(group, ReduceOp.SUM, total, gradients),)

    return _apply_many(run, back, tensor)


def _all_to_all(group: ProcessGroup, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
    shapes = [tensor.shape for tensor in tensors]

    def run(*tensors: torch.Tensor) -> Tensors:
        operations.all_to_all(list(outputs), list(tensors), group)
        return tuple(outputs)

    def back(*gradients: torch.Tensor) -> Tensors:
        return _all_to_all(group, [gradients[0].new_empty(shape) for shape in shapes], gradients)

    return _apply_many(run, back, *tensors)


def _all_to_all_single(
    group: ProcessGroup,
    output: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    tensor: torch.Tensor,
) -> torch.Tensor:
    shape = tensor.shape

    def run(output: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        operations.all_to_all_single(output, tensor, output_splits, input_splits, group)
        return output

    def back(gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, _all_to_all_single(group, gradient.new_empty(shape), input_splits, output_splits, gradient)

    return _apply(run, back, output, tensor)


def _apply(run: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, _Collective).apply(run, back, *tensors))


def _apply_many(run: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Tensors:
    return cast(Tensors, cast(Any, _Collective).apply(run, back, *tensors))


def _on_copy(operation: Callable[..., object], **arguments: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a function that runs an operation in place on a copy of its argument, and returns the copy."""

    def run(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone(memory_format=torch.contiguous_format)
        operation(copy, **arguments)
        return copy

    return run


def _zeros_like_all(tensor: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]


def _share(group: ProcessGroup, op: object, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the gradient, divided by the number of ranks for AVG."""
    return gradient / group.size() if canonical_op(op)[0] is ReduceOp.AVG else gradient
