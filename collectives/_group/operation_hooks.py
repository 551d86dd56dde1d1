"""Hooks: functions that a group calls around each operation; names and arguments are those of torch 2.14."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch

from rpcdist.collectives._operations.operation import Kind
from rpcdist.collectives.work import Work

logger = logging.getLogger(__name__)


class HookOpName(IntEnum):
    """The kinds of operation in the arguments of hooks, with torch's numbers."""

    SEND = 0
    RECV = 1
    BROADCAST = 2
    ALLREDUCE = 3
    REDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    SCATTER = 9
    GATHER = 10
    SPLIT = 11
    NEW_WINDOW = 12
    UNKNOWN = 13

    __str__ = Enum.__str__  # "HookOpName.SEND", as torch's


HOOK_NAMES = {kind: HookOpName[kind.name.replace("ALL_", "ALL").replace("ALLTO_", "ALLTO")] for kind in Kind}


@dataclass(frozen=True, slots=True)
class PreHookArgs:
    """The argument of a pre-hook, which is called before an operation starts.

    Attributes:
        name: the kind of operation.
        async_op: whether the caller gets Work to wait for; always true for messages.
        input_tensors: the caller's inputs, which an operation in place also writes to.
        output_tensors: the caller's outputs; empty for an operation in place.
        root: the rank of the root or peer in the group; -1 if the operation has none.
        op_id: equal for the post-hooks of the operation.
    """

    name: HookOpName
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int
    op_id: int


@dataclass(frozen=True, slots=True)
class PostHookArgs:
    """The argument of a post-hook, called when an asynchronous operation has begun or a blocking one has ended."""

    name: HookOpName
    async_op: bool
    work: Work | None
    op_id: int


class OperationHooks:
    """The hooks of one group. Any thread may change them while others run operations.

    Attributes:
        pre: called before each operation, by the id of each.
        post: called after it.
    """

    def __init__(self) -> None:
        self.pre: dict[int, Callable[[PreHookArgs], object]] = {}
        self.post: dict[int, Callable[[PostHookArgs], object]] = {}
        self._ids = itertools.count()

    def around(
        self,
        name: HookOpName,
        async_op: bool,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        root: int,
        run: Callable[[], Work],
    ) -> Work:
        """Runs an operation between the pre-hooks and the post-hooks; a hook's error propagates to the caller."""
        op_id = next(self._ids)  # threads may run operations at the same time
        for pre in list(self.pre.values()):
            pre(PreHookArgs(name, async_op, inputs, outputs, root, op_id))
        work = run()
        for post in list(self.post.values()):
            post(PostHookArgs(name, async_op, work, op_id))
        return work


def run_abort_hooks(hooks: dict[int, Callable[[], object]], group: str) -> None:
    """Calls each hook once and forgets it, since a group fails only once. Logs errors of hooks."""
    for hook_id in list(hooks):
        hook = hooks.pop(hook_id, None)
        if hook is None:
            continue  # another thread has called it
        try:
            hook()
        except Exception:
            logger.exception("abort hook %d of group %r failed", hook_id, group)
