"""The transport that carries collective operations through memory that the ranks of a host share.

Every rank copies the data for others to its own buffer in the segment, and takes its data out of theirs, in steps;
`signals` explains why that is safe, `routes` which rank copies which bytes. Large tensors are cut into slices that fit
into the processor's caches.

ALL_REDUCE and REDUCE have two algorithms, chosen by size and number of ranks:

- direct: every rank publishes a slice, and each rank that needs the result reduces the slices of all ranks. One barrier
  per slice, n times the arithmetic. With two ranks it touches memory least; for small messages barriers dominate.
- in two phases: every rank publishes a slice, reduces its own portion of it, publishes that, and takes the portions of
  the others. A step publishes slice k and the reduced portions of slice k - 1, so this also has one barrier per slice.

All ranks reduce in rank order, so that all get the same bits.

[Note: halves] Dividing a sum takes a separate pass over memory. Two ranks that average floating-point numbers publish
halves instead: multiplying on the way to the buffer takes as long as copying. Halves are exact, so the bits are the
same, except that numbers next to the smallest are rounded once more, and that large ones cannot overflow. Half
precision has many numbers next to its smallest, so its sums are divided afterwards.
"""

from __future__ import annotations

from typing import Final

import torch

from rpcdist.collectives._operations.dense import copy_bytes
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp
from rpcdist.collectives._operations.reduce_kernels import ReduceKernel, premultiply_to, reducer
from rpcdist.collectives._transports.shm import routes
from rpcdist.collectives._transports.shm.signals import Signals
from rpcdist.collectives._transports.transport_base import Control, Transport
from rpcdist.transport.shared_memory import Segment, SegmentError

# Looking a member up in its enum costs as much as a small copy.
_ALL_REDUCE: Final = Kind.ALL_REDUCE
_REDUCE: Final = Kind.REDUCE
_REDUCE_SCATTER: Final = Kind.REDUCE_SCATTER
_ALL_TO_ALL: Final = Kind.ALL_TO_ALL
_BARRIER: Final = Kind.BARRIER
DIRECT_BYTES: Final = 32 << 10
"""Up to this size, more than two ranks reduce directly."""
_ONE_THREAD_BYTES: Final = 32 << 10
"""Up to this size torch uses one thread anyway, whatever the dtype."""
_MAX_PREPARED: Final = 256
_PREMUL_SUM: Final = ReduceOp.PREMUL_SUM
_AVG: Final = ReduceOp.AVG
_HALVED: Final = frozenset({torch.float32, torch.float64, torch.bfloat16})
"""See [Note: halves]."""


_PreparedReduction = tuple[ReduceKernel, bool, int, list[list[torch.Tensor]]]
"""The parts of a reduction of tensors of one dtype and length in one slice, found once: the kernel, whether the tensors
are reduced in their own dtype, their bytes, and the views."""


