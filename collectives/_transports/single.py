"""The transport of a group of one rank: every operation is at most a copy."""

from __future__ import annotations

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._transports.transport_base import Control, Transport


class SingleRankTransport(Transport):
    """Runs the operations of a group of size 1."""

    rank = 0
    size = 1

    def run(self, operation: Operation, control: Control) -> None:
        for output, source in zip(operation.outputs, operation.inputs, strict=True):
            if output.data_ptr() != source.data_ptr():
                output.copy_(source.view_as(output))
            if operation.reduce_op is not None:
                reduce_kernels.premultiply(operation, output)

    def close(self) -> None:
        """Does nothing: nothing is open."""
