"""`Job`: one operation of a group on its way through the engine, and what its transport may ask while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

import torch

from rpcdist.collectives._group.callbacks import Callbacks
from rpcdist.collectives._group.flight_records import Record
from rpcdist.collectives._group.group_failure import FailureKind, GroupFailure
from rpcdist.collectives._group.state import GroupState
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation
from rpcdist.collectives._transports.transport_base import Control
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, listed

MAX_SHAPES: Final = 8
"""So many shapes an error names."""


class JobHost(Protocol):
    """The part of the engine that a job needs."""

    @property
    def state(self) -> GroupState: ...

    @property
    def wakeup_fd(self) -> int: ...

    @property
    def callbacks(self) -> Callbacks: ...

    def fail_everywhere(self, failure: GroupFailure) -> GroupFailure: ...


class OperationTitle:
    """The name of an operation, put together only when somebody reads it: most operations never fail."""

    __slots__ = ("_group", "_kind", "_sequence")

    def __init__(self, kind: Kind, sequence: int, group: str) -> None:
        self._kind = kind
        self._sequence = sequence
        self._group = group

    def __str__(self) -> str:
        return f"{self._kind.title} #{self._sequence} of group {self._group!r}"


class Job(Control):
    """One operation: its number, deadline and Work, and the control of its transport.

    Attributes:
        name: what it is; `title` is the same as text.
        operation: its tensors and kind.
        finish: called once when the transport is done, before the Work is.
        record: its entry in the flight recorder.
        work: what the caller waits for.
    """

    __slots__ = ("_host", "deadline", "fingerprint", "finish", "name", "operation", "record", "sequence", "work")

    def __init__(
        self,
        host: JobHost,
        operation: Operation,
        sequence: int,
        deadline: Deadline,
        finish: Callable[[], None] | None,
        record: Record,
        result: list[torch.Tensor] | None,
    ) -> None:
        self._host = host
        self.operation = operation
        self.sequence = sequence
        self.deadline = deadline
        self.finish = finish
        self.record = record
        self.name = OperationTitle(operation.kind, sequence, host.state.group)
        self.work = Work(self.name, result, callbacks=host.callbacks)

    @property
    def title(self) -> str:
        return str(self.name)

    @property
    def wakeup_fd(self) -> int:
        return self._host.wakeup_fd

    def error_of(self, failure: GroupFailure) -> CollectiveError:
        """The error of what failed in this operation. The ranks compare sizes only; of a mismatch, shapes are added."""
        tensors = self.operation.inputs or self.operation.outputs
        if failure.kind is FailureKind.MISMATCH and tensors:
            shapes = listed((tuple(tensor.shape) for tensor in tensors), MAX_SHAPES)
            failure = replace(failure, reason=f"{failure.reason}; the shapes on this rank: {shapes}")
        return failure.error(self.title)

    def check(self) -> None:
        state = self._host.state
        if state.failure is not None:
            raise state.failure.error(self.title)
        if state.departed:
            departure = state.departure_before(self.sequence)
            if departure is not None:
                raise self._host.fail_everywhere(departure).error(self.title)


_DTYPE_NAMES: Final[dict[torch.dtype | None, str]] = {
    None: "",
    **{dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES},
}


def record_of(group: str, sequence: int, operation: Operation) -> Record:
    """The entry of an operation in the flight recorder."""
    reads, writes = operation.inputs, operation.outputs
    inputs = [tensor.numel() for tensor in reads]
    outputs = inputs if writes is reads else [tensor.numel() for tensor in writes]
    dtype, op = operation.dtype, operation.reduce_op
    return Record(
        group, sequence, operation.kind.title, _DTYPE_NAMES[dtype], inputs, outputs, "" if op is None else op.name
    )
