"""Deprecated functions on several tensors at once; `torch.distributed` keeps them, and so do we."""

from __future__ import annotations

import warnings

import torch

from rpcdist.collectives._group.world import Group, member_group
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.checks import check_num_tensors, check_same_dtype, check_tensor_list
from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError, begins_traceback

__all__ = ["all_gather_coalesced", "all_reduce_coalesced"]

Future = torch.futures.Future


@begins_traceback
def all_reduce_coalesced(
    tensors: list[torch.Tensor] | torch.Tensor,
    op: object = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Future[list[torch.Tensor]] | None:
    """`all_reduce` of several tensors of one dtype in one operation; with `async_op` it returns a future, not Work."""
    _deprecated("all_reduce_coalesced", "all_reduce")
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    check_tensor_list(tensors, "tensor")
    check_same_dtype(tensors)
    pg = member_group(group, "all_reduce_coalesced")
    if pg is None:
        return None
    if not tensors:
        raise ConfigError("all_reduce_coalesced: `tensors` is empty; give at least one tensor")
    binding = pg.binding(tensors[0].device.type)
    work = binding.submit(lowering.all_reduce_coalesced(binding.place, tensors, op), async_op)
    return work.get_future() if async_op else None


@begins_traceback
def all_gather_coalesced(
    output_tensor_lists: list[list[torch.Tensor]],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Future[list[torch.Tensor]] | None:
    """`all_gather` of several tensors; `output_tensor_lists[i][k]` is what rank i passed as `input_tensor_list[k]`."""
    _deprecated("all_gather_coalesced", "all_gather")
    pg = member_group(group, "all_gather_coalesced")
    if pg is None:
        return None
    check_tensor_list(input_tensor_list, "input_tensor_list")
    if not isinstance(output_tensor_lists, list):
        raise TypeError("Invalid function argument: output_tensor_lists should be a list")
    for outputs in output_tensor_lists:
        check_tensor_list(outputs, "output_tensor_lists")
        check_num_tensors(outputs, len(input_tensor_list), "all_gather_coalesced", "output_tensor_lists[i]")
    works: list[Work] = []
    for index, tensor in enumerate(input_tensor_list):
        outputs = [each[index] for each in output_tensor_lists]
        check_same_dtype([tensor, *outputs])
        binding = pg.binding(tensor.device.type)
        works.append(binding.submit(lowering.all_gather(binding.place, outputs, tensor), async_op))
    if not async_op:
        return None
    if not works:
        return Work.finished("all_gather_coalesced of nothing").get_future()
    # In the order of the calls, so the last one is done after all others.
    return works[-1].get_future()


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"`{name}` is deprecated; please use `{instead}`", FutureWarning, stacklevel=4)
