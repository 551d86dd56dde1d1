"""Plain values in their most compact form: a table of tensors, and the body that `PlainWriter` wrote.

    entry of the table: dtype (u8, number of `tensors.py`), number of dimensions (u8), flags (u8), 0 (u8), lengths (i64
    each); then the bytes of the tensor, unless the flag SEPARATE says that they are the message's next large buffer

The flag REQUIRES_GRAD means that the tensor requires grad. The table holds dense tensors on the CPU that own their
memory. A value with other tensors, with remote references, or with long strings travels as a protobuf `Value`, which
can express them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_ssize_t, c_void_p, memmove, py_object, pythonapi
from math import prod
from struct import Struct
from struct import error as StructError
from typing import Any, Final

import torch

from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer, TensorBuffer
from rpcdist.rpc._values.plain import FREE_BYTES, PlainWriter, allowed_bytes, read_plain, too_much_for_its_weight
from rpcdist.rpc._values.rebuild import TENSOR_BYTES, contiguous_strides, over_storage
from rpcdist.rpc._values.tensors import DTYPE_CODES, DTYPES, address_of, are_apart
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import MAX_COMPACT_BODY_BYTES

MAX_DIMS: Final = 8  # tensors with more dimensions are not worth a compact form
MAX_TENSORS: Final = 0xFFFF
_SEPARATE, _REQUIRES_GRAD = 1, 2
_FLAGS: Final = _SEPARATE | _REQUIRES_GRAD
_ENTRY: Final = Struct("<BBBB")
_SHAPES: Final = tuple(Struct(f"<{count}q") for count in range(MAX_DIMS + 1))
_ENTRIES: Final = tuple(Struct(f"<BBBB{count}q") for count in range(MAX_DIMS + 1))  # with the lengths
_CPU: Final = torch.device("cpu")

_bytes_at: Any = pythonapi["PyBytes_FromStringAndSize"]  # `ctypes.string_at` is a Python function around the same call
_bytes_at.restype, _bytes_at.argtypes = py_object, (c_void_p, c_ssize_t)


CompactValue = tuple[bytes, Sequence[LargeBuffer]]
"""An outgoing value: the table of its tensors with the plain body, and the buffers beside it."""


def compact_value(writer: PlainWriter) -> CompactValue | None:
    """The value that `writer` wrote, in compact form; None if it has parts that need a `Value`.

    Large tensors are not copied: see `encode_into`.
    """
    body = writer.body
    if writer.rrefs or writer.buffers or len(body) > INLINE_LIMIT:
        return None
    if writer.lists_tensors:  # they travel as runs, which the table cannot express
        return None
    tensors = writer.tensors
    if writer.cost_bytes + TENSOR_BYTES * len(tensors) > FREE_BYTES:  # a `Value` can weigh more than its parts
        return None
    if not tensors:
        return bytes(body), ()
    return compact_tensors(tensors, body)


def compact_tensors(
    tensors: Sequence[torch.Tensor], body: bytes | bytearray = b"", shares_memory: bool = True
) -> CompactValue | None:
    """The table of tensors, followed by a plain body; None if one of them does not fit. See `compact_value`.

    Args:
        shares_memory: whether tensors that share memory must also share it at the receiver, which the table cannot
            express.
    """
    if len(tensors) > MAX_TENSORS:
        return None
    parts: list[bytes | bytearray] = []
    large: list[LargeBuffer] = []
    spans: list[tuple[int, int]] = []
    num_bytes = 0
    for tensor in tensors:
        code = DTYPE_CODES.get(tensor.dtype)
        if (
            code is None
            or type(tensor) is not torch.Tensor
            or not tensor.is_cpu
            or tensor.is_nested  # it has no shape
            or not tensor.is_contiguous()
            or tensor.is_complex()  # it may be a conjugate view
            or tensor.is_neg()
            or len(shape := tensor.shape) > MAX_DIMS
        ):
            return None
        size = tensor.nbytes
        flags = _SEPARATE if size > INLINE_LIMIT else 0
        if tensor.requires_grad:
            flags |= _REQUIRES_GRAD
        parts.append(_ENTRIES[len(shape)].pack(code, len(shape), flags, 0, *shape))
        if size:
            start = address_of(tensor, size)
            spans.append((start, start + size))
            if size > INLINE_LIMIT:
                large.append(TensorBuffer(start, size, (tensor,)))
            else:
                parts.append(_bytes_at(start, size))
                num_bytes += size
    if num_bytes + INLINE_LIMIT > MAX_COMPACT_BODY_BYTES:
        return None
    if shares_memory and len(spans) > 1 and not are_apart(spans):  # only a `Value` keeps memory shared
        return None
    parts.append(body)
    return b"".join(parts), large


def read_compact(
    body: bytes,
    num_tensors: int,
    large: Sequence[ReceiveBuffer],
    on_tensors: Callable[[list[torch.Tensor]], object] | None = None,
) -> object:
    """The value from which `compact_value` was made.

    Args:
        num_tensors: the number of entries in its table.
        large: the buffers that arrived beside it, complete.
        on_tensors: called when the tensors exist, and the value does not yet; it may change them in place.

    Raises:
        SerializationError: the value is damaged, or cannot be rebuilt here.
    """
    if not num_tensors and not large:
        return read_plain(body, [], [], None)
    weight_bytes = len(body) + sum([buffer.size for buffer in large])
    taken_bytes = TENSOR_BYTES * num_tensors + len(body)  # the body is copied: into tensors, or once more
    if taken_bytes > allowed_bytes(weight_bytes):
        raise too_much_for_its_weight(weight_bytes)
    tensors, at = read_compact_tensors(body, num_tensors, large)
    if on_tensors is not None and tensors:
        on_tensors(tensors)
    return read_plain(body[at:], tensors, [], None, weight_bytes, taken_bytes)


def read_compact_tensors(
    body: bytes, num_tensors: int, large: Sequence[ReceiveBuffer]
) -> tuple[list[torch.Tensor], int]:
    """The tensors of the table at the beginning of `body`, and the offset of its end. See `read_compact`."""
    if num_tensors > MAX_TENSORS:
        raise SerializationError(f"a table of {num_tensors} tensors arrived; the limit is {MAX_TENSORS}")
    try:
        if torch.is_inference_mode_enabled():  # a received tensor must be usable by autograd later
            with torch.inference_mode(False):
                return _read_tensors(body, num_tensors, large)
        return _read_tensors(body, num_tensors, large)
    except (StructError, RuntimeError, ValueError, OverflowError, MemoryError) as exc:
        if isinstance(exc, SerializationError):
            raise
        raise SerializationError(f"an arrived tensor cannot be rebuilt here: {exc}") from exc


def _read_tensors(body: bytes, count: int, large: Sequence[ReceiveBuffer]) -> tuple[list[torch.Tensor], int]:
    """The tensors of the table, and the offset of its end."""
    tensors = []
    at = num_large = 0
    for _ in range(count):
        code, num_dims, flags, _ = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        dtype = DTYPES.get(code)
        if dtype is None or num_dims > MAX_DIMS or flags & ~_FLAGS:
            raise SerializationError(
                f"a tensor of dtype number {code}, {num_dims} dimensions and flags {flags} arrived, which torch "
                f"{torch.__version__} or this version of rpcdist does not know"
            )
        shape = list(_SHAPES[num_dims].unpack_from(body, at))
        at += _SHAPES[num_dims].size
        size = prod(shape) * dtype.itemsize
        if 0 < size <= len(body) - at and not flags & _SEPARATE:  # as for most tensors; torch checks the shape
            tensor = torch.empty(shape, dtype=dtype, device=_CPU)
            memmove(tensor.data_ptr(), body[at : at + size], size)
            at += size
            tensors.append(tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor)
            continue
        stride, num_elements = contiguous_strides(shape, dtype.itemsize)
        size = num_elements * dtype.itemsize
        if flags & _SEPARATE:
            if num_large == len(large) or large[num_large].size != size or not size:
                raise SerializationError(f"a tensor of {size} bytes did not arrive as announced")
            tensor = _over_buffer(large[num_large], dtype, shape, stride)
            num_large += 1
        elif size:
            raise SerializationError(f"a tensor of {size} bytes arrived that is cut off")
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_CPU)
        tensors.append(tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor)
    if num_large != len(large):
        raise SerializationError(f"{len(large)} large buffers arrived for a value that has {num_large}")
    return tensors, at


def _over_buffer(buffer: ReceiveBuffer, dtype: torch.dtype, shape: list[int], stride: list[int]) -> torch.Tensor:
    """A contiguous tensor that fills a buffer."""
    view = buffer.borrowed_view
    if view is None:
        return over_storage(buffer.memory.untyped_storage(), 0, dtype, shape, stride)
    tensor = torch.frombuffer(view, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.resize_(shape)
