"""Tensors of an arriving value: every header is checked before any memory is touched.

A received tensor is an ordinary one: not a view of another, with resizable memory, writable in place under grad mode.
Tensors that shared a buffer share a storage, as they did at the sender. Large buffers are used where they were
received; small ones are copied once, out of the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Final, Protocol

import torch
from torch.nn import Parameter

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import ReceiveBuffer, Received
from rpcdist.rpc._values.plain import too_much_for_its_weight
from rpcdist.rpc._values.tensor_runs import PAUSED_FROM, paused_collections, split_run
from rpcdist.rpc._values.tensors import DTYPES

MAX_DIMS: Final = 64  # torch's own limit
MAX_UNTRUSTED_TENSORS: Final = 1 << 17
"""Limit for one value from a peer that may send host tensors only."""

TENSOR_BYTES: Final = 1 << 10
"""The memory of a tensor without its elements (measured: 310 to 780 bytes with up to 20 dimensions), whose header may
have only two bytes on the wire. [Note: what a value costs]"""

_HELD_HEADERS: Final = 1024
"""Python's object for a header takes 150 bytes. Up to this number are kept; with more headers, they are made again."""

MAX_BYTES: Final = 1 << 62  # torch counts in signed 64-bit integers

Owners = dict[int | tuple[int, torch.device], torch.Tensor]
"""A tensor that owns the memory of a buffer, by buffer, and by device if that is not the CPU."""


