"""The transport that carries collective operations through memory that the ranks of a host share.

Every rank copies the data for others to its own buffer in the segment, and takes its data out of theirs, in steps;
`signals` explains why that is safe, `routes` which rank copies which bytes. Large tensors are cut into slices that fit
into the processor's caches.
"""

from __future__ import annotations

from typing import Final

import torch

from rpcdist.collectives._operations.dense import copy_bytes
from rpcdist.collectives._operations.operation import Kind, Operation
from rpcdist.collectives._transports.shm.reductions import Reductions
from rpcdist.collectives._transports.shm.routes import Layout, RankBuffers, Route, num_steps, route, span
from rpcdist.collectives._transports.shm.signals import Signals
from rpcdist.collectives._transports.transport_base import Control, Transport
from rpcdist.transport.shared_memory import Segment, SegmentError

# Looking a member up in its enum costs as much as a small copy.
_ALL_REDUCE: Final = Kind.ALL_REDUCE
_REDUCE: Final = Kind.REDUCE
_REDUCE_SCATTER: Final = Kind.REDUCE_SCATTER
_ALL_TO_ALL: Final = Kind.ALL_TO_ALL
_BARRIER: Final = Kind.BARRIER


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

    def __init__(self, rank: int, size: int, segment: Segment, layout: Layout | None = None) -> None:
        self.rank = rank
        self.size = size
        self.reduces_many = size == 2
        self._layout = layout or Layout(size)
        if segment.size_bytes < self._layout.total_bytes:
            raise SegmentError(f"{segment!r} is too small: {size} ranks need {self._layout.total_bytes} bytes")
        self._segment = segment
        memory = segment.map()
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._signals = Signals(rank, self._layout, memory, whole.data_ptr())
        self._buffers = RankBuffers(self._layout, whole)
        self._reductions = Reductions(rank, self._layout, self._buffers, self._signals)
        self._routes: dict[tuple[int, int], Route] = {}
        self._closed = False

    def run(self, operation: Operation, control: Control) -> None:
        kind = operation.kind
        self._signals.begin_operation()
        if kind is _ALL_REDUCE or kind is _REDUCE:
            self._reductions.run(operation, control, None if kind is _ALL_REDUCE else operation.root)
        elif kind is _BARRIER:
            self._signals.begin_step()
            self._signals.synchronise(control)
        elif kind is _REDUCE_SCATTER:
            self._reductions.reduce_scatter(operation, control, self._route(operation))
        else:
            self._move(operation, control, self._route(operation))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reductions.close()
        self._buffers.close()
        self._signals.close()
        self._segment.close()

    def _route(self, operation: Operation) -> Route:
        key = (int(operation.kind), operation.root)
        found = self._routes.get(key)
        if found is None:
            buffer_bytes = self._layout.buffer_bytes
            found = route(operation.kind, self.rank, self.size, operation.root, buffer_bytes)
            self._routes[key] = found
        return found

    def _move(self, operation: Operation, control: Control, path: Route) -> None:
        uneven = operation.kind is _ALL_TO_ALL
        sources = [(tensor.data_ptr(), tensor.nbytes) for tensor in operation.inputs]
        targets = [(tensor.data_ptr(), tensor.nbytes) for tensor in operation.outputs]
        step, steps = 0, num_steps((sources or targets)[0][1], path.slice_bytes)
        while step < steps:
            half = self._signals.begin_step()
            self._publish(path, step, sources, self._buffers.address[half][self.rank])
            if uneven and step == 0:
                self._signals.publish_sizes(half, operation)
            self._signals.synchronise(control)
            if uneven and step == 0:
                steps = num_steps(self._signals.compare_sizes(half, operation), path.slice_bytes)
            self._take(path, step, targets, self._buffers.address[half])
            step += 1
        if path.own is not None:
            (source, num_bytes), (target, _) = sources[path.own[0]], targets[path.own[1]]
            if source != target:
                copy_bytes(target, source, num_bytes)

    def _publish(self, path: Route, step: int, sources: list[tuple[int, int]], buffer: int) -> None:
        for publish in path.publishes:
            address, num_bytes = sources[publish.source]
            start, stop = span(step, path.slice_bytes, num_bytes)
            if start != stop:
                copy_bytes(buffer + publish.offset, address + start, stop - start)

    def _take(self, path: Route, step: int, targets: list[tuple[int, int]], buffers: list[int]) -> None:
        for take in path.takes:
            address, num_bytes = targets[take.target]
            start, stop = span(step, path.slice_bytes, num_bytes)
            if start != stop:
                copy_bytes(address + start, buffers[take.peer] + take.offset, stop - start)
