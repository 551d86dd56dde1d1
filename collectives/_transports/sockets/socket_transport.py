"""`SocketTransport`: the collective operations of a group over sockets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from rpcdist.collectives._algorithms.choose import plan_for
from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.dense import copy_bytes
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._transports.rank_waits import Pollers, SpinPolicy, ranks_here
from rpcdist.collectives._transports.sockets.pair_connections import OperationFrame, PairConnections
from rpcdist.collectives._transports.sockets.pair_exchange import PairExchange
from rpcdist.collectives._transports.sockets.plan_runner import PlanBuffer, PlanRunner, Scratch
from rpcdist.collectives._transports.transport_base import Control, Transport
from rpcdist.transport.sockets import SocketHub

_INPUT_SLOT, _RESULT_SLOT, _SECOND_SLOT = 0, 1, 2


class SocketTransport(Transport):
    """Runs a plan between the ranks for each operation. It connects when the first operation needs it.

    Args:
        hub: the hub of this process; stays open until the transport is closed.
        group_name: a name that is the same on all ranks, and that no other open transport has.
        addresses: `SocketHub.address` of every rank.
        unix: True for Unix sockets, False for TCP; None takes Unix sockets where ranks share a host.
        sockets_per_pair: how many connections two ranks use for large messages, the same on all ranks; None takes 4
            between hosts.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hub: SocketHub,
        group_name: str,
        addresses: Sequence[str],
        unix: bool | None = None,
        sockets_per_pair: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._connections = PairConnections(rank, hub, group_name, addresses, unix, sockets_per_pair)
        self._scratch = Scratch()
        self._pollers = Pollers()
        self._spin_policy = SpinPolicy(ranks_here(rank, addresses))
        self._pair_exchange = PairExchange(rank, size, self._connections, self._pollers, self._spin_policy)
        self._buffers: dict[Kind, Callable[[Operation], list[torch.Tensor]]] = {
            Kind.ALL_REDUCE: self._for_all_reduce,
            Kind.REDUCE: self._for_reduce,
            Kind.BROADCAST: lambda operation: [operation.outputs[0]],
            Kind.ALL_GATHER: self._for_all_gather,
            Kind.GATHER: self._for_gather,
            Kind.SCATTER: self._for_scatter,
            Kind.REDUCE_SCATTER: self._for_reduce_scatter,
            Kind.ALL_TO_ALL: self._for_all_to_all,
            Kind.BARRIER: lambda operation: [],
        }

    def run(self, operation: Operation, control: Control) -> None:
        if self._pair_exchange.takes(operation):
            self._pair_exchange.run(operation, control)
            return
        op = operation.reduce_op
        reducer = None
        if op is not None:
            assert operation.dtype is not None
            reducer = reduce_kernels.reducer(op, operation.dtype)
        tensors = self._buffers[operation.kind](operation)
        if self.size == 1:
            if op is not None:
                reduce_kernels.finish(op, operation.outputs[0], 1)
            return
        counts, received = self._counts(operation)
        plan = plan_for(
            operation.kind, self.rank, self.size, operation.root, counts,
            1 if operation.dtype is None else operation.dtype.itemsize, received,
        )  # fmt: skip
        detail = zlib.crc32(repr(counts).encode()) if operation.kind is Kind.REDUCE_SCATTER else 0
        frame = OperationFrame(self.rank, control.fingerprint, control.sequence, detail)
        finish = None
        if reducer is not None and reducer.finish is not None:
            make_final = reducer.finish

            def finish(tensor: torch.Tensor) -> object:
                return make_final(tensor, self.size)

        buffers = [PlanBuffer(tensor, reducer) for tensor in tensors]
        PlanRunner(
            self.rank, self._connections, control, frame, buffers, reducer, finish, self._scratch, self._pollers,
            self._spin_policy,
        ).run(plan)  # fmt: skip

    def close(self) -> None:
        self._connections.close()
        self._scratch.clear()
        self._pair_exchange.clear()

    def _counts(self, operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The arguments `counts` and `received` of `plan_for`."""
        inputs, outputs = operation.inputs, operation.outputs
        match operation.kind:
            case Kind.ALL_REDUCE | Kind.REDUCE | Kind.BROADCAST:
                return (outputs[0].numel(),), ()
            case Kind.ALL_GATHER | Kind.GATHER:
                return (inputs[0].numel(),) * self.size, ()
            case Kind.SCATTER:
                return (outputs[0].numel(),) * self.size, ()
            case Kind.REDUCE_SCATTER:
                return tuple(tensor.numel() for tensor in inputs), ()
            case Kind.ALL_TO_ALL:
                return tuple(tensor.numel() for tensor in inputs), tuple(tensor.numel() for tensor in outputs)
        return (), ()

    # ------------------------------------------------------------ buffers, in the order that the plans name them

    def _for_all_reduce(self, operation: Operation) -> list[torch.Tensor]:
        reduce_kernels.premultiply(operation, operation.outputs[0])
        return [operation.outputs[0]]

    def _for_reduce(self, operation: Operation) -> list[torch.Tensor]:
        tensor = operation.outputs[0]
        if self.rank == operation.root:
            reduce_kernels.premultiply(operation, tensor)
            return [tensor, tensor]
        result = self._scratch.get(_RESULT_SLOT, tensor.numel(), tensor.dtype)
        return [self._multiplied(operation, tensor), result]

    def _multiplied(self, operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy that is multiplied by this rank's factor."""
        if operation.reduce_op is not ReduceOp.PREMUL_SUM:
            return tensor
        product = self._scratch.get(_INPUT_SLOT, tensor.numel(), tensor.dtype).view(tensor.shape)
        reduce_kernels.premultiply_to(operation, tensor, product)
        return product

    def _for_all_gather(self, operation: Operation) -> list[torch.Tensor]:
        _copy(operation.inputs[0], operation.outputs[self.rank])
        return list(operation.outputs)

    def _for_gather(self, operation: Operation) -> list[torch.Tensor]:
        if self.rank != operation.root:
            return [operation.inputs[0]] * self.size
        _copy(operation.inputs[0], operation.outputs[self.rank])
        return list(operation.outputs)

    def _for_scatter(self, operation: Operation) -> list[torch.Tensor]:
        if self.rank != operation.root:
            return [operation.outputs[0]] * self.size
        _copy(operation.inputs[self.rank], operation.outputs[0])
        return list(operation.inputs)

    def _for_reduce_scatter(self, operation: Operation) -> list[torch.Tensor]:
        inputs, output = operation.inputs, operation.outputs[0]
        if operation.reduce_op is ReduceOp.PREMUL_SUM:
            copies = [torch.empty_like(tensor) for tensor in inputs]
            for tensor, product in zip(inputs, copies, strict=True):
                reduce_kernels.premultiply_to(operation, tensor, product)
            inputs = tuple(copies)
        if self.size == 1:
            _copy(inputs[0], output)
            return [output]
        largest = max(tensor.numel() for tensor in inputs) if self.size > 2 else 0
        scratch = [self._scratch.get(slot, largest, output.dtype) for slot in (_RESULT_SLOT, _SECOND_SLOT)]
        return [*inputs, output, *scratch]

    def _for_all_to_all(self, operation: Operation) -> list[torch.Tensor]:
        _copy(operation.inputs[self.rank], operation.outputs[self.rank])
        return [*operation.inputs, *operation.outputs]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor's bytes on this thread alone; does nothing when both are the same memory."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"a chunk of {source.nbytes} bytes does not fit one of {target.nbytes}")
    if source.data_ptr() != target.data_ptr():
        copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
