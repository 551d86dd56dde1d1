"""ALL_REDUCE, REDUCE and REDUCE_SCATTER on shared memory.

Two algorithms, chosen by size and number of ranks:

- direct: every rank publishes a slice, and each rank that needs the result reduces the slices of all ranks. One barrier
  per slice, n times the arithmetic. With two ranks it touches memory least; for small messages barriers dominate.
- in two phases: every rank publishes a slice, reduces its own share of it, publishes that, and takes the shares of the
  others. A step publishes slice k and the reduced shares of slice k - 1, so this also has one barrier per slice.

All ranks reduce in rank order, so that all get the same bits.

[Note: halves] Dividing a sum takes a separate pass over memory. Two ranks that average floating-point numbers publish
halves instead: multiplying on the way to the buffer takes as long as copying. Halves are exact, so the bits are the
same, except that numbers next to the smallest are rounded once more, and that large ones cannot overflow. Half
precision has many numbers next to its smallest, so its sums are divided afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rpcdist.collectives._operations.dense import copy_bytes
from rpcdist.collectives._operations.operation import Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel, premultiply_to, reducer
from rpcdist.collectives._transports.shm.routes import (
    ALIGNMENT,
    Layout,
    Publish,
    RankBuffers,
    Route,
    cut,
    num_steps,
    one_thread,
    shares,
    span,
    two_phase_slice_bytes,
)
from rpcdist.collectives._transports.shm.signals import Signals
from rpcdist.collectives._transports.transport_base import Control

DIRECT_BYTES: Final = 32 << 10
"""Up to this size, more than two ranks reduce directly."""
_ONE_THREAD_BYTES: Final = 32 << 10
"""Up to this size torch uses one thread anyway, whatever the dtype."""
_MAX_PREPARED: Final = 256
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM
_AVG: Final = ReduceOp.AVG
_HALVED: Final = frozenset({torch.float32, torch.float64, torch.bfloat16})
"""See [Note: halves]."""


@dataclass(frozen=True, slots=True)
class _PreparedReduction:
    """The kernel and views that reduce tensors of one dtype and length in one slice, looked up once."""

    kernel: ReduceKernel
    plain: bool  # the tensors are reduced in their own dtype
    num_bytes: int
    views: list[list[torch.Tensor]]


class Reductions:
    """One rank's reducing operations."""

    def __init__(self, rank: int, layout: Layout, buffers: RankBuffers, signals: Signals) -> None:
        self._rank = rank
        self._size = layout.size
        self._buffer_bytes = layout.buffer_bytes
        self._buffers = buffers
        self._signals = signals
        self._direct_bytes = self._buffer_bytes if self._size == 2 else min(DIRECT_BYTES, self._buffer_bytes)
        self._one_thread_bytes = min(_ONE_THREAD_BYTES, self._direct_bytes)
        self._prepared: dict[tuple[int, torch.dtype, int], _PreparedReduction] = {}

    def close(self) -> None:
        self._prepared.clear()

    def run(self, operation: Operation, control: Control, root: int | None) -> None:
        """ALL_REDUCE, or REDUCE to `root`."""
        tensor = operation.outputs[0]
        if operation.reduce_op is _AVG and self._size == 2 and tensor.dtype in _HALVED:
            operation = Operation(
                operation.kind, operation.inputs, operation.outputs, _PREMUL_SUM, operation.root, factor=0.5
            )
        several = len(operation.outputs) > 1
        is_small = tensor.nbytes <= self._one_thread_bytes and not several
        if is_small and not (tensor.requires_grad or tensor.is_inference()):
            self._in_one_slice(operation, control, root)
            return
        with torch.inference_mode(), one_thread():
            if tensor.nbytes <= self._direct_bytes and not several:
                self._in_one_slice(operation, control, root)
            elif self._size == 2:
                self._in_slices(operation, control, root)
            else:
                self._two_phases(operation, control, root)

    # ------------------------------------------------------------ directly

    def _prepare(self, operation: Operation, tensor: torch.Tensor) -> _PreparedReduction:
        op = operation.reduce_op
        key = (id(op), tensor.dtype, tensor.numel())  # enum members are never freed, and their hash is slow
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            prepared = self._prepared[key] = self._make_prepared(operation, tensor)
        return prepared

    def _make_prepared(self, operation: Operation, tensor: torch.Tensor) -> _PreparedReduction:
        kernel = _kernel(operation, tensor)
        count = tensor.nbytes // kernel.dtype.itemsize
        return _PreparedReduction(
            kernel, kernel.dtype is tensor.dtype, tensor.nbytes, self._buffers.views(kernel.dtype, 0, count)
        )

    def _in_one_slice(self, operation: Operation, control: Control, root: int | None) -> None:
        """Reduces a small tensor; the path on which microseconds count."""
        tensor = operation.outputs[0]
        prepared = self._prepare(operation, tensor)
        rank = self._rank
        half = self._signals.begin_step()
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, tensor.view(-1), half, 0)
        else:
            copy_bytes(self._buffers.address[half][rank], tensor.data_ptr(), prepared.num_bytes)
        self._signals.synchronise(control)
        if (root is None or root == rank) and prepared.num_bytes:
            self._reduce(prepared.kernel, prepared.views[half], _flat(tensor, prepared.kernel, prepared.plain))

    def _in_slices(self, operation: Operation, control: Control, root: int | None) -> None:
        """Reduces any number of tensors as if they were one."""
        tensors = [tensor.view(-1) for tensor in operation.outputs]
        kernel, width = _kernel(operation, tensors[0]), tensors[0].itemsize
        takes = root is None or root == self._rank
        premultiplied = operation.reduce_op is _PREMUL_SUM
        for pieces in cut(tuple([tensor.numel() for tensor in tensors]), self._buffer_bytes // width):
            parts = [(piece.offset * width, piece.of(tensors[piece.tensor])) for piece in pieces]
            half = self._signals.begin_step()
            buffer = self._buffers.address[half][self._rank]
            for offset, own in parts:
                if premultiplied:
                    self._publish_product(operation, own, half, offset)
                elif root is None or not takes:
                    copy_bytes(buffer + offset, own.data_ptr(), own.nbytes)
            self._signals.synchronise(control)
            for offset, own in parts if takes else ():
                target = own if own.dtype is kernel.dtype else own.view(kernel.dtype)
                views = self._buffers.views(kernel.dtype, offset, target.numel())[half]
                self._reduce(kernel, views if premultiplied else self._with_own(views, target), target)

    def _publish_product(self, operation: Operation, own: torch.Tensor, half: int, offset: int) -> None:
        target = self._buffers.views(own.dtype, offset, own.numel())[half][self._rank]
        premultiply_to(operation, own, target)

    def _with_own(self, views: list[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        """Returns the slices of all ranks; this rank's slice comes from its tensor instead of its buffer."""
        return [*views[: self._rank], own, *views[self._rank + 1 :]]

    def _reduce(self, kernel: ReduceKernel, slices: list[torch.Tensor], out: torch.Tensor) -> None:
        """Reduces the slices in order into `out`, which may be one of the first two slices, but none of the others."""
        combine = kernel.combine
        combine(slices[0], slices[1], out=out)
        for operand in slices[2:]:
            combine(out, operand, out=out)
        if kernel.finish is not None:
            kernel.finish(out, self._size)

    # ------------------------------------------------------------ in two phases

    def _two_phases(self, operation: Operation, control: Control, root: int | None) -> None:
        tensor = operation.outputs[0]
        slice_bytes = two_phase_slice_bytes(self._size, self._buffer_bytes)
        raw = tensor.view(-1).split(slice_bytes // tensor.itemsize)
        kernel = _kernel(operation, tensor)
        flat = _flat(tensor, kernel).split(slice_bytes // kernel.dtype.itemsize)
        takes = root is None or root == self._rank
        for index in range(len(flat) + 1):
            half = self._signals.begin_step()
            if index < len(flat):
                self._publish_slice(operation, raw[index], half)
            if index:
                self._publish_share(operation, kernel, flat[index - 1], half, slice_bytes)
            self._signals.synchronise(control)
            if index and takes:
                self._take_shares(flat[index - 1], half, slice_bytes)

    def _shares(self, own: torch.Tensor) -> list[tuple[int, int]]:
        return shares(own.numel(), self._size, ALIGNMENT // own.itemsize)

    def _publish_slice(self, operation: Operation, own: torch.Tensor, half: int) -> None:
        """Publishes all shares except this rank's own, which this rank alone reads, from the tensor itself."""
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, own, half, 0)
            return
        start, stop = (position * own.itemsize for position in self._shares(own)[self._rank])
        source, target = own.data_ptr(), self._buffers.address[half][self._rank]
        copy_bytes(target, source, start)
        copy_bytes(target + stop, source + stop, own.nbytes - stop)

    def _publish_share(
        self, operation: Operation, kernel: ReduceKernel, own: torch.Tensor, half: int, slice_bytes: int
    ) -> None:
        start, stop = self._shares(own)[self._rank]
        if start == stop:
            return
        slices = self._buffers.views(kernel.dtype, start * own.itemsize, stop - start)[1 - half]
        if operation.reduce_op is not _PREMUL_SUM:
            slices = self._with_own(slices, own[start:stop])
        self._reduce(kernel, slices, self._buffers.views(kernel.dtype, slice_bytes, stop - start)[half][self._rank])

    def _take_shares(self, own: torch.Tensor, half: int, slice_bytes: int) -> None:
        target, width = own.data_ptr(), own.itemsize
        for address, (start, stop) in zip(self._buffers.address[half], self._shares(own), strict=True):
            copy_bytes(target + start * width, address + slice_bytes, (stop - start) * width)

    # ------------------------------------------------------------ REDUCE_SCATTER

    def reduce_scatter(self, operation: Operation, control: Control, path: Route) -> None:
        """Reduces directly, since every rank reduces only its own chunk."""
        with torch.inference_mode(), one_thread():
            self._reduce_scatter(operation, control, path)

    def _reduce_scatter(self, operation: Operation, control: Control, path: Route) -> None:
        publishes = path.publishes
        if self._stages_own(operation):
            publishes = (*publishes, Publish(self._rank, self._own_offset(path)))
        step, steps = 0, 1
        while step < steps:
            half = self._signals.begin_step()
            self._publish_slices(operation, publishes, step, path.slice_bytes, half)
            if step == 0:
                self._signals.publish_sizes(half, operation)
            self._signals.synchronise(control)
            if step == 0:
                steps = num_steps(self._signals.compare_sizes(half, operation), path.slice_bytes)
            self._reduce_own(operation, path, step, half)
            step += 1

    def _own_offset(self, path: Route) -> int:
        return self._rank * path.slice_bytes

    def _stages_own(self, operation: Operation) -> bool:
        """Whether this rank's input goes through its buffer, as it is multiplied or the output would overwrite it."""
        in_place = operation.outputs[0].data_ptr() == operation.inputs[self._rank].data_ptr()
        return operation.reduce_op is _PREMUL_SUM or (in_place and self._rank > 1)

    def _publish_slices(
        self, operation: Operation, publishes: tuple[Publish, ...], step: int, slice_bytes: int, half: int
    ) -> None:
        buffer = self._buffers.address[half][self._rank]
        for publish in publishes:
            tensor = operation.inputs[publish.source]
            start, stop = span(step, slice_bytes, tensor.nbytes)
            if start == stop:
                continue
            if operation.reduce_op is _PREMUL_SUM:
                own = tensor.view(-1)[start // tensor.itemsize : stop // tensor.itemsize]
                self._publish_product(operation, own, half, publish.offset)
            else:
                copy_bytes(buffer + publish.offset, tensor.data_ptr() + start, stop - start)

    def _reduce_own(self, operation: Operation, path: Route, step: int, half: int) -> None:
        output = operation.outputs[0]
        start, stop = span(step, path.slice_bytes, output.nbytes)
        if start == stop:
            return
        kernel = _kernel(operation, output)
        part = slice(start // kernel.dtype.itemsize, stop // kernel.dtype.itemsize)
        slices = self._buffers.views(kernel.dtype, self._own_offset(path), part.stop - part.start)[half]
        if not self._stages_own(operation):
            slices = self._with_own(slices, _flat(operation.inputs[self._rank], kernel)[part])
        self._reduce(kernel, slices, _flat(output, kernel)[part])


def _kernel(operation: Operation, tensor: torch.Tensor) -> ReduceKernel:
    assert operation.reduce_op is not None
    return reducer(operation.reduce_op, tensor.dtype)


def _flat(tensor: torch.Tensor, kernel: ReduceKernel, plain: bool = False) -> torch.Tensor:
    if plain and tensor.dim() == 1:
        return tensor
    return tensor.view(-1).view(kernel.dtype)
