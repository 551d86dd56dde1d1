"""Turns the tensors of a call into an `Operation`: a pure function for each kind checks sizes and makes copies.

Ranks, roots and sizes are those of the group. Callers have checked the types of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rpcdist.collectives._operations.dense import CARRIED, Copies, is_dense, same_kind, separate
from rpcdist.collectives._operations.operation import (
    Kind,
    Operation,
    ReduceOp,
    check_num_tensors,
    check_same_count,
    checked_root,
    whole_number,
)
from rpcdist.collectives._operations.reduce_kernels import canonical_op, unsupported
from rpcdist.errors import ConfigError


class Place(NamedTuple):
    """This rank, the group's size, and whether tensors go through CPU memory."""

    rank: int
    size: int
    staged: bool = False


class Lowered(NamedTuple):
    """The arguments of `GroupBackend.submit`; `result` has the caller's output tensors, `given` the inputs."""

    operation: Operation
    finish: Callable[[], None] | None
    result: list[torch.Tensor]
    given: Sequence[torch.Tensor]


def all_reduce(place: Place, tensor: torch.Tensor, op: object) -> Lowered:
    reduce_op, factor = canonical_op(op)
    _check_reduces(reduce_op, tensor, "all_reduce")
    if not place.staged and not tensor.requires_grad and is_dense(tensor) and tensor.dtype in CARRIED:
        own = (tensor,)  # the usual case, which needs no copies
        return Lowered(Operation(Kind.ALL_REDUCE, own, own, reduce_op, factor=factor), None, [tensor], own)
    return all_reduce_many(place, [tensor], op)


def all_reduce_many(place: Place, tensors: Sequence[torch.Tensor], op: object) -> Lowered:
    """Makes one operation on all tensors, in place, for backends that have `reduces_many`."""
    reduce_op, factor = canonical_op(op)
    dtype = tensors[0].dtype
    for tensor in tensors:
        _check_reduces(reduce_op, tensor, "all_reduce")
        if tensor.dtype is not dtype:
            raise ConfigError(f"tensors that are reduced together must have one dtype, not {dtype} and {tensor.dtype}")
    copies = Copies(place.staged)
    dense = tuple([copies.update(tensor) for tensor in tensors])
    operation = Operation(Kind.ALL_REDUCE, dense, dense, reduce_op, factor=factor)
    return Lowered(operation, copies.finish(), list(tensors), tensors)


def all_reduce_coalesced(place: Place, tensors: list[torch.Tensor], op: object) -> Lowered:
    reduce_op, factor = canonical_op(op)
    for tensor in tensors:
        _check_reduces(reduce_op, tensor, "all_reduce")  # the name in torch's errors
    if not tensors:
        raise ConfigError("all_reduce_coalesced: `tensors` is empty; pass at least one tensor")
    copies = Copies(place.staged)
    dense = [copies.update(tensor) for tensor in same_kind(tensors)]
    flat = torch.cat([each.view(-1) for each in dense])
    put_back = copies.finish()

    def finish() -> None:
        with torch.inference_mode():
            for part, each in zip(flat.split([each.numel() for each in dense]), dense, strict=True):
                each.copy_(part.view_as(each))
        if put_back is not None:
            put_back()

    own = (flat,)
    return Lowered(Operation(Kind.ALL_REDUCE, own, own, reduce_op, factor=factor), finish, tensors, tensors)


def reduce(place: Place, tensor: torch.Tensor, root: int, op: object) -> Lowered:
    root = checked_root(root, place.size, "reduce")
    reduce_op, factor = canonical_op(op)
    _check_reduces(reduce_op, tensor, "reduce")
    copies = Copies(place.staged)
    dense = (copies.update(tensor, copy_back=place.rank == root),)
    return Lowered(Operation(Kind.REDUCE, dense, dense, reduce_op, root, factor), copies.finish(), [tensor], [tensor])


def broadcast(place: Place, tensor: torch.Tensor, root: int) -> Lowered:
    root = checked_root(root, place.size, "broadcast")
    copies = Copies(place.staged, moves_only=True)
    dense = (copies.update(tensor, copy_back=place.rank != root),)
    return Lowered(Operation(Kind.BROADCAST, dense, dense, root=root), copies.finish(), [tensor], [tensor])


