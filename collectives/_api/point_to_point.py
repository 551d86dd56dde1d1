"""Messages between two ranks: `send`, `recv` and their asynchronous and batched forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from rpcdist.collectives._api.group_queries import get_rank
from rpcdist.collectives._group.world import Group, group_or_default, member_group, resolve_group_rank
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.operation import (
    ReduceOp,
    check_num_tensors,
    check_same_dtype,
    check_tensor,
    check_tensor_list,
)
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError, begins_traceback

__all__ = [
    "P2POp", "all_gather_coalesced", "all_reduce_coalesced", "batch_isend_irecv", "irecv", "isend", "recv", "send",
]  # fmt: skip

Future = torch.futures.Future


@begins_traceback
def isend(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | None:
    """Starts to send a tensor, which must not be changed until the returned Work is done.

    Args:
        tensor: any tensor; it is copied if it is not contiguous.
        dst: the receiver's rank in the world.
        group: the default group by default.
        tag: must equal the tag of the receive.
        group_dst: the receiver's rank in the group, instead of `dst`.
    """
    check_tensor(tensor, "tensor")
    pg = member_group(group, "isend")
    if pg is None:
        return None
    return pg.binding(tensor.device.type).send(tensor, resolve_group_rank(pg, dst, group_dst), tag)


@begins_traceback
def irecv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work | None:
    """Starts to receive into a tensor, which must not be used until the returned Work is done.

    Args:
        tensor: a tensor with the size and dtype of the one that is sent.
        src: the sender's rank in the world; without it and `group_src`, the first rank that sends.
        group: the default group by default.
        tag: must equal the tag of the send.
        group_src: the sender's rank in the group, instead of `src`.
    """
    check_tensor(tensor, "tensor")
    pg = member_group(group, "irecv")
    return None if pg is None else _recv(pg, tensor, src, tag, group_src, asynchronous=True)


@begins_traceback
def send(
    tensor: torch.Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Sends a tensor, and returns when it may be changed again; the arguments are those of `isend`."""
    check_tensor(tensor, "tensor")
    pg = member_group(group, "isend")
    if pg is not None:
        peer = resolve_group_rank(pg, dst, group_dst)
        pg.binding(tensor.device.type).send(tensor, peer, tag, asynchronous=False).wait()


@begins_traceback
def recv(
    tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receives into a tensor; the arguments are those of `irecv`.

    Returns:
        The sender's rank in the world; -1 on a rank outside the group.
    """
    check_tensor(tensor, "tensor")
    pg = member_group(group, "irecv")
    if pg is None:
        return -1
    work = _recv(pg, tensor, src, tag, group_src, asynchronous=False)
    work.wait()
    if src is not None:
        return src
    return pg.world_rank(work.source_rank() if group_src is None else group_src)


def _recv(
    pg: ProcessGroup, tensor: torch.Tensor, src: int | None, tag: int, group_src: int | None, *, asynchronous: bool
) -> Work:
    from_any = src is None and group_src is None
    peer = None if from_any else resolve_group_rank(pg, src, group_src)
    return pg.binding(tensor.device.type).recv(tensor, peer, tag, asynchronous)


class P2POp:
    """One send or receive of a batch.

    Args:
        op: `isend` or `irecv`.
        tensor: the tensor to send, or to receive into.
        peer: the peer's rank in the world.
        group: the default group by default.
        tag: equal for the send and its receive.
        group_peer: the peer's rank in the group, instead of `peer`.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            # Scripts mix the imports of torch and of this package.
            theirs = {getattr(torch.distributed, ours.__name__, None): ours for ours in (isend, irecv)}
            if op not in theirs:
                raise ConfigError(f"Invalid ``op``. Expected ``op`` to be ``isend`` or ``irecv``, not {op!r}.")
            op = theirs[op]
        check_tensor(tensor, "tensor")
        self.op = op
        self.tensor = tensor
        self.group = group_or_default(group)
        self.group_peer = resolve_group_rank(self.group, peer, group_peer)
        self.peer = self.group.world_rank(self.group_peer)
        self.tag = tag

    def __repr__(self) -> str:
        me, name = get_rank(self.group), self.op.__name__
        source, target = (me, self.group_peer) if self.op is isend else (self.group_peer, me)
        return (
            f"P2POp({name} pg={self.group.group_name}, group_src={source}, group_dst={target}, "
            f"{self.tensor.shape}, {self.tensor.dtype})"
        )


@begins_traceback
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts several sends and receives of one group together; the ranks may list them in different orders.

    Returns:
        One Work for each of them.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(each, P2POp) for each in p2p_op_list):
        raise ConfigError("Invalid ``p2p_op_list``. Each op is expected to be of type ``P2POp``.")
    if not p2p_op_list:
        raise ConfigError("Invalid ``p2p_op_list``. It is empty.")
    pg = p2p_op_list[0].group
    if not all(each.group is pg for each in p2p_op_list):
        raise ConfigError("All ops need to use the same group.")
    backends = {id(each): each for each in (pg.backend(op.tensor.device) for op in p2p_op_list)}.values()
    for backend in backends:
        backend.start_batch()
    try:
        return [_start(each) for each in p2p_op_list]
    finally:
        for backend in backends:
            backend.end_batch()


def _start(one: P2POp) -> Work:
    binding = one.group.binding(one.tensor.device.type)
    start = binding.send if one.op is isend else binding.recv
    return start(one.tensor, one.group_peer, one.tag)


# -------------------------------------------- deprecated functions on several tensors at once, which torch keeps


@begins_traceback
def all_reduce_coalesced(
    tensors: list[torch.Tensor] | torch.Tensor, op: object = ReduceOp.SUM, group: Group = None, async_op: bool = False
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
        raise ConfigError("all_reduce_coalesced: `tensors` is empty; pass at least one tensor")
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
    """`all_gather` of several tensors; `output_tensor_lists[i][k]` gets `input_tensor_list[k]` of rank i."""
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
    # Operations end in the order of the calls, so the last one is done after all others.
    return works[-1].get_future()


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"`{name}` is deprecated; please use `{instead}`", FutureWarning, stacklevel=4)