class ShmTransport(Transport):
    """The transport of two or more ranks that share a host.

    Args:
        segment: shared memory of `segment_size(size)` bytes, or of the layout's size; the same on all ranks, zero when
            the group starts, and used by no other group. The transport maps it at once and closes it in `close`.
            Its creator may close it as soon as all ranks have mapped it.
        layout: the layout of the segment, the same on all ranks; None takes the default.

    Raises:
        SegmentError: the segment is too small, or cannot be mapped.
    """

    def __init__(self, rank: int, size: int, segment: Segment, layout: routes.Layout | None = None) -> None:
        self.rank = rank
        self.size = size
        self.reduces_many = size == 2
        self._layout = layout or routes.Layout(size)
        if segment.size_bytes < self._layout.total_bytes:
            raise SegmentError(f"{segment!r} is too small: {size} ranks need {self._layout.total_bytes} bytes")
        self._segment = segment
        memory = segment.map()
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._signals = Signals(rank, self._layout, memory, whole.data_ptr())
        self._buffers = routes.RankBuffers(self._layout, whole)
        self._buffer_bytes = self._layout.buffer_bytes
        self._direct_bytes = self._buffer_bytes if size == 2 else min(DIRECT_BYTES, self._buffer_bytes)
        self._one_thread_bytes = min(_ONE_THREAD_BYTES, self._direct_bytes)
        self._prepared: dict[tuple[int, torch.dtype, int], _PreparedReduction] = {}
        self._closed = False

    def run(self, operation: Operation, control: Control) -> None:
        kind = operation.kind
        self._signals.begin_operation()
        if kind is _ALL_REDUCE or kind is _REDUCE:
            self._reduce_all(operation, control, None if kind is _ALL_REDUCE else operation.root)
        elif kind is _BARRIER:
            self._signals.begin_step()
            self._signals.synchronise(control)
        elif kind is _REDUCE_SCATTER:
            with torch.inference_mode(), routes.one_thread():
                self._move(operation, control)
        else:
            self._move(operation, control)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._prepared.clear()
        self._buffers.close()
        self._signals.close()
        self._segment.close()

    def _move(self, operation: Operation, control: Control) -> None:
        """Runs an operation whose ranks publish and take chunks; for REDUCE_SCATTER a rank takes a sum of chunks."""
        path = routes.route(operation.kind, self.rank, self.size, operation.root, self._buffer_bytes)
        reduces = operation.kind is _REDUCE_SCATTER
        uneven = reduces or operation.kind is _ALL_TO_ALL
        publishes = path.publishes
        if reduces and self._stages_own(operation):
            publishes = (*publishes, (self.rank, self._own_offset(path)))
        targets = [(tensor.data_ptr(), tensor.nbytes) for tensor in operation.outputs]
        step, steps = 0, routes.num_steps((operation.inputs or operation.outputs)[0].nbytes, path.slice_bytes)
        own_steps = steps
        while step < steps:
            if step > own_steps:  # a rank that lies about its sizes would keep this one here
                self._signals.check(control)
            half = self._signals.begin_step()
            self._publish(operation, publishes, step, path.slice_bytes, half)
            if uneven and step == 0:
                self._signals.publish_sizes(half, operation)
            self._signals.synchronise(control)
            if uneven and step == 0:
                own = max(tensor.nbytes for tensor in (*operation.inputs, *operation.outputs))
                own_steps = routes.num_steps(own, path.slice_bytes)
                steps = routes.num_steps(self._signals.compare_sizes(half, operation), path.slice_bytes)
            if reduces:
                self._reduce_own(operation, path, step, half)
            else:
                self._take(path, step, targets, self._buffers.address[half])
            step += 1
        if path.own is not None and not reduces:
            source, (target, _) = operation.inputs[path.own[0]], targets[path.own[1]]
            if source.data_ptr() != target:
                copy_bytes(target, source.data_ptr(), source.nbytes)

    def _publish(
        self, operation: Operation, publishes: tuple[tuple[int, int], ...], step: int, slice_bytes: int, half: int
    ) -> None:
        buffer = self._buffers.address[half][self.rank]
        for source, offset in publishes:
            tensor = operation.inputs[source]
            start, stop = routes.span(step, slice_bytes, tensor.nbytes)
            if start == stop:
                continue
            if operation.reduce_op is _PREMUL_SUM:
                own = tensor.view(-1)[start // tensor.itemsize : stop // tensor.itemsize]
                self._publish_product(operation, own, half, offset)
            else:
                copy_bytes(buffer + offset, tensor.data_ptr() + start, stop - start)

    def _take(self, path: routes.Route, step: int, targets: list[tuple[int, int]], buffers: list[int]) -> None:
        for peer, offset, target in path.takes:
            address, num_bytes = targets[target]
            start, stop = routes.span(step, path.slice_bytes, num_bytes)
            if start != stop:
                copy_bytes(address + start, buffers[peer] + offset, stop - start)

    # ------------------------------------------------------------ ALL_REDUCE and REDUCE

    def _reduce_all(self, operation: Operation, control: Control, root: int | None) -> None:
        """ALL_REDUCE, or REDUCE to `root`."""
        tensor = operation.outputs[0]
        if operation.reduce_op is _AVG and self.size == 2 and tensor.dtype in _HALVED:
            operation = Operation(
                operation.kind, operation.inputs, operation.outputs, _PREMUL_SUM, operation.root, factor=0.5
            )
        several = len(operation.outputs) > 1
        is_small = tensor.nbytes <= self._one_thread_bytes and not several
        if is_small and not (tensor.requires_grad or tensor.is_inference()):
            self._in_one_slice(operation, control, root)
            return
        with torch.inference_mode(), routes.one_thread():
            if tensor.nbytes <= self._direct_bytes and not several:
                self._in_one_slice(operation, control, root)
            elif self.size == 2:
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
            kernel = _kernel(operation, tensor)
            views = self._buffers.views(kernel.dtype, 0, tensor.nbytes // kernel.dtype.itemsize)
            prepared = self._prepared[key] = kernel, kernel.dtype is tensor.dtype, tensor.nbytes, views
        return prepared

    def _in_one_slice(self, operation: Operation, control: Control, root: int | None) -> None:
        """Reduces a small tensor; the path on which microseconds count."""
        tensor = operation.outputs[0]
        kernel, plain, num_bytes, views = self._prepare(operation, tensor)
        rank = self.rank
        half = self._signals.begin_step()
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, tensor.view(-1), half, 0)
        else:
            copy_bytes(self._buffers.address[half][rank], tensor.data_ptr(), num_bytes)
        self._signals.synchronise(control)
        if (root is None or root == rank) and num_bytes:
            self._reduce(kernel, views[half], _flat(tensor, kernel, plain))

    def _in_slices(self, operation: Operation, control: Control, root: int | None) -> None:
        """Reduces any number of tensors as if they were one."""
        tensors = [tensor.view(-1) for tensor in operation.outputs]
        kernel, width = _kernel(operation, tensors[0]), tensors[0].itemsize
        takes = root is None or root == self.rank
        premultiplied = operation.reduce_op is _PREMUL_SUM
        for pieces in routes.cut(tuple([tensor.numel() for tensor in tensors]), self._buffer_bytes // width):
            parts = [(piece.offset * width, piece.of(tensors[piece.tensor])) for piece in pieces]
            half = self._signals.begin_step()
            buffer = self._buffers.address[half][self.rank]
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
        target = self._buffers.views(own.dtype, offset, own.numel())[half][self.rank]
        premultiply_to(operation, own, target)

    def _with_own(self, views: list[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        """Returns the slices of all ranks; this rank's slice comes from its tensor instead of its buffer."""
        return [*views[: self.rank], own, *views[self.rank + 1 :]]

    def _reduce(self, kernel: ReduceKernel, slices: list[torch.Tensor], out: torch.Tensor) -> None:
        """Reduces the slices in order into `out`, which may be one of the first two slices, but none of the others."""
        combine = kernel.combine
        combine(slices[0], slices[1], out=out)
        for operand in slices[2:]:
            combine(out, operand, out=out)
        if kernel.finish is not None:
            kernel.finish(out, self.size)

    # ------------------------------------------------------------ in two phases

    def _two_phases(self, operation: Operation, control: Control, root: int | None) -> None:
        tensor = operation.outputs[0]
        slice_bytes = routes.two_phase_slice_bytes(self.size, self._buffer_bytes)
        raw = tensor.view(-1).split(slice_bytes // tensor.itemsize)
        kernel = _kernel(operation, tensor)
        flat = _flat(tensor, kernel).split(slice_bytes // kernel.dtype.itemsize)
        takes = root is None or root == self.rank
        for index in range(len(flat) + 1):
            half = self._signals.begin_step()
            if index < len(flat):
                self._publish_slice(operation, raw[index], half)
            if index:
                self._publish_portion(operation, kernel, flat[index - 1], half, slice_bytes)
            self._signals.synchronise(control)
            if index and takes:
                self._take_portions(flat[index - 1], half, slice_bytes)

    def _portions(self, own: torch.Tensor) -> list[tuple[int, int]]:
        return routes.portions(own.numel(), self.size, routes.ALIGNMENT // own.itemsize)

    def _publish_slice(self, operation: Operation, own: torch.Tensor, half: int) -> None:
        """Publishes all portions except this rank's own, which this rank alone reads, from the tensor itself."""
        if operation.reduce_op is _PREMUL_SUM:
            self._publish_product(operation, own, half, 0)
            return
        start, stop = (position * own.itemsize for position in self._portions(own)[self.rank])
        source, target = own.data_ptr(), self._buffers.address[half][self.rank]
        copy_bytes(target, source, start)
        copy_bytes(target + stop, source + stop, own.nbytes - stop)

    def _publish_portion(
        self, operation: Operation, kernel: ReduceKernel, own: torch.Tensor, half: int, slice_bytes: int
    ) -> None:
        start, stop = self._portions(own)[self.rank]
        if start == stop:
            return
        slices = self._buffers.views(kernel.dtype, start * own.itemsize, stop - start)[1 - half]
        if operation.reduce_op is not _PREMUL_SUM:
            slices = self._with_own(slices, own[start:stop])
        self._reduce(kernel, slices, self._buffers.views(kernel.dtype, slice_bytes, stop - start)[half][self.rank])

    def _take_portions(self, own: torch.Tensor, half: int, slice_bytes: int) -> None:
        target, width = own.data_ptr(), own.itemsize
        for address, (start, stop) in zip(self._buffers.address[half], self._portions(own), strict=True):
            copy_bytes(target + start * width, address + slice_bytes, (stop - start) * width)

    # ------------------------------------------------------------ REDUCE_SCATTER: a rank reduces only its own chunk

    def _own_offset(self, path: routes.Route) -> int:
        return self.rank * path.slice_bytes

    def _stages_own(self, operation: Operation) -> bool:
        """Whether this rank's input goes through its buffer, as it is multiplied or the output would overwrite it."""
        in_place = operation.outputs[0].data_ptr() == operation.inputs[self.rank].data_ptr()
        return operation.reduce_op is _PREMUL_SUM or (in_place and self.rank > 1)

    def _reduce_own(self, operation: Operation, path: routes.Route, step: int, half: int) -> None:
        output = operation.outputs[0]
        start, stop = routes.span(step, path.slice_bytes, output.nbytes)
        if start == stop:
            return
        kernel = _kernel(operation, output)
        part = slice(start // kernel.dtype.itemsize, stop // kernel.dtype.itemsize)
        slices = self._buffers.views(kernel.dtype, self._own_offset(path), part.stop - part.start)[half]
        if not self._stages_own(operation):
            slices = self._with_own(slices, _flat(operation.inputs[self.rank], kernel)[part])
        self._reduce(kernel, slices, _flat(output, kernel)[part])


def _kernel(operation: Operation, tensor: torch.Tensor) -> ReduceKernel:
    assert operation.reduce_op is not None
    return reducer(operation.reduce_op, tensor.dtype)


def _flat(tensor: torch.Tensor, kernel: ReduceKernel, plain: bool = False) -> torch.Tensor:
    if plain and tensor.dim() == 1:
        return tensor
    return tensor.view(-1).view(kernel.dtype)