class GpuArrivals(Protocol):
    """Moves arrived tensors of one value to GPUs."""

    def device_of(self, message: value_pb2.Tensor, buffer: Received | None) -> torch.device:
        """The device for a tensor that names one; raises `SerializationError` if it does not exist."""

    def copy_of(self, buffer: Received, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A copy of a buffer on a device, in the current stream, as a contiguous tensor of its size."""

    def done(self) -> None:
        """Called when all tensors of the value are made, or cannot be made."""


_CPU: Final = torch.device("cpu")


def rebuild_tensors(
    value: value_pb2.Value, buffers: Sequence[Received], host_only: bool = False, gpus: GpuArrivals | None = None
) -> list[torch.Tensor]:
    """The tensors of `value` over `buffers` (see `received_buffers`), in their order.

    With `host_only`, tensors for devices other than cpu and meta are refused; call `tensors_cost` first then.

    Raises:
        SerializationError: a header does not fit its buffer, or this torch cannot represent it.
    """
    messages = value.tensors
    count = len(messages)
    if not count:
        return []
    # By index: protobuf's own iteration costs half a microsecond more.
    headers: Sequence[value_pb2.Tensor] = messages
    if count <= _HELD_HEADERS:
        headers = [messages[0]] if count == 1 else [messages[position] for position in range(count)]
    if host_only:
        for message in headers:
            if message.device not in ("", "meta"):
                raise SerializationError(
                    f"a tensor for {message.device} arrived, and a worker with allow_pickle=False takes tensors on the "
                    'CPU only; send `tensor.cpu()`, or map its device to "cpu" in the caller\'s device map'
                )
    owners: Owners = {}
    try:
        if torch.is_inference_mode_enabled():  # a received tensor must be usable by autograd later
            with torch.inference_mode(False):
                return _rebuild_all(headers, buffers, owners, host_only, gpus)
        return _rebuild_all(headers, buffers, owners, host_only, gpus)
    except (RuntimeError, ValueError, OverflowError, MemoryError, AssertionError) as exc:  # torch asserts devices
        if isinstance(exc, SerializationError):
            raise
        raise SerializationError(f"an arrived tensor cannot be rebuilt here: {exc}") from exc


def tensors_cost(headers: Sequence[value_pb2.Tensor], weight_bytes: int, left_bytes: int) -> int:
    """The memory that the tensors of a value will take, computed before any object is made for them.

    Args:
        headers: the table, from a peer that may send host tensors only.
        weight_bytes: the weight of the value.
        left_bytes: the memory that it may still take.

    Raises:
        SerializationError: it would take more.
    """
    cost = TENSOR_BYTES * len(headers)
    if cost <= left_bytes:
        count = sum([message.run or 1 for message in headers])
        cost = TENSOR_BYTES * count
        if count > MAX_UNTRUSTED_TENSORS:
            raise SerializationError(
                f"a value of {count} tensors arrived from a peer that may send at most {MAX_UNTRUSTED_TENSORS}. Send "
                "fewer and larger ones, or several calls"
            )
    if cost > left_bytes:
        raise too_much_for_its_weight(weight_bytes)
    return cost


def _rebuild_all(
    headers: Sequence[value_pb2.Tensor],
    buffers: Sequence[Received],
    owners: Owners,
    host_only: bool,
    gpus: GpuArrivals | None,
) -> list[torch.Tensor]:
    if any([message.run for message in headers]):
        return _rebuild_runs(headers, buffers, owners, gpus)
    tensors = [_rebuild(message, buffers, owners, gpus) for message in headers if not message.HasField("sparse")]
    if len(tensors) == len(headers):
        return tensors
    if host_only:  # their indices are not checked
        raise SerializationError("a sparse tensor arrived from a peer that may send dense ones only")
    strided = iter(tensors)
    table = [None if message.HasField("sparse") else next(strided) for message in headers]
    return [made if made is not None else _sparse(header, table) for header, made in zip(headers, table, strict=True)]


def _rebuild_runs(
    headers: Sequence[value_pb2.Tensor], buffers: Sequence[Received], owners: Owners, gpus: GpuArrivals | None
) -> list[torch.Tensor]:
    """The tensors of a table that has runs."""
    tensors: list[torch.Tensor] = []
    for message in headers:
        if message.HasField("sparse"):
            raise SerializationError("a sparse tensor arrived in a table with runs of dense ones")
        if message.run:
            tensors += _rebuild_run(message, buffers, owners)
        else:
            tensors.append(_rebuild(message, buffers, owners, gpus))
    return tensors


def _rebuild_run(message: value_pb2.Tensor, buffers: Sequence[Received], owners: Owners) -> list[torch.Tensor]:
    dtype = DTYPES.get(message.dtype)
    index = message.buffer
    # A buffer that two runs could use would let a short message ask for any amount of memory.
    if dtype is None or message.stride or message.device or message.offset or index >= len(buffers) or index in owners:
        raise SerializationError("a damaged run of tensors arrived: its header or its buffer is invalid")
    shape = [message.run, *message.shape]
    stride, count = contiguous_strides(shape, dtype.itemsize)
    buffer = buffers[index]
    size = len(buffer) if isinstance(buffer, bytes) else buffer.size
    if not count or size != count * dtype.itemsize:
        raise SerializationError(f"a run of tensors of {count * dtype.itemsize} bytes arrived with a buffer of {size}")
    owners[index] = owner = _on_host(buffer)
    joined = over_storage(owner.untyped_storage(), 0, dtype, shape, stride)
    if message.run < PAUSED_FROM:
        tensors = split_run(joined)
    else:
        with paused_collections():
            tensors = split_run(joined)
    if message.requires_grad or message.parameter:
        return [_with_grad(message, tensor) for tensor in tensors]
    return tensors


def _with_grad(message: value_pb2.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as a parameter if its header says so, and requiring grad as there."""
    requires_grad = message.requires_grad
    if requires_grad and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise SerializationError(f"a tensor of {tensor.dtype} arrived that requires grad")
    if message.parameter:
        return Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _sparse(message: value_pb2.Tensor, table: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A sparse tensor from its parts, which are elsewhere in the table."""
    parts = message.sparse
    if max(parts.indices, parts.values) >= len(table):
        raise SerializationError("a sparse tensor arrived without its parts")
    indices, values = table[parts.indices], table[parts.values]
    if indices is None or values is None:
        raise SerializationError("a sparse tensor arrived whose parts are sparse themselves")
    tensor = torch.sparse_coo_tensor(
        indices,
        values,
        tuple(message.shape),
        device=values.device,
        check_invariants=False,
        is_coalesced=parts.coalesced,
    )
    return _with_grad(message, tensor)


def _rebuild(
    message: value_pb2.Tensor, buffers: Sequence[Received], owners: Owners, gpus: GpuArrivals | None
) -> torch.Tensor:
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise SerializationError(
            f"a tensor of dtype number {message.dtype} arrived; torch {torch.__version__} has no such type"
        )
    shape = message.shape[:]
    stride, count = contiguous_strides(shape, dtype.itemsize)
    dense = not message.stride
    if not dense:
        stride = _checked_stride(shape, message.stride[:], dtype.itemsize)
    device = message.device
    if device and device != "meta":
        tensor = _on_gpu(message, buffers, owners, gpus, (dtype, shape, stride, count))
    elif count == 0 or device:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device or _CPU)
    else:
        index = message.buffer
        buffer = _buffer(buffers, index)
        size = count * dtype.itemsize
        if dense and type(buffer) is bytes and len(buffer) == size and index not in owners and not message.offset:
            owners[index] = tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)
            memmove(tensor.data_ptr(), buffer, size)
        else:
            owner = owners.get(index)
            if owner is None:
                owners[index] = owner = _on_host(buffer)
            tensor = over_storage(owner.untyped_storage(), message.offset, dtype, shape, stride)
    return _with_grad(message, tensor)


def _on_gpu(
    message: value_pb2.Tensor,
    buffers: Sequence[Received],
    owners: Owners,
    gpus: GpuArrivals | None,
    form: tuple[torch.dtype, list[int], list[int], int],
) -> torch.Tensor:
    """A tensor whose header names a device."""
    if gpus is None:
        raise SerializationError(f"a tensor for {message.device} arrived where only tensors on the CPU are expected")
    dtype, shape, stride, count = form
    buffer = _buffer(buffers, message.buffer) if count else None
    place = gpus.device_of(message, buffer)
    if buffer is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=place)
    key = message.buffer, place
    owner = owners.get(key)
    if owner is None:
        size = len(buffer) if isinstance(buffer, bytes) else buffer.size
        if not message.stride and not message.offset and size == count * dtype.itemsize:
            owners[key] = tensor = gpus.copy_of(buffer, shape, dtype, place)
            return tensor
        owners[key] = owner = gpus.copy_of(buffer, (size,), torch.uint8, place)
    return over_storage(owner.untyped_storage(), message.offset, dtype, shape, stride)


def _buffer(buffers: Sequence[Received], index: int) -> Received:
    if index >= len(buffers):
        raise SerializationError(f"a tensor refers to buffer {index}, but {len(buffers)} arrived")
    return buffers[index]


def _on_host(buffer: Received) -> torch.Tensor:
    """The memory of a buffer, as bytes."""
    if isinstance(buffer, value_pb2.Buffer):
        raise SerializationError("a tensor on the CPU arrived whose memory is on a GPU")
    return buffer.memory if isinstance(buffer, ReceiveBuffer) else _copied(buffer)


def over_storage(
    storage: torch.UntypedStorage, offset: int, dtype: torch.dtype, shape: list[int], stride: list[int]
) -> torch.Tensor:
    """A tensor with elements, in a part of the memory of a buffer."""
    itemsize = dtype.itemsize
    size = storage.nbytes()
    span = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
    if offset % itemsize or offset + span * itemsize > size:
        raise SerializationError(
            f"a tensor of shape {tuple(shape)} and stride {tuple(stride)} at offset {offset} does not fit its buffer "
            f"of {size} bytes"
        )
    # `set_` makes no view: a view of a common base would involve its siblings in autograd's bookkeeping.
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset // itemsize, shape, stride)


def _copied(data: bytes) -> torch.Tensor:
    memory = torch.empty(len(data), dtype=torch.uint8, device=_CPU)
    memmove(memory.data_ptr(), data, len(data))
    return memory


def contiguous_strides(shape: list[int], itemsize: int) -> tuple[list[int], int]:
    """The strides of a contiguous tensor, and its number of elements."""
    if len(shape) > MAX_DIMS:
        raise SerializationError(f"a tensor of {len(shape)} dimensions arrived; torch has at most {MAX_DIMS}")
    stride = []
    step = 1
    count = 1
    for length in reversed(shape):
        if length < 0:
            raise SerializationError(f"a tensor of shape {tuple(shape)} arrived, which has a negative length")
        stride.append(step)
        step *= length or 1
        count *= length
    if step * itemsize > MAX_BYTES:
        raise SerializationError(f"a tensor of shape {tuple(shape)} arrived; it has more bytes than can be counted")
    stride.reverse()
    return stride, count


def _checked_stride(shape: list[int], stride: list[int], itemsize: int) -> list[int]:
    if len(stride) != len(shape) or min(stride) < 0:
        raise SerializationError(f"a tensor of shape {tuple(shape)} and invalid stride {tuple(stride)} arrived")
    # Python's integers do not overflow, so this check ensures that no address computed by torch wraps around.
    if (sum(length * step for length, step in zip(shape, stride, strict=True)) + 1) * itemsize > MAX_BYTES:
        raise SerializationError(f"a tensor of stride {tuple(stride)} arrived; it has more bytes than can be addressed")
    return stride
