"""Tensors of an outgoing value: the bytes to send, and the position of each tensor in them.

Only the bytes that the tensors need are sent. Tensors whose memory overlaps travel in one buffer at their relative
offsets, so that they share memory at the other end too; memory is compared by address, which sees through views,
`.data`, and arrays imported twice. A view with holes (a column of a wide matrix) is compacted first. Large dense memory
is not copied at all.

[Note: views with holes]
The span of a view is the memory from its first to its last element. A view whose span overlaps no other is sent as a
copy without holes. Views whose spans overlap are sent as one span, holes included, unless the holes are more than half
of it and no element belongs to two of the views (columns 0 and 1 of a wide matrix): then each can be compacted without
losing shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import string_at
from itertools import pairwise
from math import gcd
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Parameter

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, GpuBuffer, TensorBuffer
from rpcdist.rpc._values.tensor_runs import RUNS_FROM, TensorRun, find_runs
from rpcdist.transport.memory_copies import LargeBuffer

# The numbers of dtypes are part of the wire format: new dtypes get new numbers, and no number is reused. Types that the
# running torch does not have are left out, and an arriving tensor of such a type is refused.
_CODES: Final = {
    # 0 costs no byte on the wire, so the most common type has it.
    "float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int64": 4, "int32": 5, "int16": 6, "int8": 7, "uint8": 8,
    "uint16": 9, "uint32": 10, "uint64": 11, "bool": 12, "complex64": 13, "complex128": 14, "complex32": 15,
    "float8_e4m3fn": 16, "float8_e4m3fnuz": 17, "float8_e5m2": 18, "float8_e5m2fnuz": 19, "float8_e8m0fnu": 20,
    "float4_e2m1fn_x2": 21, "int1": 32, "int2": 33, "int3": 34, "int4": 35, "int5": 36, "int6": 37, "int7": 38,
    "uint1": 40, "uint2": 41, "uint3": 42, "uint4": 43, "uint5": 44, "uint6": 45, "uint7": 46,
}  # fmt: skip

DTYPES: Final[dict[int, torch.dtype]] = {
    code: dtype for name, code in _CODES.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
DTYPE_CODES: Final[dict[torch.dtype, int]] = {dtype: code for code, dtype in DTYPES.items()}


_CPU: Final = torch.device("cpu")

MapDevice = Callable[[torch.device], torch.device]
"""Maps a device of the sender to a device of the receiver. Raises if the map lacks it; the CPU then stays the CPU."""

Lend = Callable[[int, Sequence[tuple[int, int]]], tuple[Any, list[int]] | None]
"""Lends memory to the receiver: the device, and the address and size of each part; see `LentGpuMemory.lend`."""


def moves_cpu(map_device: MapDevice) -> bool:
    """Whether a map sends tensors of the CPU to another device."""
    return map_device(_CPU).type != "cpu"


class DeviceRoute:
    """How the tensors of one value on GPUs reach their receiver.

    Args:
        map_device: the device map; without it, a tensor goes to the device of the same index.
        lend: lends memory of this worker's GPUs to the receiver; without it, tensors travel through host memory.
        back: whether the tensors are gradients, which go to the devices of the tensors whose gradients they are.

    Attributes:
        moves_cpu: whether tensors on the CPU also go to another device.
        loans: the numbers of the loans so far, which must be taken back if the message is not sent.
    """

    __slots__ = ("back", "lend", "loans", "map_device", "moves_cpu")

    def __init__(self, map_device: MapDevice | None, lend: Lend | None = None, *, back: bool = False) -> None:
        self.map_device = map_device
        self.moves_cpu = map_device is not None and moves_cpu(map_device)
        self.lend = lend
        self.back = back
        self.loans: list[int] = []

    def place(self, value: value_pb2.Value, message: value_pb2.Tensor, device: torch.device) -> bool:
        """Writes the device at the receiver into the header of a tensor; whether it goes from GPU to GPU."""
        if self.back:
            message.device = "cuda"
            return device.type == "cuda"
        target = device if self.map_device is None else self.map_device(device)
        if target.type != "cpu":
            message.device = str(target)
        message.unmapped = self.map_device is None
        if target.type != "cuda":
            return False
        if (target.index or 0) not in value.gpus:
            value.gpus.append(target.index or 0)
        return device.type == "cuda"


# Copies are made between integers of the same width: cheaper than the real type, defined for all of them, and outside
# autograd.
_BINDINGS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

KEPT_HOLES_BYTES: Final = 4096
"""A view whose memory spans no more than this keeps its strides: the holes cost less than the copy."""


class NotPlain(Exception):
    """A part of a value is not plain: an object, or a tensor that the table cannot hold."""


class _View(NamedTuple):
    """A tensor with elements, and the memory from its first to its last one."""

    start: int
    end: int
    message: value_pb2.Tensor
    tensor: torch.Tensor


def pack_tensors(
    value: value_pb2.Value,
    tensors: Sequence[torch.Tensor],
    large: list[LargeBuffer],
    route: DeviceRoute | None = None,
    *,
    all_differ: bool = False,
) -> None:
    """Appends `tensors` to the tables of `value`, and the memory that is not copied into it to `large`.

    Args:
        all_differ: each must be an object of its own, with memory of its own.

    Raises:
        NotPlain: a tensor has a layout or dtype that the table cannot hold; or `all_differ` is not known to hold.
        SerializationError: a tensor is on another device, and there is no route; or the error of its map.
    """
    moved = route is not None and route.moves_cpu
    runs = find_runs(tensors) if len(tensors) >= RUNS_FROM and not moved else None
    if runs is not None:
        _send_runs(value, runs, large)
        return
    if all_differ:
        raise NotPlain
    views: list[_View] = []
    on_gpus: list[_View] = []
    has_strides = False
    add_message = value.tensors.add
    tensors, sparse = _with_parts(tensors)
    for tensor in tensors:
        message = add_message()
        if sparse and tensor.layout is torch.sparse_coo:
            message.shape.extend(tensor.shape)
            message.requires_grad = tensor.requires_grad
            message.parameter = type(tensor) is Parameter
            message.sparse.CopyFrom(sparse[id(tensor)])
            continue
        dtype = tensor.dtype
        code = DTYPE_CODES.get(dtype)
        if code is None or tensor.layout is not torch.strided or tensor.is_nested:
            raise NotPlain
        shape = tensor.shape
        _write_header(message, tensor, code, shape)
        if moved or not tensor.is_cpu:
            tensor = _routed(value, message, tensor, route)
        if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
            tensor = tensor.detach().resolve_conj().resolve_neg()
        size = tensor.nbytes
        if not tensor.is_contiguous():
            stride = tensor.stride()
            message.stride.extend(stride)
            if size and not tensor.is_meta:
                size = (
                    sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
                ) * tensor.itemsize
                has_strides = True
        if size and not tensor.is_meta:
            start = address_of(tensor, size)
            (on_gpus if tensor.is_cuda else views).append(_View(start, start + size, message, tensor))
    _send_views(value, views, has_strides, large)
    if on_gpus:
        assert route is not None  # without it, none would have stayed on its GPU
        spans: list[LargeBuffer] = []
        first = len(value.buffers)
        _send_views(value, on_gpus, has_strides, spans)
        _send_gpu_spans(value, first, spans, route, large)


def _send_views(value: value_pb2.Value, views: list[_View], has_strides: bool, large: list[LargeBuffer]) -> None:
    if not has_strides and (len(views) < 2 or are_apart([(view.start, view.end) for view in views])):
        for view in views:
            _send_span(value, view.start, view.end - view.start, (view.tensor,), (view,), large)
    else:
        for cluster in _clusters(views):
            _send_cluster(value, cluster, large)


def _send_gpu_spans(
    value: value_pb2.Value, first: int, spans: Sequence[LargeBuffer], route: DeviceRoute, large: list[LargeBuffer]
) -> None:
    """Lends the memory of the last buffers of a value, or sends copies of it made on the host.

    Args:
        value: has a buffer for each span, from number `first` on.
    """
    members: list[tuple[value_pb2.Buffer, GpuBuffer]] = []
    for number, span in enumerate(spans, first):
        assert isinstance(span, GpuBuffer)  # `_send_span` makes one for memory of a GPU
        span.keep()
        members.append((value.buffers[number], span))
    for device in {span.device.index for _, span in members}:
        of_device = [(buffer, span) for buffer, span in members if span.device.index == device]
        made = None if route.lend is None else route.lend(device, [(span.start, span.size) for _, span in of_device])
        if made is None:
            continue
        loan, offsets = made
        route.loans.append(loan.number)
        value.gpu_loans.append(loan)
        for (buffer, _), offset in zip(of_device, offsets, strict=True):
            buffer.gpu_loan, buffer.offset = len(value.gpu_loans), offset
    large += [span.on_host() for buffer, span in members if not buffer.gpu_loan]


def _write_header(message: value_pb2.Tensor, tensor: torch.Tensor, code: int, shape: torch.Size) -> None:
    if code:
        message.dtype = code
    if shape:
        message.shape.extend(shape)
    if tensor.requires_grad:
        message.requires_grad = True
    if type(tensor) is Parameter:
        message.parameter = True


def _send_runs(value: value_pb2.Value, runs: list[TensorRun], large: list[LargeBuffer]) -> None:
    for first, length, memory in runs:
        message = value.tensors.add()
        _write_header(message, first, DTYPE_CODES[first.dtype], first.shape)
        if length > 1:
            message.run = length
        start, size = memory.data_ptr(), memory.nbytes
        _send_span(value, start, size, (memory,), (_View(start, start + size, message, memory),), large)


def _with_parts(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], dict[int, value_pb2.Sparse] | None]:
    """The tensors, followed by the indices and values of the sparse ones, and the positions of those, by `id`."""
    if all(tensor.layout is torch.strided for tensor in tensors):
        return tensors, None
    parts = list(tensors)
    sparse: dict[int, value_pb2.Sparse] = {}
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            count = len(parts)
            sparse[id(tensor)] = value_pb2.Sparse(indices=count, values=count + 1, coalesced=tensor.is_coalesced())
            plain = tensor.detach()
            parts += (plain._indices(), plain._values())
    return parts, sparse


def _routed(
    value: value_pb2.Value, message: value_pb2.Tensor, tensor: torch.Tensor, route: DeviceRoute | None
) -> torch.Tensor:
    """Writes the device at the receiver; returns the tensor on the device from which it is sent, its own or the CPU."""
    device = tensor.device
    if device.type == "meta":
        message.device = "meta"
        return tensor
    if route is None:
        raise SerializationError(f"a tensor on {device} cannot be sent here; send `tensor.cpu()`")
    if route.place(value, message, device):
        return tensor.detach()
    return tensor.detach().cpu()


def address_of(tensor: torch.Tensor, size: int) -> int:
    """The address of the tensor's first element; checks that `size` bytes from there are its own."""
    try:
        storage_size = tensor.untyped_storage().nbytes()
        start = tensor.data_ptr()
    except RuntimeError as exc:  # functorch's wrappers and the like
        raise SerializationError(f"a tensor without memory of its own cannot be sent: {exc}") from exc
    if not start or storage_size < tensor.storage_offset() * tensor.itemsize + size:
        raise SerializationError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sent, because its memory was freed or shrunk"
        )
    return start