def all_gather(place: Place, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Lowered:
    check_num_tensors(outputs, place.size, "all_gather", "tensor_list")
    copies, (source, *targets) = _read_and_write(place, [tensor], outputs)
    for target in targets:
        check_same_count(target, source.numel(), "all_gather", "tensor_list", "`tensor`")
    inputs = separate((source,), targets, (0, place.rank))
    return Lowered(Operation(Kind.ALL_GATHER, inputs, tuple(targets)), copies.finish(), outputs, [tensor])


def all_gather_single(place: Place, output: torch.Tensor, tensor: torch.Tensor) -> Lowered:
    """The output holds the inputs of all ranks, concatenated or stacked: only the number of elements matters."""
    _check_one_dtype("all_gather_single", output, tensor)
    copies, (source, target) = _read_and_write(place, [tensor], [output])
    count = source.numel()
    check_same_count(
        target, count * place.size, "all_gather_single", "output_tensor", f"{place.size} times `input_tensor`"
    )
    targets = _split(target, [count] * place.size)
    inputs = separate((source,), targets, (0, place.rank))
    return Lowered(Operation(Kind.ALL_GATHER, inputs, targets), copies.finish(), [output], [tensor])


def gather(place: Place, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> Lowered:
    """`outputs` is empty on all ranks except the root."""
    root = checked_root(root, place.size, "gather")
    if place.rank == root:
        check_num_tensors(outputs, place.size, "gather", "gather_list")
    copies, (source, *targets) = _read_and_write(place, [tensor], outputs)
    for target in targets:
        check_same_count(target, source.numel(), "gather", "gather_list", "`tensor`")
    inputs = separate((source,), targets)
    return Lowered(Operation(Kind.GATHER, inputs, tuple(targets), root=root), copies.finish(), outputs, [tensor])


def gather_single(place: Place, output: torch.Tensor | None, tensor: torch.Tensor, root: int) -> Lowered:
    """The root's output holds the inputs of all ranks, concatenated or stacked; other ranks have no output."""
    root = checked_root(root, place.size, "gather_single")
    if output is None or place.rank != root:
        copies, (source,) = _read_and_write(place, [tensor], [])
        return Lowered(Operation(Kind.GATHER, (source,), (), root=root), copies.finish(), [], [tensor])
    _check_one_dtype("gather_single", output, tensor)
    copies, (source, target) = _read_and_write(place, [tensor], [output])
    count = source.numel()
    check_same_count(target, count * place.size, "gather_single", "gather_tensor", f"{place.size} times `tensor`")
    targets = _split(target, [count] * place.size)
    inputs = separate((source,), targets)
    return Lowered(Operation(Kind.GATHER, inputs, targets, root=root), copies.finish(), [output], [tensor])


def scatter(place: Place, output: torch.Tensor, tensors: list[torch.Tensor], root: int) -> Lowered:
    """`tensors` is empty on all ranks except the root."""
    root = checked_root(root, place.size, "scatter")
    if place.rank == root:
        check_num_tensors(tensors, place.size, "scatter", "scatter_list")
    copies, (*sources, target) = _read_and_write(place, tensors, [output])
    for source in sources:
        check_same_count(source, target.numel(), "scatter", "scatter_list", "`tensor`")
    inputs = separate(sources, (target,))
    return Lowered(Operation(Kind.SCATTER, inputs, (target,), root=root), copies.finish(), [output], tensors)


def reduce_scatter(place: Place, output: torch.Tensor, tensors: list[torch.Tensor], op: object) -> Lowered:
    reduce_op, factor = canonical_op(op)
    _check_reduces(reduce_op, output, "reduce_scatter")
    check_num_tensors(tensors, place.size, "reduce_scatter", "input_list")
    copies, (*sources, target) = _read_and_write(place, tensors, [output], moves_only=False)
    own = sources[place.rank].numel()
    check_same_count(target, own, "reduce_scatter", "output", f"`input_list[{place.rank}]`")
    inputs = separate(sources, (target,), (place.rank, 0))
    operation = Operation(Kind.REDUCE_SCATTER, inputs, (target,), reduce_op, factor=factor)
    return Lowered(operation, copies.finish(), [output], tensors)


def reduce_scatter_single(place: Place, output: torch.Tensor, tensor: torch.Tensor, op: object) -> Lowered:
    """The input holds one chunk for each rank, concatenated or stacked: only the number of elements matters."""
    reduce_op, factor = canonical_op(op)
    _check_reduces(reduce_op, output, "reduce_scatter_single")
    _check_one_dtype("reduce_scatter_single", output, tensor)
    copies, (source, target) = _read_and_write(place, [tensor], [output], moves_only=False)
    count = target.numel()
    check_same_count(source, count * place.size, "reduce_scatter_single", "input", f"{place.size} times `output`")
    inputs = separate(_split(source, [count] * place.size), (target,), (place.rank, 0))
    operation = Operation(Kind.REDUCE_SCATTER, inputs, (target,), reduce_op, factor=factor)
    return Lowered(operation, copies.finish(), [output], [tensor])


def all_to_all(place: Place, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> Lowered:
    check_num_tensors(outputs, place.size, "all_to_all", "output_tensor_list")
    check_num_tensors(tensors, place.size, "all_to_all", "input_tensor_list")
    copies, dense = _read_and_write(place, tensors, outputs)
    sources, targets = dense[: place.size], dense[place.size :]
    return Lowered(_all_to_all(place, sources, targets), copies.finish(), outputs, tensors)


def all_to_all_single(
    place: Place, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Lowered:
    """Splits are lengths along the first dimension, one for each rank; empty splits mean equal parts."""
    copies, (source, target) = _read_and_write(place, [tensor], [output])
    sources = _split(source, _counts(tensor, source, input_splits, place.size, "input"))
    targets = _split(target, _counts(output, target, output_splits, place.size, "output"))
    return Lowered(_all_to_all(place, sources, targets), copies.finish(), [output], [tensor])


def barrier() -> Lowered:
    return Lowered(Operation(Kind.BARRIER), None, [], ())


def _all_to_all(place: Place, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Operation:
    mine = f"the part for this rank, {place.rank},"
    check_same_count(targets[place.rank], sources[place.rank].numel(), "all_to_all", "output", mine)
    return Operation(Kind.ALL_TO_ALL, separate(sources, targets), tuple(targets))


def _read_and_write(
    place: Place, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], moves_only: bool = True
) -> tuple[Copies, list[torch.Tensor]]:
    copies = Copies(place.staged, moves_only)
    count = len(tensors)
    both = same_kind([*tensors, *outputs])
    return copies, [copies.read(each) for each in both[:count]] + [copies.write(each) for each in both[count:]]


def _split(tensor: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.view(-1).split(list(counts)))


def _counts(given: torch.Tensor, dense: torch.Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    if given.dim() == 0:
        raise ConfigError(f"all_to_all_single: `{name}` has no dimension to split; it needs at least one")
    rows = given.shape[0]
    if len(splits) == 0:
        if rows % size:
            raise ConfigError(
                f"all_to_all_single: dimension 0 of `{name}` has length {rows}, which {size} ranks cannot divide "
                f"equally; pass {name}_split_sizes"
            )
        splits = [rows // size] * size
    splits = [whole_number(split, f"{name}_split_sizes") for split in splits]  # also those of numpy and torch
    if len(splits) != size:
        raise ConfigError(f"Number of tensor splits not equal to group size: {len(splits)} {name} splits, {size} ranks")
    if sum(splits) != rows or min(splits) < 0:
        raise ConfigError(f"Split sizes doesn't match total dim 0 size: {list(splits)} of `{name}` of length {rows}")
    row = dense.numel() // rows if rows else 0
    return [split * row for split in splits]


# Valid combinations; by number, since the hash of an enum member is slow.
_reducible: set[tuple[int, torch.dtype]] = set()


def _check_reduces(op: ReduceOp, tensor: torch.Tensor, what: str) -> None:
    key = (op._value_, tensor.dtype)
    if key in _reducible:
        return
    problem = unsupported(op, tensor.dtype)
    if problem is not None:
        raise ConfigError(f"{what} does not support this: {problem}")
    _reducible.add(key)


def _check_one_dtype(what: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.dtype is not tensor.dtype:
        raise ConfigError(f"{what}: the output's dtype is {output.dtype}, but the input's is {tensor.dtype}")
