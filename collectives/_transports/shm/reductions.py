"""ALL_REDUCE, REDUCE and REDUCE_SCATTER on shared memory.

Two ways, chosen by size and number of ranks:

- directly: every rank publishes a piece, and each that wants the result reduces all ranks' pieces. One meeting a
  piece, n times the arithmetic. For two ranks it touches memory least; for small messages meetings are what counts.
- in two phases: every rank publishes a chunk, reduces its own share of it, publishes that, and takes the others'. A
  step publishes chunk k and the reduced shares of chunk k - 1, so that there is one meeting a chunk, too.

Everybody folds in the order of the ranks: all get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rpcdist.collectives._operations.operation import Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel, premultiply_to, reducer
from rpcdist.collectives._transports.base import Control
from rpcdist.collectives._transports.shm.rank_buffers import Buffers, copy, one_thread
from rpcdist.collectives._transports.shm.routes import Publish, Route, num_steps, shares, span, two_phase_chunk
from rpcdist.collectives._transports.shm.segment_layout import ALIGNMENT, Layout
from rpcdist.collectives._transports.shm.signals import Signals
from rpcdist.collectives._transports.shm.size_tables import Tables

__all__ = ["DIRECT_BYTES", "Reductions"]

DIRECT_BYTES: Final = 32 << 10
"""Up to this size more than two ranks reduce directly."""
_QUIET_BYTES: Final = 32 << 10
"""Up to so many bytes torch uses one thread anyway, whatever the dtype."""
_MAX_PROGRAMS: Final = 256
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM


@dataclass(frozen=True, slots=True)
class _Program:
    """What reducing tensors of one dtype and length in one piece needs, looked up once."""

    how: ReduceKernel
    plain: bool
    num_bytes: int
    views: list[list[torch.Tensor]]


class Reductions:
    """One rank's reducing operations.

    Args:
        rank: of this process.
        layout: of the segment.
        buffers: of all ranks.
        signals: of this group.
    """

    def __init__(self, rank: int, layout: Layout, buffers: Buffers, signals: Signals) -> None:
        self._rank = rank
        self._size = layout.size
        self._buffer_bytes = layout.buffer_bytes
        self._buffers = buffers
        self._signals = signals
        self._direct_bytes = self._buffer_bytes if self._size == 2 else min(DIRECT_BYTES, self._buffer_bytes)
        self._quiet_bytes = min(_QUIET_BYTES, self._direct_bytes)
        self._programs: dict[tuple[int, torch.dtype, int], _Program] = {}

    def close(self) -> None:
        """Lets go of the memory."""
        self._programs.clear()

    def run(self, operation: Operation, control: Control, root: int | None) -> None:
        """ALL_REDUCE, or REDUCE to `root`."""
        tensor = operation.outputs[0]
        quiet = tensor.nbytes <= self._quiet_bytes
        if quiet and not (tensor.requires_grad or tensor.is_inference()):
            self._one_piece(operation, control, root)
            return
        with torch.inference_mode(), one_thread():
            if tensor.nbytes <= self._direct_bytes:
                self._one_piece(operation, control, root)
            elif self._size == 2:
                self._many_pieces(operation, control, root)
            else:
                self._two_phases(operation, control, root)

    # ------------------------------------------------------------ directly

    def _program(self, operation: Operation, tensor: torch.Tensor) -> _Program:
        op = operation.reduce_op
        key = (id(op), tensor.dtype, tensor.numel())  # the members of an enum live for ever, and hash slowly
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._make_program(operation, tensor)
        return program

    def _make_program(self, operation: Operation, tensor: torch.Tensor) -> _Program:
        how = _how(operation, tensor)
        count = tensor.nbytes // how.dtype.itemsize
        return _Program(how, how.dtype is tensor.dtype, tensor.nbytes, self._buffers.views(how.dtype, 0, count))

    def _one_piece(self, operation: Operation, control: Control, root: int | None) -> None:
        """This is the path on which microseconds count."""
        tensor = operation.outputs[0]
        program = self._program(operation, tensor)
        rank = self._rank
        half = self._signals.advance()
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, tensor.view(-1), half, 0)
        else:
            copy(self._buffers.address[half][rank], tensor.data_ptr(), program.num_bytes)
        self._signals.meet(control)
        if (root is None or root == rank) and program.num_bytes:
            self._fold(program.how, program.views[half], _flat(tensor, program.how, program.plain))

    def _many_pieces(self, operation: Operation, control: Control, root: int | None) -> None:
        tensor = operation.outputs[0]
        how = _how(operation, tensor)
        takes = root is None or root == self._rank
        premultiplied = operation.reduce_op is _PREMUL_SUM
        count = self._buffer_bytes // how.dtype.itemsize
        raw = tensor.view(-1).split(self._buffer_bytes // tensor.itemsize)
        for index, piece in enumerate(_flat(tensor, how).split(count)):
            half = self._signals.advance()
            views = self._buffers.views(how.dtype, 0, piece.numel())[half]
            if premultiplied:
                self._publish_product(operation, raw[index], half, 0)
            elif root is None or not takes:
                copy(self._buffers.address[half][self._rank], piece.data_ptr(), piece.nbytes)
            self._signals.meet(control)
            if takes:
                self._fold(how, views if premultiplied else self._with_own(views, piece), piece)

    def _publish_product(self, operation: Operation, piece: torch.Tensor, half: int, offset: int) -> None:
        target = self._buffers.views(piece.dtype, offset, piece.numel())[half][self._rank]
        premultiply_to(operation, piece, target)

    def _with_own(self, views: list[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' pieces, of which this rank's own need not be read from its buffer."""
        return [*views[: self._rank], own, *views[self._rank + 1 :]]

    def _fold(self, how: ReduceKernel, pieces: list[torch.Tensor], out: torch.Tensor) -> None:
        """out = the reduction of all pieces, in order. Of the pieces, only the first two may be `out`."""
        combine = how.combine
        combine(pieces[0], pieces[1], out)
        for piece in pieces[2:]:
            combine(out, piece, out)
        if how.finish is not None:
            how.finish(out, self._size)

    # ------------------------------------------------------------ in two phases

    def _two_phases(self, operation: Operation, control: Control, root: int | None) -> None:
        tensor = operation.outputs[0]
        chunk = two_phase_chunk(self._size, self._buffer_bytes)
        raw = tensor.view(-1).split(chunk // tensor.itemsize)
        how = _how(operation, tensor)
        flat = _flat(tensor, how).split(chunk // how.dtype.itemsize)
        takes = root is None or root == self._rank
        for index in range(len(flat) + 1):
            half = self._signals.advance()
            if index < len(flat):
                self._publish_chunk(operation, raw[index], half)
            if index:
                self._publish_share(operation, how, flat[index - 1], half, chunk)
            self._signals.meet(control)
            if index and takes:
                self._take_shares(flat[index - 1], half, chunk)

    def _shares(self, piece: torch.Tensor) -> list[tuple[int, int]]:
        return shares(piece.numel(), self._size, ALIGNMENT // piece.itemsize)

    def _publish_chunk(self, operation: Operation, piece: torch.Tensor, half: int) -> None:
        """All of it but this rank's own share, which only this rank reads, from the tensor itself."""
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, piece, half, 0)
            return
        start, stop = (position * piece.itemsize for position in self._shares(piece)[self._rank])
        source, target = piece.data_ptr(), self._buffers.address[half][self._rank]
        copy(target, source, start)
        copy(target + stop, source + stop, piece.nbytes - stop)

    def _publish_share(
        self, operation: Operation, how: ReduceKernel, piece: torch.Tensor, half: int, chunk: int
    ) -> None:
        start, stop = self._shares(piece)[self._rank]
        if start == stop:
            return
        pieces = self._buffers.views(how.dtype, start * piece.itemsize, stop - start)[1 - half]
        if operation.reduce_op is not _PREMUL_SUM:
            pieces = self._with_own(pieces, piece[start:stop])
        self._fold(how, pieces, self._buffers.views(how.dtype, chunk, stop - start)[half][self._rank])

    def _take_shares(self, piece: torch.Tensor, half: int, chunk: int) -> None:
        target, width = piece.data_ptr(), piece.itemsize
        for address, (start, stop) in zip(self._buffers.address[half], self._shares(piece), strict=True):
            copy(target + start * width, address + chunk, (stop - start) * width)

    # ------------------------------------------------------------ REDUCE_SCATTER

    def reduce_scatter(self, operation: Operation, control: Control, path: Route, tables: Tables) -> None:
        """Directly, since every rank reduces only what is its own."""
        with torch.inference_mode(), one_thread():
            self._reduce_scatter(operation, control, path, tables)

    def _reduce_scatter(self, operation: Operation, control: Control, path: Route, tables: Tables) -> None:
        publishes = path.publishes
        if self._stages_own(operation):
            publishes = (*publishes, Publish(self._rank, self._own_offset(path)))
        step, steps = 0, 1
        while step < steps:
            half = self._signals.advance()
            self._publish_pieces(operation, publishes, step, path.piece_bytes, half)
            if step == 0:
                tables.publish(half, operation)
            self._signals.meet(control)
            if step == 0:
                steps = num_steps(tables.agree(half, operation), path.piece_bytes)
            self._fold_own(operation, path, step, half)
            step += 1

    def _own_offset(self, path: Route) -> int:
        return self._rank * path.piece_bytes

    def _stages_own(self, operation: Operation) -> bool:
        """Whether this rank's input goes through its buffer: it is multiplied, or overwritten before it is read."""
        in_place = operation.outputs[0].data_ptr() == operation.inputs[self._rank].data_ptr()
        return operation.reduce_op is _PREMUL_SUM or (in_place and self._rank > 1)

    def _publish_pieces(
        self, operation: Operation, publishes: tuple[Publish, ...], step: int, piece_bytes: int, half: int
    ) -> None:
        buffer = self._buffers.address[half][self._rank]
        for publish in publishes:
            tensor = operation.inputs[publish.source]
            start, stop = span(step, piece_bytes, tensor.nbytes)
            if start == stop:
                continue
            if operation.reduce_op is _PREMUL_SUM:
                piece = tensor.view(-1)[start // tensor.itemsize : stop // tensor.itemsize]
                self._publish_product(operation, piece, half, publish.offset)
            else:
                copy(buffer + publish.offset, tensor.data_ptr() + start, stop - start)

    def _fold_own(self, operation: Operation, path: Route, step: int, half: int) -> None:
        """Reduces a piece of what belongs to this rank; it lies at the same place in every rank's buffer."""
        output = operation.outputs[0]
        start, stop = span(step, path.piece_bytes, output.nbytes)
        if start == stop:
            return
        how = _how(operation, output)
        part = slice(start // how.dtype.itemsize, stop // how.dtype.itemsize)
        pieces = self._buffers.views(how.dtype, self._own_offset(path), part.stop - part.start)[half]
        if not self._stages_own(operation):
            pieces = self._with_own(pieces, _flat(operation.inputs[self._rank], how)[part])
        self._fold(how, pieces, _flat(output, how)[part])


def _how(operation: Operation, tensor: torch.Tensor) -> ReduceKernel:
    assert operation.reduce_op is not None
    return reducer(operation.reduce_op, tensor.dtype)


def _flat(tensor: torch.Tensor, how: ReduceKernel, plain: bool = False) -> torch.Tensor:
    """The tensor as a run of elements of the dtype in which it is reduced."""
    if plain and tensor.dim() == 1:
        return tensor
    return tensor.view(-1).view(how.dtype)