def are_apart(spans: list[tuple[int, int]]) -> bool:
    """Whether no two spans of memory, from start to end, overlap."""
    if len(spans) == 2:
        return spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]
    return all(first[1] <= second[0] for first, second in pairwise(sorted(spans)))


def _clusters(views: list[_View]) -> list[list[_View]]:
    """Groups the views whose spans overlap."""
    clusters: list[list[_View]] = []
    end = 0
    for view in sorted(views, key=lambda view: (view.start, view.end)):
        if not clusters or view.start >= end:
            clusters.append([])
            end = view.end
        clusters[-1].append(view)
        end = max(end, view.end)
    return clusters


def _send_cluster(value: value_pb2.Value, cluster: list[_View], large: list[LargeBuffer]) -> None:
    """Sends the memory of views whose spans overlap; see [Note: views with holes]."""
    distinct: dict[tuple[object, ...], list[_View]] = {}
    for view in cluster:
        tensor = view.tensor
        distinct.setdefault((view.start, tensor.shape, tensor.stride(), tensor.dtype), []).append(view)
    start = min(view.start for view in cluster)
    size = max(view.end for view in cluster) - start
    needed = sum(_needed_bytes(same[0].tensor) for same in distinct.values())
    if len(distinct) == 1:
        compact = needed < size and size > KEPT_HOLES_BYTES and not _repeats_elements(cluster[0].tensor)
    else:
        start, aligned = _align(start, cluster)
        size = max(view.end for view in cluster) - start
        compact = not aligned or (
            needed * 2 < size and _share_no_element(start, [same[0] for same in distinct.values()])
        )
    if not compact:
        _send_span(value, start, size, [view.tensor for view in cluster], cluster, large)
        return
    for same in distinct.values():
        _send_compacted(value, same, large)


