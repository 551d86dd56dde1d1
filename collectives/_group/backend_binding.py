"""`BackendBinding`: one group's operations on the tensors of one device type, and the backend that carries them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.collectives._group.operation_hooks import HookOpName, OperationHooks, hook_name
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.dense import Copies, is_ready
from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives._operations.sparse_all_reduce import all_reduce_sparse
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError

MAX_TAG = 2**31 - 1


class BackendBinding:
    """Hands the operations of a group to the backend that its tensors' device type needs.

    Attributes:
        backend: carries the operations out.
        place: rank and size of the group, and whether tensors are staged in CPU memory; for lowering.
        timeout_s: limit of operations that bring none; None for the backend's own.
        hooks: called around each operation; None when there are none.
    """

    __slots__ = ("backend", "hooks", "place", "timeout_s")

    def __init__(self, backend: GroupBackend, place: Place) -> None:
        self.backend = backend
        self.place = place
        self.timeout_s: float | None = None
        self.hooks: OperationHooks | None = None

    def run(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work | None:
        """Carries out an operation; returns Work if it is asynchronous, as the functions of torch do."""
        work = self.submit(lowered, async_op, timeout_s)
        return work if async_op else None

    def submit(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work:
        """Carries out an operation, and returns its Work in either case."""
        if self.hooks is None:
            return self.carry_out(lowered, async_op, timeout_s)
        operation, _, result, given = lowered
        outputs = [] if operation.inputs is operation.outputs else result
        return self.hooks.around(
            hook_name(operation),
            async_op,
            list(given),
            outputs,
            operation.root,
            lambda: self.carry_out(lowered, async_op, timeout_s),
        )

    def carry_out(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work:
        """The same without hooks, for a part of what a caller asked for."""
        operation, finish, result, _ = lowered
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        work = self.backend.submit(operation, asynchronous=async_op, timeout_s=limit_s, finish=finish, result=result)
        return self._limited(work, limit_s)

    def _limited(self, work: Work, limit_s: float | None) -> Work:
        work.limit_s = self.backend.context.timeout_s if limit_s is None else limit_s
        return work

    def all_reduce(self, tensor: torch.Tensor, op: object, async_op: bool, timeout_s: float | None = None) -> Work:
        """`all_reduce` of a dense or sparse tensor: the only operation that takes sparse ones."""
        if not tensor.is_sparse:
            return self.submit(lowering.all_reduce(self.place, tensor, op), async_op, timeout_s)

        def carry_out(lowered: Lowered, asynchronous: bool) -> Work:
            return self.carry_out(lowered, asynchronous, timeout_s)

        def run() -> Work:
            run_part = self.backend.here().run_part if self.backend.runs_parts else None
            return all_reduce_sparse(self.place, tensor, op, async_op, carry_out, run_part)

        return run() if self.hooks is None else self.hooks.around(HookOpName.ALLREDUCE, async_op, [tensor], [], -1, run)

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: object, async_op: bool) -> list[Work]:
        """`all_reduce` of dense tensors of one dtype that share no memory, in as few operations as the backend can."""
        if len(tensors) > 1 and self.backend.reduces_many:
            return [self.submit(lowering.all_reduce_many(self.place, tensors, op), async_op)]
        return [self.all_reduce(tensor, op, async_op) for tensor in tensors]

    def send(self, tensor: torch.Tensor, peer: int, tag: int, asynchronous: bool = True) -> Work:
        """Sends to a rank of the group, or starts to."""
        tag = self._checked_tag(peer, tag, "destination")
        if self.hooks is None:
            return self._send(tensor, peer, tag, asynchronous)
        return self.hooks.around(
            HookOpName.SEND, True, [tensor], [], peer, lambda: self._send(tensor, peer, tag, asynchronous)
        )

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, asynchronous: bool) -> Work:
        dense = tensor if is_ready(tensor) else Copies(self.place.staged, moves_only=True).read(tensor)
        work = self.backend.send(dense, peer, tag, asynchronous=asynchronous, timeout_s=self.timeout_s)
        return self._limited(work, self.timeout_s)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, asynchronous: bool = True) -> Work:
        """Receives from a rank of the group, or starts to; from whichever sends first when `peer` is None."""
        tag = self._checked_tag(peer, tag, "source")
        if self.hooks is None:
            return self._recv(tensor, peer, tag, asynchronous)
        source = -1 if peer is None else peer
        return self.hooks.around(
            HookOpName.RECV, True, [], [tensor], source, lambda: self._recv(tensor, peer, tag, asynchronous)
        )

    def _recv(self, tensor: torch.Tensor, peer: int | None, tag: int, asynchronous: bool) -> Work:
        limit_s, dense, finish = self.timeout_s, tensor, None
        if not is_ready(tensor):
            copies = Copies(self.place.staged, moves_only=True)
            dense, finish = copies.write(tensor), copies.finish()
        work = self.backend.recv(dense, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, finish=finish)
        return self._limited(work, limit_s)

    def _checked_tag(self, peer: int | None, tag: int, role: str) -> int:
        """The tag; raises for one that is wrong, and for a wrong peer."""
        if type(tag) is not int:
            tag = whole_number(tag, "tag")
        if not 0 <= tag <= MAX_TAG:
            raise ConfigError(f"Tag must be nonnegative and below 2**31, not {tag}")
        if peer is None:
            return tag
        rank, size, _ = self.place
        if not 0 <= peer < size:
            raise ConfigError(f"Invalid {role} rank {peer}: the group's ranks are 0 to {size - 1}")
        if peer == rank:
            raise ConfigError(
                f"Invalid {role} rank: {role} rank should not be the same as the rank of the current process."
            )
        return tag