def _send_span(
    value: value_pb2.Value,
    start: int,
    size: int,
    owners: Sequence[torch.Tensor],
    views: Sequence[_View],
    large: list[LargeBuffer],
) -> None:
    """Adds one buffer with `size` bytes of memory, to which `views` refer."""
    buffers = value.buffers
    index = len(buffers)
    buffer = buffers.add()
    if owners[0].is_cuda:
        buffer.size = size
        large.append(GpuBuffer(start, size, owners))
    elif size <= INLINE_LIMIT:
        buffer.inline = string_at(start, size)
    else:
        buffer.size = size
        large.append(TensorBuffer(start, size, owners))
    for view in views:
        if index:
            view.message.buffer = index
        if view.start != start:
            view.message.offset = view.start - start


def _send_compacted(value: value_pb2.Value, same: list[_View], large: list[LargeBuffer]) -> None:
    """Sends a copy without holes for equal views. It keeps the order of dimensions, and repeated dimensions."""
    tensor = same[0].tensor
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    copy = tensor.detach().view(_BINDINGS[tensor.itemsize]).clone()
    repeated = zip(same[0].tensor.stride(), copy.stride(), strict=True)
    stride = [0 if step == 0 else dense for step, dense in repeated]
    for view in same:
        del view.message.stride[:]
        view.message.stride.extend(stride)
    moved = [view._replace(start=copy.data_ptr()) for view in same]
    _send_span(value, copy.data_ptr(), copy.nbytes, (copy,), moved, large)


def _needed_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the tensor's elements; a repeated dimension counts once."""
    count = 1
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        if step:
            count *= length
    return count * tensor.itemsize


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """Whether two indices may reach one element, other than along a repeated dimension, as in sliding windows."""
    reach = 0
    dims = sorted(
        (step, length) for length, step in zip(tensor.shape, tensor.stride(), strict=True) if step and length > 1
    )
    for step, length in dims:
        if step <= reach:
            return True
        reach += step * (length - 1)
    return False


def _align(start: int, cluster: list[_View]) -> tuple[int, bool]:
    """Moves the start back, within the first storage, so that offsets are whole elements; False if that fails."""
    unit = max(view.tensor.itemsize for view in cluster)
    first = min(cluster, key=lambda view: view.start).tensor
    start = max(start - start % unit, first.untyped_storage().data_ptr())
    return start, all((view.start - start) % view.tensor.itemsize == 0 for view in cluster)


def _share_no_element(start: int, views: list[_View]) -> bool:
    """Whether no byte belongs to two of the views, or twice to one; marks each view's bytes in a map of the span."""
    if any(_repeats_elements(view.tensor) for view in views):
        return False
    unit = 0
    for view in views:
        unit = gcd(unit, view.start - start, view.tensor.itemsize)
    length = (max(view.end for view in views) - start) // unit
    taken = torch.zeros(length, dtype=torch.bool, device="cpu")
    for view in views:
        width = view.tensor.itemsize // unit
        dims = [(n, step * width) for n, step in zip(view.tensor.shape, view.tensor.stride(), strict=True) if step]
        dims.append((width, 1))
        marks = taken.as_strided([n for n, _ in dims], [step for _, step in dims], (view.start - start) // unit)
        if bool(marks.any()):
            return False
        marks.fill_(True)
    return True


Internalize = Callable[[int], object]
"""Returns the object of an entry of `Value.rrefs`; a decoder may call it more than once for an entry."""

RRefType = type | tuple[()]
"""The class of remote references, for `isinstance`; an empty tuple where they are refused."""

ShareRRef = Callable[[object], object]
"""Appends a share of a remote reference to `Value.rrefs`. Called on the encoding thread, after everything else of the
value has been encoded, so that a value which cannot be sent has created no share."""
